"""This rank's records on another node, before it contributes to the gate.

A record is sent as soon as it is made, over a connection that lives as long as its keeper, and the gate
waits for the keeper's word on the newest one, at most `limit_s`. A word that does not come in time lets the
step go on: that is told once per stretch, and while it lasts a gate waits only now and then, so that a slow
keeper costs no step its time. A connection is made in a thread of its own; everything else is the user's
thread. It does not know what a record says.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol

from keepstep.core.events import KeeperMissed, KeeperRegained
from keepstep.errors import WireError
from keepstep.trainer.keeper_connection import Connector, drained
from keepstep.trainer.peer import Own, Route
from keepstep.wire import framing
from keepstep.wire.keeping import ACK_BYTES, RecordSent, pack_record, unpack_ack
from keepstep.wire.page import Page

LEAST_SEND_S = 0.05
# A keeper that says nothing for so long is connected to anew.
SILENCE_LIMIT_S = 5.0
# While a stretch lasts: how long the gates do not wait at all, growing.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 8.0

_ACK_FRAME_BYTES = 4 + ACK_BYTES


class Owner(Protocol):
    """What is asked of the session."""

    @property
    def worker(self) -> int: ...

    @property
    def rank(self) -> int | None: ...

    @property
    def generation_number(self) -> int: ...

    @property
    def interrupted(self) -> bool:
        """Whether this gate is over anyway."""

    def say(self, text: str) -> None: ...


class Keeper:
    """Sends records and awaits their acknowledgement. Without a route every call returns at once.

    `dial(route, own)` makes a connection; `tell` takes KeeperMissed and KeeperRegained.
    `spent_s`: what the newest step spent in here.
    """

    def __init__(
        self,
        owner: Owner,
        page: Page,
        limit_s: float,
        dial: Callable[[Route, Own], socket.socket],
        tell: Callable[[Any], object],
    ) -> None:
        self.spent_s = self._spending_s = 0.0
        self._owner = owner
        self._page = page
        self._limit_s = limit_s
        self._tell = tell
        self._connector = Connector(dial)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._line: _Line | None = None
        self._failure = ""
        self._missed = ""  # why, while a stretch lasts
        self._misses = 0
        self._next_wait_s = 0.0

    @property
    def route(self) -> Route | None:
        """Where the records go."""
        return self._connector.route

    def turn(self, route: Route | None) -> None:
        """Another keeper (or none) from now on. From any thread; it does not wait."""
        self._connector.turn(route)

    def interrupt(self) -> None:
        """A newer generation was announced: let a waiting gate look. From any thread."""
        os.eventfd_write(self._wake, 1)

    def send(self, kind: str, step: int, lineage: str, payload: bytes) -> None:
        """A record is about to be written: let it travel meanwhile."""
        if self.route is None and self._line is None:
            return
        started_s = time.monotonic()
        line = self._current_line()
        if line is not None:
            self._guarded(line, lambda: self._send(line, kind, step, lineage, payload))
        self._spending_s += time.monotonic() - started_s

    def await_kept(self) -> bool:
        """Wait until the newest record is acknowledged. False when the step goes on without that."""
        route = self.route
        if route is None:
            return True
        started_s = time.monotonic()
        until_s = started_s + (self._limit_s if started_s >= self._next_wait_s else 0.0)
        line = self._line
        if line is None and self._connector.wait(until_s, self._wake):
            line = self._current_line()
        kept = line is not None and self._guarded(line, lambda: self._await_ack(line, until_s)) is True
        self._judge(kept, route, started_s)
        self.spent_s = self._spending_s + time.monotonic() - started_s
        self._spending_s = 0.0
        return kept

    # ---- sending --------------------------------------------------------------------------------

    def _current_line(self) -> _Line | None:
        """The connection in use. A new one begins with the newest records in the page: it replaces a keeper
        that is gone, and all that lay there."""
        if self._line is not None and self._line.route != self.route:
            self._line.close()
            self._line = None
        made = self._connector.take()
        if made is not None:
            line = self._line = _Line(*made, self._wake)
            self._failure = ""
            self._guarded(line, lambda: self._send_page(line))
        return self._line

    def _send_page(self, line: _Line) -> None:
        for record in reversed(self._page.records()):
            self._send_now(line, record.kind, record.step, record.lineage, record.payload)

    def _send(self, line: _Line, kind: str, step: int, lineage: str, payload: bytes) -> None:
        if line.behind and self._missed:
            line.read_acks()
            if line.behind:
                line.skipped = True  # do not heap up what a slow keeper has not taken yet
                return
        if line.skipped:
            line.skipped = False
            self._send_page(line)  # what was left out, as far as it can still be wanted
        self._send_now(line, kind, step, lineage, payload)

    def _send_now(self, line: _Line, kind: str, step: int, lineage: str, payload: bytes) -> None:
        rank = self._owner.rank
        assert rank is not None
        record = RecordSent(
            sequence=line.sequence + 1,
            rank=rank,
            generation=self._owner.generation_number,
            kind=kind,
            step=step,
            lineage=lineage,
            payload=payload,
        )
        line.send(record, max(self._limit_s, LEAST_SEND_S))

    def _guarded(self, line: _Line, work: Callable[[], bool | None]) -> bool | None:
        """A connection that fails is given up and made anew, out of the way."""
        try:
            return work()
        except (OSError, WireError) as error:
            self._failure = f"{line.route.node}: {error or type(error).__name__}"
            line.close()
            if self._line is line:
                self._line = None
            self._connector.again(line.route)
            return None

    # ---- waiting --------------------------------------------------------------------------------

    def _await_ack(self, line: _Line, until_s: float) -> bool:
        line.read_acks()
        while line.behind and not self._owner.interrupted and line.wait(until_s):
            pass
        if line.behind and time.monotonic() - line.heard_s > SILENCE_LIMIT_S:
            raise WireError(f"no acknowledgement for {SILENCE_LIMIT_S:.0f} s")
        return not line.behind and not line.skipped and line.accepted

    def _judge(self, kept: bool, route: Route, started_s: float) -> None:
        if kept:
            self._misses, self._next_wait_s = 0, 0.0
            if self._missed:
                self._missed = ""
                self._owner.say(f"this rank's records are kept by {route.node} again")
                self._tell(KeeperRegained(worker=self._owner.worker))
            return
        if self._owner.interrupted:
            return  # the gate is over, whatever was kept
        if started_s >= self._next_wait_s:
            pause_s = min(FIRST_PAUSE_S * 2**self._misses, LAST_PAUSE_S)
            self._misses, self._next_wait_s = min(self._misses + 1, 10), time.monotonic() + pause_s
        if not self._missed:
            self._missed = self._reason(route)
            self._owner.say(f"this rank's records are not kept elsewhere: {self._missed}")
            self._tell(KeeperMissed(worker=self._owner.worker, reason=self._missed))

    def _reason(self, route: Route) -> str:
        if self._line is None:
            told = self._failure or self._connector.failure
            return told or f"{route.node} was not connected within {self._limit_s:g} s"
        if not self._line.behind and not self._line.accepted:
            return f"{route.node} has no room for them"
        return f"{route.node} did not acknowledge them within {self._limit_s:g} s"


class _Line:
    """One connection to a keeper. Every call is the user's thread's."""

    def __init__(self, route: Route, sock: socket.socket, wake: int) -> None:
        self.route = route
        self.sequence = 0
        self.heard_s = time.monotonic()
        self.skipped = False
        self.accepted = True
        self._socket = sock
        self._last = b""
        self._acked = 0
        self._received = bytearray()
        self._wake = wake
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(wake, select.POLLIN)

    @property
    def behind(self) -> bool:
        """Whether something that was sent is not acknowledged."""
        return self._acked < self.sequence

    def send(self, record: RecordSent, timeout_s: float) -> None:
        """Raises OSError; after a partial send the connection is of no use."""
        if not self.behind:
            self.heard_s = time.monotonic()  # until now there was nothing to be heard
        data = pack_record(record, self._last)
        self.sequence, self._last = record.sequence, record.payload
        self._socket.settimeout(timeout_s)
        framing.send_frame(self._socket, data)

    def wait(self, until_s: float) -> bool:
        """Wait for an acknowledgement and read it, or for a wake. False at the deadline."""
        left_ms = (until_s - time.monotonic()) * 1000
        if left_ms <= 0:
            return False
        events = [descriptor for descriptor, _ in self._poll.poll(left_ms + 1)]
        if self._wake in events:
            drained(self._wake)
        if events:
            self.read_acks()
        return bool(events)

    def read_acks(self) -> None:
        """Take what has come, without waiting. Raises OSError when the keeper is gone."""
        self._socket.settimeout(0)
        while True:
            try:
                data = self._socket.recv(4096)
            except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
            if not data:
                raise ConnectionResetError("it closed the connection")
            self._received += data
        while len(self._received) >= _ACK_FRAME_BYTES:
            self._acked, self.accepted = unpack_ack(bytes(self._received[4:_ACK_FRAME_BYTES]))
            del self._received[:_ACK_FRAME_BYTES]
            self.heard_s = time.monotonic()

    def close(self) -> None:
        self._socket.close()

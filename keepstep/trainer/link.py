"""The worker's line to its agent: one authenticated Unix socket, a thread that listens.

When the agent is gone training goes on, and the line is tried again: a restarted agent is told anew what
its predecessor may not have passed on. After the orphan timeout the process ends, so that nothing is ever
orphaned. Beyond that it knows nothing of what the messages mean.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keepstep.errors import ProtectionError, WireError
from keepstep.wire import codec, framing
from keepstep.wire.messages import (
    PROTOCOL_VERSION,
    TOLD_AGAIN,
    Fenced,
    Fetch,
    Fetched,
    Hello,
    JournalKept,
    Welcome,
)

HANDSHAKE_TIMEOUT_S = 30.0
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0
LAST_WORD_TIMEOUT_S = 10.0
# The newest of each kind is told again to an agent that comes back: whether the one before it had passed it
# on cannot be known. All of them may be heard twice. Nothing else is kept, so the box is bounded.
_TOLD_AGAIN = (JournalKept, *TOLD_AGAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this process is, from the environment that its agent set."""

    socket_path: str
    token: str
    job: str
    worker: int
    node: str
    slot: int
    page_path: str
    run_dir: str

    @classmethod
    def from_environment(cls) -> Identity:
        """Raises ProtectionError naming the variable that is missing."""
        try:
            return cls(
                socket_path=os.environ["KEEPSTEP_SOCKET"],
                token=os.environ["KEEPSTEP_TOKEN"],
                job=os.environ["KEEPSTEP_JOB"],
                worker=int(os.environ["KEEPSTEP_WORKER"]),
                node=os.environ.get("KEEPSTEP_NODE", ""),
                slot=int(os.environ.get("KEEPSTEP_SLOT", "0")),
                page_path=os.environ["KEEPSTEP_PAGE"],
                run_dir=os.environ["KEEPSTEP_RUN_DIR"],
            )
        except KeyError as missing:
            raise ProtectionError(
                f"{missing.args[0]} is not set: start the script with `keepstep run`."
            ) from None

    def hello(self, role: Any) -> Hello:
        """The first message on a connection."""
        return Hello(
            version=PROTOCOL_VERSION, token=self.token, worker=self.worker, pid=os.getpid(), role=role
        )


class Link:
    """Send from any thread; `on_message` runs on the listening thread.

    `on_orphaned(seconds)` runs there too, when no agent came back in time. Raises ProtectionError when the
    agent is out of reach or refuses this worker.
    """

    def __init__(
        self,
        identity: Identity,
        on_message: Callable[[Any], None],
        on_orphaned: Callable[[float], None],
    ) -> None:
        self.identity = identity
        self._on_message = on_message
        self._on_orphaned = on_orphaned
        self._requests = itertools.count(1)
        self._unanswered: dict[int, Fetch] = {}
        self._answers: dict[int, Fetched] = {}
        self._answered = threading.Condition()
        self._sending = threading.Lock()
        self._told: OrderedDict[type, Any] = OrderedDict()
        self._connected = True
        self._comebacks = 0
        try:
            self._socket, first = self._greet()
        except (OSError, WireError) as error:
            raise ProtectionError(
                f"the agent at {identity.socket_path} cannot be reached: {error}"
            ) from error
        if isinstance(first, Fenced):
            raise ProtectionError(f"the agent refused worker {identity.worker}: {first.reason}")
        if not isinstance(first, Welcome):
            raise ProtectionError("the agent closed the connection: is KEEPSTEP_TOKEN this job's token?")
        self.welcome = first
        self._thread = threading.Thread(target=self._listen, name="keepstep-link", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def send(self, message: Any) -> bool:
        """Send one message; False when the agent is gone (its absence is dealt with here)."""
        data = codec.encode(message)
        with self._sending:
            if isinstance(message, _TOLD_AGAIN):
                self._told[type(message)] = message
                self._told.move_to_end(type(message))
            return self._put(data)

    def deliver(self, message: Any) -> bool:
        """Send the last word of a process that ends: an agent that is just restarting is waited for."""
        before = self._comebacks
        if self.send(message):
            return True
        with self._answered:
            return self._answered.wait_for(lambda: self._comebacks > before, LAST_WORD_TIMEOUT_S)

    def fetch(self, what: Any, rank: int, *, lineage: str = "", timeout_s: float = 30.0) -> Fetched:
        """Ask the agent for a rank's record or journal. Raises ProtectionError when no answer comes.

        Time without an agent does not count: the orphan timeout bounds it.
        """
        number = next(self._requests)
        question = Fetch(request=number, what=what, rank=rank, lineage=lineage)
        with self._answered:
            self._unanswered[number] = question
        self.send(question)
        deadline_s = time.monotonic() + timeout_s
        with self._answered:
            try:
                while number not in self._answers:
                    if not self._connected:
                        deadline_s = time.monotonic() + timeout_s
                    left_s = deadline_s - time.monotonic()
                    if left_s <= 0:
                        raise ProtectionError(
                            f"the agent did not send the {what} of rank {rank} in {timeout_s} s"
                        )
                    self._answered.wait(min(left_s, 1.0))
                return self._answers.pop(number)
            finally:
                del self._unanswered[number]

    # ---- the connection -------------------------------------------------------------------------

    def _greet(self) -> tuple[socket.socket, Any]:
        """A new connection and the agent's first word on it (None: it closed). Raises OSError, WireError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(HANDSHAKE_TIMEOUT_S)
            connection.connect(self.identity.socket_path)
            framing.send_frame(connection, codec.encode(self.identity.hello("control")))
            frame = framing.recv_frame(connection)
            connection.settimeout(None)
            return connection, None if frame is None else codec.decode(frame)
        except BaseException:
            connection.close()
            raise

    def _put(self, data: bytes) -> bool:
        try:
            framing.send_frame(self._socket, data)
        except OSError:
            return False
        return True

    def _listen(self) -> None:
        while True:
            self._hear_all()
            lost_s = time.monotonic()
            self._set_connected(False)
            # A later agent may mean it otherwise; the one that has gone set the limit.
            limit_s = self.welcome.orphan_timeout_s
            if not self._come_back(lost_s + limit_s):
                self._on_orphaned(limit_s)
                return

    def _hear_all(self) -> None:
        """Until the connection ends, whatever the reason: an agent that sends rubbish is no agent."""
        try:
            while (frame := framing.recv_frame(self._socket)) is not None:
                self._hear(codec.decode(frame))
        except (OSError, WireError):
            pass

    def _hear(self, message: Any) -> None:
        if not isinstance(message, Fetched):
            self._on_message(message)
            return
        with self._answered:
            if message.request in self._unanswered:  # asked twice, it may be answered twice
                self._answers.setdefault(message.request, message)  # one that was asked again has two
                self._answered.notify_all()

    def _come_back(self, deadline_s: float) -> bool:
        """Connect again and say what may have been lost; False when nobody was there until the deadline."""
        backoff_s = FIRST_BACKOFF_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(backoff_s, left_s))
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)
            try:
                connection, first = self._greet()
            except (OSError, WireError):
                continue
            if isinstance(first, Fenced):
                self._on_message(first)
            if not isinstance(first, Welcome):
                connection.close()
                continue
            with self._sending:
                self._socket.close()
                self._socket, self.welcome = connection, first
                with self._answered:
                    questions = list(self._unanswered.values())
                for message in [*self._told.values(), *questions]:
                    self._put(codec.encode(message))
            self._set_connected(True)
            return True
        return False

    def _set_connected(self, connected: bool) -> None:
        with self._answered:
            self._connected = connected
            self._comebacks += connected
            self._answered.notify_all()

"""The agent's WebSocket to the controller: hello, actions in, events out, and again after a loss.

While the controller is away events queue in the outbox; nothing here decides what they mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage

from keepstep.agent.outbox import Outbox
from keepstep.core.events import Event
from keepstep.errors import ProtectionError, WireError
from keepstep.wire.codec import decode, encode
from keepstep.wire.framing import MAX_FRAME_BYTES
from keepstep.wire.messages import AgentHello, AgentWelcome, Answer, Heartbeat
from keepstep.wire.times import aged
from keepstep.wire.tls import TlsFiles, explain

CONNECT_TIMEOUT_S = 5.0
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 2.0
WATCH_INTERVAL_S = 0.25
PING_INTERVAL_S = 5.0
PING_TIMEOUT_S = 15.0
LEFT_IN_ORDER = 4001  # said by an agent that will not come back
# Close codes by which a controller refuses an agent for good: policy violation, and the private range.
_REFUSAL_CODES = (1008, *range(4000, 5000))
# Of those, what a stranger would say that listens where our controller was: another token, another protocol.
_STRANGERS_CODES = (1008, 4400, 4401)

log = logging.getLogger(__name__)


class ControllerConnection:
    """Keeps one connection alive until cancelled.

    `on_welcome` runs at each (re)connection, before the first action; `on_action` for each message.
    `patient()`: there are workers to look after, so a stranger in the controller's place is no reason to end.
    `lost_since_s`: when the controller was last there (monotonic clock); None while connected.
    """

    def __init__(
        self,
        url: str,
        hello: Callable[[], AgentHello],
        on_welcome: Callable[[AgentWelcome], None],
        on_action: Callable[[Any], None],
        *,
        tls: TlsFiles | None = None,
        say: Callable[[str, str], None] | None = None,
        patient: Callable[[], bool] = lambda: False,
    ) -> None:
        self._tls = tls
        self._say = say or (lambda text, level: None)
        self._trouble = ""
        self._welcomed_before = False
        self._socket: ClientConnection | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._url = url
        self._hello = hello
        self._on_welcome = on_welcome
        self._on_action = on_action
        self._patient = patient
        self._heartbeat_s = 1.0
        self._node = ""
        self._outbox = Outbox()
        self._backoff_s = FIRST_BACKOFF_S
        self._idle = asyncio.Event()
        self.lost_since_s: float | None = time.monotonic()
        self._spoke_s = 0.0  # when something was last sent to it
        self._heard_s = 0.0  # when the controller last answered, while connected

    def send(self, event: Event | Answer) -> None:
        """Queue an event (or an answer); it goes out at once when the controller is there."""
        self._idle.clear()
        self._outbox.put(event)

    @property
    def unsent_exits(self) -> set[int]:
        """Workers of whose end the controller has not been told yet."""
        return self._outbox.exits()

    def leave(self, reason: str) -> None:
        """Say that this agent will not come back, and why; nothing is sent afterwards."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._say_farewell(reason))

    async def _say_farewell(self, reason: str) -> None:
        if self._socket is not None:
            await self._socket.close(LEFT_IN_ORDER, reason.encode("ascii", "replace")[:120].decode())

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued was sent; False at the timeout."""
        if self._leaving is not None:
            await asyncio.wait({self._leaving}, timeout=timeout_s)
            return True
        if not len(self._outbox):
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return not len(self._outbox)

    async def miss(self, limit_s: float) -> None:
        """Raises ProtectionError when the controller has been away for `limit_s` seconds."""
        while self.lost_since_s is None or time.monotonic() - self.lost_since_s <= limit_s:
            await asyncio.sleep(WATCH_INTERVAL_S)
        raise ProtectionError(f"the controller was gone for {limit_s:g} s")

    async def run(self) -> None:
        """Connect, talk, connect again, until `leave`. Raises ProtectionError when refused for good."""
        while self._leaving is None:
            try:
                await self._talk()
            except (OSError, TimeoutError, InvalidHandshake, InvalidMessage) as error:
                self._tell_trouble(error)
            except WireError as error:
                log.error("the controller sent what this agent does not understand: %s", error)
            except ConnectionClosed as error:
                log.debug("the controller's connection ended: %s", error)
            self._socket = None
            if self._leaving is not None:
                return
            if self.lost_since_s is None:
                # A connection that was cut, and not ended, was lost long before anybody noticed.
                now_s = time.monotonic()
                was_cut = now_s - self._heard_s > PING_TIMEOUT_S
                self.lost_since_s = self._heard_s if was_cut else now_s
                self._say(
                    "the controller is away: training goes on, what happens waits for its return", "warning"
                )
            # Not all of them at the same moment, when a controller comes back.
            await asyncio.sleep(self._backoff_s * random.uniform(0.8, 1.2))
            self._backoff_s = min(2 * self._backoff_s, LAST_BACKOFF_S)

    async def _talk(self) -> None:
        async with connect(
            self._url,
            proxy=None,  # the controller is reached directly, whatever http_proxy says
            compression=None,
            max_size=MAX_FRAME_BYTES,
            open_timeout=CONNECT_TIMEOUT_S,
            ping_interval=PING_INTERVAL_S,
            ping_timeout=PING_TIMEOUT_S,
            close_timeout=1,
            ssl=self._tls.client(by_name=True) if self._tls is not None else None,
        ) as socket:
            welcome = await self._greet(socket)
            self._heartbeat_s = welcome.heartbeat_s
            self._on_welcome(welcome)
            if self._trouble or self._welcomed_before:
                self._say("the controller is back", "info")
            self._trouble, self._welcomed_before = "", True
            self._socket, self.lost_since_s, self._heard_s = socket, None, time.monotonic()
            self._backoff_s = FIRST_BACKOFF_S
            speakers = [
                asyncio.create_task(self._send_all(socket)),
                asyncio.create_task(self._beat(socket)),
                asyncio.create_task(self._note_answers(socket)),
            ]
            try:
                async for data in socket:
                    message = _decoded(data)
                    if isinstance(message, AgentWelcome):  # there are more agents now: speak less often
                        self._heartbeat_s = message.heartbeat_s
                    self._on_action(message)
            except asyncio.CancelledError:
                await socket.close()  # the agent leaves: a farewell, not the 1011 of a failure
                raise
            finally:
                for speaker in speakers:
                    speaker.cancel()
                    with contextlib.suppress(asyncio.CancelledError, ConnectionClosed):
                        await speaker

    def _tell_trouble(self, error: Exception) -> None:
        """Each new reason once: an expired certificate is worth a line, the tenth refused connection is not."""
        log.debug("no connection to the controller: %s", error)
        trouble = explain(error, "the controller") if isinstance(error, OSError) else None
        if trouble is not None:
            self._say_once(trouble)

    def _say_once(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._say(trouble, "error")
            self._trouble = trouble

    async def _greet(self, socket: ClientConnection) -> AgentWelcome:
        try:
            hello = self._hello()
            self._node = hello.node
            await socket.send(encode(hello))
            welcome = _decoded(await asyncio.wait_for(socket.recv(), CONNECT_TIMEOUT_S))
        except ConnectionClosed as error:
            if error.rcvd is not None and error.rcvd.code in _REFUSAL_CODES:
                reason = error.rcvd.reason or f"code {error.rcvd.code}"
                if error.rcvd.code in _STRANGERS_CODES and self._patient():
                    self._say_once(f"whoever answers at {self._url} is not this job's controller: {reason}")
                    raise
                raise ProtectionError(f"the controller refused this agent: {reason}") from None
            raise
        if not isinstance(welcome, AgentWelcome):
            raise WireError(f"the controller answered {type(welcome).__name__} to the agent's hello")
        return welcome

    async def _beat(self, socket: ClientConnection) -> None:
        """Say that this agent is there, whatever else waits to be sent; what was sent just now has said so."""
        await socket.send(encode(Heartbeat(node=self._node, sent_ns=time.time_ns())))
        self._spoke_s = time.monotonic()
        while True:
            await asyncio.sleep(max(0.0, self._spoke_s + self._heartbeat_s - time.monotonic()))
            if time.monotonic() < self._spoke_s + self._heartbeat_s:
                continue
            await socket.send(encode(Heartbeat(node=self._node, sent_ns=time.time_ns())))
            self._spoke_s = time.monotonic()

    async def _note_answers(self, socket: ClientConnection) -> None:
        """Whether the other side is there: it sends nothing of its own accord for hours. The library ends a
        connection without answers, and does not say since when there were none."""
        while True:
            await (await socket.ping())
            self._heard_s = time.monotonic()
            await asyncio.sleep(PING_INTERVAL_S)

    async def _send_all(self, socket: ClientConnection) -> None:
        while True:
            tickets, event = await self._outbox.next(self._node)
            try:
                await socket.send(encode(aged(event, time.monotonic())))
                self._spoke_s = time.monotonic()
            except WireError as error:  # one event that cannot be written must not hold up the others
                log.error("an event was lost: %s", error)
            self._outbox.done(*tickets)
            if not len(self._outbox):
                self._idle.set()


def _decoded(data: str | bytes) -> Any:
    return decode(data.encode() if isinstance(data, str) else data)

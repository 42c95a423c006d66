"""The controller's side of the agents' connections: who may connect, what is queued, what comes in.

A link outlives its connection: what is sent while an agent is away waits for it, up to a bound. It does
not know what the messages decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

from keepstep.core import events as evt
from keepstep.core.actions import Announce
from keepstep.core.health_events import SignalSeen
from keepstep.core.move_events import LendReady, MoveReady
from keepstep.errors import WireError
from keepstep.wire.codec import decode, encode
from keepstep.wire.messages import PROTOCOL_VERSION, AgentHello, AgentWelcome, Answer, Ask, Heartbeat
from keepstep.wire.times import placed
from keepstep.wire.tokens import read_token, same_token

log = logging.getLogger("keepstep.controller")


HELLO_TIMEOUT_S = 10.0
MAX_WAITING_MESSAGES = 1024
MAX_QUESTIONS = 64
LATE_S = 2.0  # without a word, from an agent that sends heartbeats

CLOSED_WRONG_TOKEN = 4401
CLOSED_PROTOCOL = 4400
CLOSED_READ_ONLY = 4403
CLOSED_UNREACHABLE = 4404
CLOSED_TAKEN = 4410
CLOSED_REPLACED = 4409
LEFT_IN_ORDER = 4001  # what an agent says that will not come back

# Starlette raises RuntimeError for a send after the close.
_CONNECTION_ENDED = (WireError, WebSocketDisconnect, RuntimeError, OSError)

# What an agent may report. The rest of the events are the controller's own.
AGENT_EVENTS = (
    evt.WorkerParked,
    evt.SpareChecked,
    evt.WorkerExited,
    evt.WorkerSuspected,
    evt.Complained,
    evt.NodeProgressed,
    evt.KeeperMissed,
    evt.KeeperRegained,
    LendReady,
    MoveReady,
    SignalSeen,
    evt.VerdictReached,
    evt.NodeVerdict,
    evt.StateReceived,
    evt.Resumed,
    evt.NodeResumed,
    evt.FingerprintTaken,
    evt.StateDescribed,
    evt.SelfCheckFailed,
    evt.SelfCheckPassed,
    evt.ScriptFailed,
    evt.UsageRefused,
    evt.WorkerFinished,
    evt.ProbeAnswered,
)


class AgentLink:
    """What is on its way to one node's agent. The newest connection counts."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.pid: int | None = None
        self.overflowed = False
        self._waiting: asyncio.Queue[object] = asyncio.Queue(MAX_WAITING_MESSAGES)
        self.connection = 0  # which one counts
        self.told: Announce | None = None  # the newest announcement on this connection
        self.muted = False  # until the machine has heard of the newest connection, nothing is meant for it
        self._unsent: object | None = None
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._next_request = 1
        self.heartbeat_s = 0.0  # how often it was told to say that it is there
        self.late = 0  # how often it said so later than that explains
        self._beats = False
        self._heard_s = time.monotonic()
        self._delivering = False

    @property
    def connected(self) -> bool:
        return bool(self._tasks)

    @property
    def heard_s(self) -> float:
        """When this agent last said anything; now, while we are the ones who do not listen to it."""
        return time.monotonic() if self._delivering else self._heard_s

    async def deliver(self, message: evt.Event, deliver: Deliver) -> None:
        """Pass an event on. It may take a while, and the agent's next heartbeats wait behind it."""
        self._delivering = True
        try:
            await deliver(self, message)
        finally:
            self._delivering = False

    def send(self, message: object) -> None:
        """Queue a message, or one encoded already. A full queue marks the link as overflowed: that agent no
        longer listens."""
        try:
            self._waiting.put_nowait(message)
        except asyncio.QueueFull:
            self.overflowed = True

    def forget_unsent(self) -> None:
        """Drop what an earlier connection did not take: its agent may not be the one that listens now."""
        self._unsent, self.overflowed, self.muted, self.told = None, False, True, None
        self.connection += 1
        while not self._waiting.empty():
            self._waiting.get_nowait()
            self._waiting.task_done()

    async def ask(self, what: str, about: Mapping[str, Any], timeout_s: float) -> Answer:
        """Ask the agent (see `keepstep.agent.questions`). A failure is an answer that is not `ok`."""
        request, self._next_request = self._next_request, self._next_request + 1
        if not self.connected or len(self._asked) >= MAX_QUESTIONS:
            why = "has too many open questions" if self.connected else "is not connected"
            return Answer(request=request, ok=False, detail=f"the agent of {self.node} {why}")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[request] = answer
        self.send(Ask(request=request, what=what, about=about))
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            detail = f"the agent of {self.node} did not answer within {timeout_s:g} s"
            return Answer(request=request, ok=False, detail=detail)
        finally:
            del self._asked[request]

    def hear(self, message: object) -> bool:
        """Take what is for this link alone: True when the message was no event for the machine."""
        now_s = time.monotonic()
        self.late += self._beats and now_s - self._heard_s > LATE_S
        self._beats = self._beats or isinstance(message, Heartbeat)
        self._heard_s = now_s
        if isinstance(message, Answer):
            asked = self._asked.get(message.request)
            if asked is not None and not asked.done():
                asked.set_result(message)
        return isinstance(message, (Answer, Heartbeat))

    async def drained(self) -> None:
        """Returns when everything has been sent (call with a timeout)."""
        await self._waiting.join()

    def attach(self, socket: WebSocket, deliver: Deliver) -> tuple[asyncio.Task[None], ...]:
        """Speak over this connection from now on; an older one is given up."""
        for task in self._tasks:
            task.cancel()
        pump = asyncio.create_task(self._pump(socket), name=f"to-agent-{self.node}")
        read = asyncio.create_task(_read(socket, self, deliver), name=f"from-agent-{self.node}")
        self._tasks = (pump, read)
        self._heard_s = time.monotonic()
        return self._tasks

    def drop(self) -> None:
        """End the connection: its agent comes back and says what lives on its node."""
        for task in self._tasks:
            task.cancel()

    def detach(self, tasks: tuple[asyncio.Task[None], ...]) -> None:
        """A connection ended; when a newer one has replaced it, that one stays."""
        if self._tasks is tasks:
            self._tasks = ()

    async def _pump(self, socket: WebSocket) -> None:
        """Send what waits, in order, until cancelled; a message counts as sent when the socket took it."""
        while True:
            if self._unsent is None:
                self._unsent = await self._waiting.get()
            unsent = self._unsent
            await socket.send_bytes(unsent if isinstance(unsent, bytes) else encode(unsent))
            self._unsent = None
            self._waiting.task_done()


Deliver = Callable[[AgentLink, Any], Awaitable[None]]


async def greet(socket: WebSocket, token: str) -> AgentHello | None:
    """Accept a connection and check its first message; None (and closed, with the reason) when it may not stay."""
    await socket.accept()
    try:
        hello = decode(await asyncio.wait_for(_receive(socket), HELLO_TIMEOUT_S))
        if not isinstance(hello, AgentHello):
            raise WireError(f"expected AgentHello, got {type(hello).__name__}")
    except (TimeoutError, WireError) as error:
        await refuse(socket, CLOSED_PROTOCOL, str(error) or "no AgentHello in time")
        return None
    except WebSocketDisconnect:
        return None
    if same_token(hello.token, read_token(token)):
        await refuse(socket, CLOSED_READ_ONLY, "this token may only read: an agent needs the job's own token")
        return None
    if not same_token(hello.token, token):
        await refuse(socket, CLOSED_WRONG_TOKEN, "the token does not match this job's")
        return None
    if hello.version != PROTOCOL_VERSION:
        reason = f"agent speaks protocol {hello.version}, this controller {PROTOCOL_VERSION}: install the same Keepstep"
        await refuse(socket, CLOSED_PROTOCOL, reason)
        return None
    return hello


def joined(hello: AgentHello) -> evt.AgentJoined:
    """What the machine hears of an agent that was admitted."""
    return evt.AgentJoined(
        node=hello.node,
        slots=hello.slots,
        workers=hello.workers,
        exited=hello.exited,
        finished=hello.finished,
        labels=hello.labels,
        peer=hello.peer,
    )


async def converse(socket: WebSocket, link: AgentLink, welcome: AgentWelcome, deliver: Deliver) -> str | None:
    """Speak with a greeted agent until it leaves. `deliver` may make it wait: that is the back-pressure.

    Returns the agent's own words when it left for good; None when it may come back.
    """
    await socket.send_bytes(encode(welcome))
    tasks = link.attach(socket, deliver)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        link.detach(tasks)
        for task in tasks:
            task.cancel()
        outcomes: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
    reason = next((str(outcome) for outcome in outcomes if isinstance(outcome, WireError)), None)
    if reason is not None:
        log.warning("agent of %s: %s", link.node, reason)
        await refuse(socket, CLOSED_PROTOCOL, reason)
    else:
        await refuse(socket, CLOSED_REPLACED, "closed")
    for outcome in outcomes:
        if isinstance(outcome, Exception) and not isinstance(outcome, _CONNECTION_ENDED):
            raise outcome
    ends = [one for one in outcomes if isinstance(one, WebSocketDisconnect) and one.code == LEFT_IN_ORDER]
    return (ends[0].reason or "it was told to") if ends else None


async def _read(socket: WebSocket, link: AgentLink, deliver: Deliver) -> None:
    while True:
        message = placed(decode(await _receive(socket)), time.monotonic())
        if link.hear(message):
            continue
        if not isinstance(message, AGENT_EVENTS):
            raise WireError(f"an agent may not send {type(message).__name__}")
        await link.deliver(message, deliver)


async def _receive(socket: WebSocket) -> bytes:
    raw = await socket.receive()
    if raw["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(raw.get("code", 1005), raw.get("reason"))
    data = raw.get("bytes")
    return data if isinstance(data, bytes) else str(raw.get("text") or "").encode("utf-8", "replace")


async def refuse(socket: WebSocket, code: int, reason: str) -> None:
    """Close with a reason; a peer that is already gone is no error."""
    with contextlib.suppress(RuntimeError, WebSocketDisconnect, OSError):
        await socket.close(code, reason.encode("ascii", "replace")[:120].decode())

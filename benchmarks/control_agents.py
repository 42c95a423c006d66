"""Simulated agents for control.py: they speak the real protocol over real sockets, and have no workers.

Each answers for its workers as a healthy node would: parked at once, on with a new generation at once. It says
something as often as the controller asks it to (1 Hz in a fleet of 2,000): while steps go on that is its workers'
progress, as with the real agent, which sends a heartbeat only when it has nothing else to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from keepstep.core.actions import Announce, KillWorker, StandBy, StartWorker
from keepstep.core.events import NodeProgressed, Resumed, VerdictReached, WorkerExited, WorkerParked
from keepstep.core.together import joined
from keepstep.wire.changes import changed
from keepstep.wire.codec import decode, encode
from keepstep.wire.framing import MAX_FRAME_BYTES
from keepstep.wire.messages import (
    PROTOCOL_VERSION,
    AgentHello,
    AgentWelcome,
    AnnounceChange,
    Answer,
    Ask,
    Heartbeat,
)

SETUP_STEPS = 2
STEP_S = 1.0


class Fleet:
    """All simulated agents, and when each heard of the newest generation."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.token = token
        self.agents: list[SimulatedAgent] = []
        self.newest: Announce | None = None
        self.places: set[int] = set()
        self.step = 0  # committed steps of every rank: one a second
        self.target = 0  # the step that the newest generation goes on with
        self.heard = 0
        self._training: asyncio.Task[None] | None = None
        self.first_heard_s = 0.0
        self.all_heard = asyncio.Event()
        self.failures: list[str] = []

    async def start(self, nodes: int, slots: int, at_once: int = 50) -> None:
        """Connect every agent; returns when all were welcomed."""
        gate = asyncio.Semaphore(at_once)

        async def one(agent: SimulatedAgent) -> None:
            async with gate:
                await agent.open()

        self.agents = [SimulatedAgent(self, f"node{number}", slots) for number in range(nodes)]
        await asyncio.gather(*(one(agent) for agent in self.agents))

    async def _train(self) -> None:
        self.step = SETUP_STEPS
        while True:
            await asyncio.sleep(STEP_S)
            self.step += 1

    def announced(self, news: Announce | AnnounceChange) -> Announce:
        """One agent has heard of a generation: in full. The fleet works a change out once for all of it."""
        number = news.number if isinstance(news, AnnounceChange) else news.generation.number
        if self.newest is None or number > self.newest.generation.number:
            self.first_heard_s = time.monotonic()
            self.newest = changed(self.newest, news) if isinstance(news, AnnounceChange) else news
            self.places = set(self.newest.generation.members)
            self.heard = 0
            self.target = self.step
            if self._training is None:
                self._training = asyncio.create_task(self._train(), name="training")
            self.all_heard.clear()
        if number == self.newest.generation.number:
            self.heard += 1
            if self.heard == len(self.agents):
                self.all_heard.set()
        return self.newest

    async def heard_by_all(self, timeout_s: float) -> None:
        """Wait until every agent has heard of the newest generation. Raises RuntimeError, TimeoutError."""
        await asyncio.wait_for(self.all_heard.wait(), timeout_s)
        if self.failures:
            raise RuntimeError(f"{len(self.failures)} agents failed; the first: {self.failures[0]}")

    async def close(self) -> None:
        if self._training is not None:
            self._training.cancel()
        await asyncio.gather(*(agent.close() for agent in self.agents))


class SimulatedAgent:
    """One node. `living`: worker -> slot."""

    def __init__(self, fleet: Fleet, node: str, slots: int) -> None:
        self.node = node
        self.living: dict[int, int] = {}
        self._fleet = fleet
        self._slots = slots
        self._heartbeat_s = 1.0
        self._socket: ClientConnection | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Connect and be welcomed; from then on it lives by itself."""
        fleet = self._fleet
        self._socket = await connect(
            fleet.url,
            proxy=None,
            compression=None,
            max_size=MAX_FRAME_BYTES,
            ping_interval=None,
            open_timeout=60,
        )
        hello = AgentHello(
            version=PROTOCOL_VERSION,
            token=fleet.token,
            node=self.node,
            slots=self._slots,
            pid=1,
            advertise="127.0.0.1",
        )
        await self._socket.send(encode(hello))
        welcome = decode(_bytes(await self._socket.recv()))
        assert isinstance(welcome, AgentWelcome)
        self._heartbeat_s = welcome.heartbeat_s
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._beat())]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            self._fleet.failures.append(
                f"{self.node}: {task.exception() or 'the controller closed the connection'}"
            )
            self._fleet.all_heard.set()  # whoever waits looks at the failures

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._socket is not None:
            await self._socket.close()

    async def lose_worker(self, worker: int) -> None:
        """A worker's process ended by SIGKILL."""
        del self.living[worker]
        await self._send(
            WorkerExited(worker=worker, status=-9, step=self._fleet.step, published=self._fleet.step)
        )

    async def _listen(self) -> None:
        assert self._socket is not None
        async for data in self._socket:
            message = _decoded(_bytes(data))
            match message:
                case AgentWelcome():  # there are more agents now: speak less often
                    self._heartbeat_s = message.heartbeat_s
                case StartWorker():
                    self.living[message.worker] = message.slot
                    await self._send(WorkerParked(worker=message.worker, readiness="warm"))
                case Ask():  # an incident's evidence: there is none, which is said at once
                    await self._send(Answer(request=message.request, ok=True, data=b"{}"))
                case StandBy():
                    await self._send(WorkerParked(worker=message.worker, readiness="hot"))
                case KillWorker():
                    if self.living.pop(message.worker, None) is not None:
                        await self._send(WorkerExited(worker=message.worker, status=-9))
                case Announce() | AnnounceChange():
                    await self._go_on(self._fleet.announced(message))

    async def _go_on(self, announce: Announce) -> None:
        """What the members of this node report of a new generation."""
        number, step = announce.generation.number, self._fleet.target
        members = [worker for worker in self.living if worker in self._fleet.places]
        if announce.generation.fresh:
            steps = dict.fromkeys(members, SETUP_STEPS + 1)
            await self._send(
                NodeProgressed(node=self.node, generation=number, published=SETUP_STEPS, steps=steps)
            )
        elif members:
            verdicts = [
                VerdictReached(
                    worker=worker,
                    generation=number,
                    target=step,
                    course="keep",
                    reason="simulated",
                    connect_s=0.01,
                    vote_s=0.01,
                )
                for worker in members
            ]
            resumed = [Resumed(worker=worker, generation=number, step=step + 1) for worker in members]
            await self._send(joined(self.node, verdicts))
            await self._send(joined(self.node, resumed))

    async def _beat(self) -> None:
        fleet = self._fleet
        await asyncio.sleep(random.random() * self._heartbeat_s)
        while True:
            if fleet.newest is None:
                await self._send(Heartbeat(node=self.node, sent_ns=time.time_ns()))
            else:
                generation = fleet.newest.generation.number
                steps = dict.fromkeys(self.living, fleet.step)
                await self._send(
                    NodeProgressed(node=self.node, generation=generation, published=fleet.step, steps=steps)
                )
            await asyncio.sleep(self._heartbeat_s)

    async def _send(self, message: Any) -> None:
        assert self._socket is not None
        with contextlib.suppress(ConnectionError):
            await self._socket.send(encode(message))


@functools.lru_cache(maxsize=8)
def _decoded(data: bytes) -> Any:
    """What 2,000 machines would each decode for themselves, this one process does once."""
    return decode(data)


def _bytes(data: str | bytes) -> bytes:
    return data.encode() if isinstance(data, str) else data

"""Several agents, each a process with an address of its own, against a controller that does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from keepstep.agent import procfs
from keepstep.core.actions import Announce, StartWorker
from keepstep.core.events import WorkerParked
from keepstep.core.types import Generation
from keepstep.wire.codec import decode, encode
from keepstep.wire.messages import AgentHello, AgentWelcome, JobSpec, Stop
from keepstep.wire.page import Page

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
WAIT_S = 60.0


class Nodes:
    """A job's agents by name, and the controller's end of their connections."""

    def __init__(self, folder: Path, spec: dict[str, Any]) -> None:
        self.job = f"test-{secrets.token_hex(4)}"
        self.token = secrets.token_hex(16)
        self.run_dir = folder / "run"
        self.events: list[Any] = []
        self.hellos: dict[str, AgentHello] = {}
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.places: dict[int, str] = {}
        self.generation = Generation(number=-1, ranks=())
        self._connections: dict[str, ServerConnection] = {}
        self._changed = asyncio.Condition()
        self._spec = JobSpec(
            **{
                "job": self.job,
                "env": {"PYTHONPATH": str(ROOT), "KEEPSTEP_FINGERPRINT": "1"},
                "working_dir": str(folder),
            }
            | spec
        )

    async def listen(self) -> None:
        self._server = await serve(self._serve, "127.0.0.1", 0, compression=None, max_size=None)
        self._url = f"ws://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/agent"

    async def _serve(self, socket: ServerConnection) -> None:
        hello = decode(await socket.recv())
        assert isinstance(hello, AgentHello) and hello.token == self.token
        await socket.send(
            encode(AgentWelcome(job=self.job, world_size=self._spec.world_size, spec=self._spec))
        )
        async with self._changed:
            self.hellos[hello.node], self._connections[hello.node] = hello, socket
            self._changed.notify_all()
        async for data in socket:
            async with self._changed:
                self.events.append(decode(data))
                self._changed.notify_all()

    async def add(self, node: str, host: str, slots: int = 2, **settings: Any) -> None:
        """Start a node's agent; returns when it has joined."""
        fields = {
            "controller_url": self._url,
            "token": self.token,
            "node": node,
            "slots": slots,
            "run_dir": str(self.run_dir),
            "advertise": host,
            "stop_grace_s": 2.0,
        }
        command = [sys.executable, str(HERE / "agent_process.py"), json.dumps(fields | settings)]
        self.agents[node] = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
        await self.until(lambda: node in self.hellos, f"the agent of {node}")

    async def send(self, node: str, message: Any) -> None:
        with contextlib.suppress(Exception):  # a node that was killed hears nothing
            await self._connections[node].send(encode(message))

    async def start(self, **workers: list[int]) -> None:
        """Start workers on nodes and wait until they park."""
        for node, numbers in workers.items():
            for slot, number in enumerate(numbers):
                self.places[number] = node
                await self.send(node, StartWorker(worker=number, node=node, slot=slot, reason="test"))
        for numbers in workers.values():
            for number in numbers:
                await self.event(WorkerParked, worker=number)

    async def announce(self, *ranks: int, lost: str = "", **fields: Any) -> Announce:
        """The next generation; each living node's records are kept by the one after it."""
        number = self.generation.number + 1
        self.generation = Generation(number=number, ranks=ranks, **fields)
        living = [node for node in self.hellos if node != lost]
        announce = Announce(
            generation=self.generation,
            reason=f"generation {number}",
            peers={node: self.hellos[node].peer for node in living},
            keepers=dict(zip(living, living[1:] + living[:1], strict=True)) if len(living) > 1 else {},
        )
        for node in living:
            await self.send(node, announce)
        return announce

    async def event(self, kind: type, **fields: Any) -> Any:
        """The first event of a kind with these fields, waited for."""

        def find() -> Any:
            for event in self.events:
                if isinstance(event, kind) and all(getattr(event, k) == v for k, v in fields.items()):
                    return event
            return None

        await self.until(find, f"{kind.__name__} {fields}")
        return find()

    async def until(self, condition: Any, what: str, timeout_s: float = WAIT_S) -> None:
        """Wait for something that may announce itself by no event."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while not condition():
            assert asyncio.get_running_loop().time() < deadline_s, f"{what}: {self.events} {self.logs()}"
            await asyncio.sleep(0.01)

    def page(self, worker: int) -> Page:
        """A worker's page, for reading; to be closed."""
        folder = Path("/dev/shm") / f"keepstep-{self.job}" / self.places[worker]
        return Page.open(str(folder / f"worker-{worker}.page"))

    def pids(self, node: str) -> list[int]:
        """The agent of a node, its workers and all that they started."""
        within = f"/dev/shm/keepstep-{self.job}/{node}/"
        found = [
            pid
            for pid in procfs.pids()
            if procfs.environment(pid).get("KEEPSTEP_PAGE", "").startswith(within)
        ]
        return [self.agents[node].pid, *found]

    def pid(self, worker: int) -> int:
        """The process that leads a worker."""
        return next(
            pid
            for pid in self.pids(self.places[worker])
            if procfs.environment(pid).get("KEEPSTEP_WORKER") == str(worker)
        )

    def kill(self, node: str) -> None:
        """The whole node at once, without a word."""
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.agents[node].wait()

    def logs(self) -> str:
        found = sorted((self.run_dir / "logs").glob("*")) if (self.run_dir / "logs").exists() else []
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in found)

    async def stop(self) -> None:
        for node in self.agents:
            await self.send(node, Stop(hard=True))
        for node, agent in self.agents.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(agent.wait, 10)
            self.kill(node)
        self._server.close()


@pytest.fixture
def nodes(tmp_path: Path) -> Any:
    """`async with nodes(**spec) as n`: no agent yet; whatever was started has ended afterwards."""

    @asynccontextmanager
    async def start(**spec: Any) -> AsyncIterator[Nodes]:
        made = Nodes(tmp_path, spec)
        await made.listen()
        try:
            yield made
        finally:
            await made.stop()

    return start

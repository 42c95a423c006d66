"""A real agent against a controller made of one WebSocket server, for tests with real processes."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from keepstep.agent.agent import Agent
from keepstep.agent.config import AgentConfig, ConsoleLine
from keepstep.core.actions import Announce, StartWorker
from keepstep.core.events import WorkerParked
from keepstep.core.types import Generation
from keepstep.wire.codec import decode, encode
from keepstep.wire.messages import AgentHello, AgentWelcome, Heartbeat, JobSpec
from keepstep.wire.times import placed

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent
WAIT_S = 20.0


class Node:
    """An agent that runs, and the controller's end of its connection."""

    def __init__(self, run_dir: Path, code: str, **spec: Any) -> None:
        self.job = f"test-{secrets.token_hex(4)}"
        self.token = secrets.token_hex(8)
        self.run_dir = run_dir
        self.events: list[Any] = []
        self.heartbeats_s: list[float] = []
        self.hellos: list[AgentHello] = []
        self.lines: list[ConsoleLine] = []
        self.page_dir = Path("/dev/shm") / f"keepstep-{self.job}" / "node-a"
        self.agent: Agent
        self.running: asyncio.Task[None]
        self.url = ""
        self._server: Any = None
        self._connections: dict[str, ServerConnection] = {}
        self._changed = asyncio.Condition()
        self._connected = asyncio.Event()
        self._spec = JobSpec(
            **{
                "job": self.job,
                "script": sys.executable,
                "args": ("-u", "-c", code),
                "launch": "program",
                "world_size": 2,
                "env": {"PYTHONPATH": f"{HERE}:{ROOT}"},
            }
            | spec
        )

    # ---- the controller ----

    async def listen(self, port: int = 0) -> None:
        self._server = await serve(self._serve, "127.0.0.1", port, compression=None, max_size=None)
        self.url = f"ws://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/agent"

    async def vanish(self) -> int:
        """The controller dies; returns its port."""
        port: int = self._server.sockets[0].getsockname()[1]
        self._connected.clear()
        self._connections.clear()
        self._server.close(close_connections=True)
        await self._server.wait_closed()
        return port

    async def _serve(self, socket: ServerConnection) -> None:
        hello = decode(await socket.recv())
        assert isinstance(hello, AgentHello)
        if hello.token != self.token:
            await socket.close(4401, "the token does not match this job's")
            return
        self.hellos.append(hello)
        welcome = AgentWelcome(job=self.job, world_size=self._spec.world_size, spec=self._spec)
        await socket.send(encode(welcome))
        self._connections[hello.node] = socket
        self._connected.set()
        async for data in socket:
            message = placed(decode(data), time.monotonic())
            if isinstance(message, Heartbeat):
                self.heartbeats_s.append(time.monotonic())
                continue
            async with self._changed:
                self.events.append(message)
                self._changed.notify_all()

    async def send(self, *messages: Any) -> None:
        await asyncio.wait_for(self._connected.wait(), WAIT_S)
        for message in messages:
            for socket in self._connections.values():
                await socket.send(encode(message))

    async def event(self, kind: type, timeout_s: float = WAIT_S, **fields: Any) -> Any:
        """The first event of a kind with these fields, waited for."""

        def find() -> Any:
            for event in self.events:
                if isinstance(event, kind) and all(getattr(event, k) == v for k, v in fields.items()):
                    return event
            return None

        async def wait() -> Any:
            async with self._changed:
                await self._changed.wait_for(find)
                return find()

        try:
            return await asyncio.wait_for(wait(), timeout_s)
        except TimeoutError:
            raise AssertionError(f"no {kind.__name__} {fields} among {self.events}; {self.logs()}") from None

    # ---- shortcuts ----

    async def start(self, *workers: int, parked: bool = True) -> None:
        for worker in workers:
            await self.send(StartWorker(worker=worker, node="node-a", slot=worker, reason="test"))
        if parked:
            for worker in workers:
                await self.event(WorkerParked, worker=worker)

    async def announce(self, number: int, *ranks: int, **fields: Any) -> None:
        await self.send(
            Announce(generation=Generation(number=number, ranks=ranks, **fields), reason=f"reason {number}")
        )

    def pid(self, worker: int) -> int:
        found = self.agent._workers.get(worker)
        assert found is not None
        return found.process.pid

    def log(self, worker: int, stream: str = "stdout") -> str:
        return (self.run_dir / "logs" / f"worker-{worker}.{stream}").read_text(errors="replace")

    def logs(self) -> str:
        found = sorted((self.run_dir / "logs").glob("*")) if (self.run_dir / "logs").exists() else []
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in found)

    async def until(self, condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
        """Wait for something that announces itself by no event."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"{what}: {self.logs()}"
            await asyncio.sleep(0.01)
        return value


@pytest.fixture
def node(tmp_path: Path) -> Any:
    """`async with node(code, ...) as n`: an agent whose workers run `code`."""

    @asynccontextmanager
    async def start(code: str, *, config: dict[str, Any] | None = None, **spec: Any) -> AsyncIterator[Node]:
        made = Node(tmp_path / "run", code, **spec)
        await made.listen()
        settings: dict[str, Any] = {
            "controller_url": made.url,
            "token": made.token,
            "node": "node-a",
            "slots": 4,
            "run_dir": made.run_dir,
            "console": made.lines.append,
            "stop_grace_s": 2.0,
        }
        made.agent = Agent(AgentConfig(**(settings | (config or {}))))
        made.running = asyncio.create_task(made.agent.run())
        try:
            yield made
        finally:
            made.running.cancel()
            await asyncio.gather(made.running, return_exceptions=True)
            made._server.close()

    return start

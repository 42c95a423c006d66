"""A real controller whose machine answers as a test has written it, and a hand that plays its agents."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from keepstep.controller.api import build_app
from keepstep.controller.ledger import Ledger
from keepstep.controller.server import Server, bind
from keepstep.controller.shell import Controller
from keepstep.core import actions as act
from keepstep.core import events as evt
from keepstep.core.job import JobConfig, JobMachine
from keepstep.wire.codec import decode, encode
from keepstep.wire.messages import PROTOCOL_VERSION, AgentHello, AgentWelcome, JobSpec

TOKEN = "the-job-s-token"
SPEC = JobSpec(job="j", script="s.py", args=("a",), world_size=2)
DEADLINE_S = 20


class ScriptedMachine:
    """Answers an event by its type; remembers what it was told."""

    def __init__(
        self, answers: dict[type, Sequence[act.Action] | Callable[[Any], Sequence[act.Action]]]
    ) -> None:
        self.answers = answers
        self.told: list[evt.Event] = []
        self.deadline_s: float | None = None

    def step(self, event: evt.Event, now_s: float) -> list[act.Action]:
        self.told.append(event)
        answer = self.answers.get(type(event), ())
        return list(answer(event) if callable(answer) else answer)

    def next_deadline_s(self, now_s: float) -> float | None:
        return self.deadline_s

    def snapshot(self) -> dict[str, Any]:
        return JobMachine(JobConfig(world_size=2, job="j")).snapshot()


class Job:
    """A controller that is running, with what a test looks at."""

    def __init__(self, folder: Path, machine: ScriptedMachine, **options: Any) -> None:
        self.machine = machine
        self.said: list[tuple[str, str]] = []
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.controller = Controller(
            machine=machine,
            spec=SPEC,
            token=TOKEN,
            ledger=self.ledger,
            say=lambda text, level: self.said.append((text, level)),
            **options,
        )
        self.server = Server(build_app(self.controller), bind("127.0.0.1", 0))

    @property
    def websocket_url(self) -> str:
        return self.server.url.replace("http", "ws", 1) + "/agent"

    async def request(
        self, method: str, path: str, token: str | None = TOKEN, body: bytes | None = None
    ) -> tuple[int, Any]:
        def ask() -> tuple[int, Any]:
            connection = http.client.HTTPConnection(
                self.server.url.removeprefix("http://"), timeout=DEADLINE_S
            )
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            with contextlib.closing(connection):
                connection.request(method, path, body=body, headers=headers)
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())

        return await asyncio.to_thread(ask)


HELLO = AgentHello(version=PROTOCOL_VERSION, token=TOKEN, node="n", slots=3, pid=1, advertise="127.0.0.1")
END = (act.EndJob(exit_code=5, reason="over"),)


@contextlib.asynccontextmanager
async def agent(job: Job, hello: AgentHello = HELLO) -> AsyncIterator[ClientConnection]:
    async with connect(job.websocket_url, proxy=None) as socket:
        await socket.send(encode(hello))
        assert isinstance(decode(await socket.recv(decode=False)), AgentWelcome)
        yield socket


async def heard(socket: ClientConnection) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        return decode(await socket.recv(decode=False))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


def play(
    folder: Path,
    machine: ScriptedMachine,
    story: Callable[[Job, asyncio.Task[int]], Awaitable[None]],
    **options: Any,
) -> tuple[Job, int]:
    """Run a controller and a story beside it; returns when the controller has ended."""

    async def main() -> tuple[Job, int]:
        job = Job(folder, machine, **options)
        job.server.start()
        running = asyncio.create_task(job.controller.run())
        try:
            async with asyncio.timeout(DEADLINE_S * 2):
                await story(job, running)
                return job, await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await job.server.stop()
            job.ledger.close()

    return asyncio.run(main())

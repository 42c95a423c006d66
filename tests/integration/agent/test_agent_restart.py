"""An agent dies and another takes over: workers are watched again, the dead are read, nobody is orphaned."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from keepstep.agent import cleanup
from keepstep.agent.agent import Agent
from keepstep.agent.config import AgentConfig
from keepstep.core.actions import KillWorker, StartWorker
from keepstep.core.events import Resumed, WorkerExited, WorkerParked
from keepstep.errors import ProtectionError, UsageError
from tests.integration.agent.test_agent_lifetime import LAUNCHER, PARK, gone

pytestmark = pytest.mark.integration

# Trains on without its agent and says Hello again, as the trainer does. Worker 9 ends by itself meanwhile.
RETURNING = """
import os, time, worker_side
from keepstep.wire.messages import Fetch, JournalKept, Welcome
from keepstep.core.events import WorkerParked
W, LINEAGE = worker_side.WORKER, "0123456789abcdef" * 2
page = worker_side.page()
c = worker_side.Connection()
c.expect(Welcome)
page.write_record("start", 7, LINEAGE, b"what only this rank knows")
page.step = 7
c.send(JournalKept(worker=W, rank=W - 7, data=b"said in setup"))
c.send(WorkerParked(worker=W, readiness="warm"))
while True:
    try:
        while c.receive(): pass
    except OSError: pass
    if W == 9:
        page.exit_status = 5
        os._exit(5)
    while True:
        try:
            c = worker_side.Connection()
            c.expect(Welcome)
            break
        except (OSError, AssertionError): time.sleep(0.05)
    c.send(WorkerParked(worker=W, readiness="hot"))
    if W == 8:
        c.send(Fetch(request=1, what="record", rank=3, lineage=LINEAGE))
        c.send(Fetch(request=2, what="journal", rank=3))
        while (m := c.receive()):
            if hasattr(m, "data"): print(m.data, flush=True)
"""


class Second:
    """Agents of node-b, each in a process of its own, one after the other."""

    def __init__(self, n: Any, folder: Path) -> None:
        self.n = n
        self.run_dir = folder / "other"
        self.errors = folder / "agent.err"
        self.page_dir = n.page_dir.parent / "node-b"
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", LAUNCHER, self.n.url, self.n.token, str(self.run_dir), "alone"]
        with self.errors.open("a") as errors:
            self.agents.append(subprocess.Popen(command, stderr=errors))
        return self.agents[-1]

    async def connected(self) -> Any:
        """The hello of an agent that has just been started."""
        before = self.n._connections.get("node-b")
        self.start()
        await self.n.until(
            lambda: self.n._connections.get("node-b") is not before, "the agent does not connect"
        )
        return self.n.hellos[-1]

    def kill(self) -> None:
        self.agents[-1].kill()
        self.agents[-1].wait()

    def pids(self) -> dict[int, int]:
        """The workers' processes, by what they were started with."""
        from keepstep.agent import procfs

        return {
            int(procfs.environment(pid)["KEEPSTEP_WORKER"]): pid for pid in cleanup.users_of(self.page_dir)
        }


@asynccontextmanager
async def second(n: Any, folder: Path) -> AsyncIterator[Second]:
    made = Second(n, folder)
    try:
        yield made
    finally:
        for agent in made.agents:
            agent.kill()
            agent.wait()
        cleanup.end_users_of(made.page_dir)
        cleanup.remove_stale()


def test_a_new_agent_adopts_the_living_and_reads_the_dead(node: Any, tmp_path: Path) -> None:
    async def story() -> None:
        async with node(RETURNING, world_size=8) as n, second(n, tmp_path) as b:
            await b.connected()
            for number in (8, 9, 10, 11):
                await n.send(StartWorker(worker=number, node="node-b", slot=number - 8, reason="test"))
                await n.event(WorkerParked, worker=number)
            pids = b.pids()
            assert set(pids) == {8, 9, 10, 11}
            await n.announce(0, 7, 8, 9, 10, fresh=True)  # rank 3 is played by worker 10
            await n.until(lambda: '"players": [[0' in (b.page_dir / "state.json").read_text(), "not kept")

            b.kill()
            os.kill(pids[10], signal.SIGKILL)
            await n.until(lambda: gone(pids[9]) and gone(pids[10]), "they live")
            assert b.page_dir not in cleanup.remove_stale()
            n.events.clear()
            hello = await b.connected()
            assert hello.workers == (8, 11)
            assert hello.exited == {9: 5}, "its page says how it ended; of a signal nobody knows"
            for number in (8, 11):
                await n.event(WorkerParked, worker=number, readiness="hot")
            # Rank 3's record lies in the page of a worker that this agent never started.
            log = b.run_dir / "logs" / "worker-8.stdout"
            wanted = "b'what only this rank knows'\nb'said in setup'\n"
            await n.until(lambda: log.read_text() == wanted, "record and journal")
            assert not gone(pids[8]) and not gone(pids[11]), "nobody noticed"

            await n.send(KillWorker(worker=11, reason="test"))
            exited = await n.event(WorkerExited, worker=11)
            assert exited.status is None and gone(pids[11])
            os.kill(pids[8], signal.SIGKILL)
            exited = await n.event(WorkerExited, worker=8)
            assert (exited.status, exited.step) == (None, 7)

    asyncio.run(story())


def test_two_agents_never_look_after_the_same_workers(node: Any, tmp_path: Path) -> None:
    async def story() -> None:
        async with node(PARK) as n, second(n, tmp_path) as b:
            await b.connected()
            await n.send(StartWorker(worker=8, node="node-b", slot=0, reason="test"))
            await n.event(WorkerParked, worker=8)
            config = AgentConfig(
                controller_url=n.url, token=n.token, node="node-b", slots=4, run_dir=b.run_dir
            )
            with pytest.raises(UsageError, match=rf"is running already \(process {b.agents[0].pid}\)"):
                await asyncio.wait_for(Agent(config).run(), 20)
            assert not gone(b.pids()[8]) and b.page_dir.exists()

    asyncio.run(story())


def test_an_agent_that_leaves_its_workers_to_the_next_one_ends_nobody(node: Any) -> None:
    async def story() -> None:
        async with node(RETURNING, world_size=8) as n:
            await n.start(8)
            pid = n.pid(8)
            n.agent.detach()
            await asyncio.wait_for(n.running, 20)
            assert not gone(pid)
            n.events.clear()
            n.agent = Agent(n.agent._config)
            n.running = asyncio.create_task(n.agent.run())
            await n.event(WorkerParked, worker=8, readiness="hot")
            assert n.pid(8) == pid and n.hellos[-1].workers == (8,)
        assert gone(pid) and not n.page_dir.exists()

    asyncio.run(story())


def test_a_node_that_stays_cut_off_ends_its_workers(node: Any) -> None:
    stuck = PARK.replace("while c.receive(): pass", "import time; time.sleep(600)")

    async def story() -> None:
        async with node(stuck, config={"isolation_timeout_s": 0.5}) as n:
            await n.start(0, 1)
            pids = [n.pid(0), n.pid(1)]
            os.kill(pids[1], signal.SIGSTOP)
            await n.vanish()
            with pytest.raises(ProtectionError, match=r"the controller was gone for 0.5 s"):
                await asyncio.wait_for(n.running, 20)
            assert all(gone(pid) for pid in pids) and not n.page_dir.exists()

    asyncio.run(story())


def test_another_controller_in_the_place_of_the_dead_one_ends_nobody(node: Any) -> None:
    async def story() -> None:
        async with node(PARK) as n:
            await n.start(0)
            port = await n.vanish()
            own, n.token = n.token, "a stranger's"
            await n.listen(port)
            await asyncio.sleep(0.5)
            assert not n.running.done() and not gone(n.pid(0)), "refused by a stranger"
            n.token = own
            await n.until(lambda: len(n.hellos) == 2, "it does not try again")

    asyncio.run(story())


def test_what_workers_said_last_is_said_again_to_a_controller_that_comes_back(node: Any) -> None:
    code = """
import worker_side
from keepstep.core.events import Resumed
c = worker_side.park("hot")
while (m := c.receive()):
    c.send(Resumed(worker=worker_side.WORKER, generation=m.generation.number, step=m.generation.number))"""

    async def story() -> None:
        async with node(code) as n:
            await n.start(0)
            for number in (1, 2):
                await n.announce(number, 0)
                await n.event(Resumed, generation=number)
            port = await n.vanish()
            n.events.clear()
            await n.listen(port)
            await n.event(WorkerParked, worker=0, readiness="hot")
            await n.event(Resumed, worker=0, generation=2)
            assert not any(getattr(event, "generation", 2) == 1 for event in n.events), "old news"

    asyncio.run(story())


def test_an_agent_says_that_it_is_there_as_often_as_it_was_told(node: Any) -> None:
    async def story() -> None:
        async with node(PARK) as n:
            await n.until(lambda: len(n.heartbeats_s) >= 5, "no heartbeats")
            with contextlib.suppress(IndexError):
                assert n.heartbeats_s[4] - n.heartbeats_s[0] > 0.5, "far more often than every 0.25 s"

    asyncio.run(story())

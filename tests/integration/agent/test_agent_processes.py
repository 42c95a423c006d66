"""Workers as real processes: started, watched, killed with all that they started."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.actions import KillWorker, StartWorker
from keepstep.core.events import Complained, UsageRefused, WorkerExited, WorkerParked
from keepstep.wire.messages import Stop

pytestmark = pytest.mark.integration

PARK = "import worker_side; c = worker_side.park()\nwhile c.receive(): pass"


def state(pid: int) -> str:
    """The letter of /proc/PID/stat; "" when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that nobody reaps counts)."""
    return state(pid) in ("", "Z", "X")


def test_a_worker_finds_its_environment_and_parks(node: Any) -> None:
    code = "import os, worker_side; print(dict(os.environ)); " + PARK

    async def story() -> None:
        async with node(code, args=("-u", "-c", code, "one")) as n:
            await n.start(3)
            parked = await n.event(WorkerParked, worker=3)
            assert parked.readiness == "warm"
            env = eval(n.log(3))
            assert env["KEEPSTEP_WORKER"] == "3" and env["KEEPSTEP_SLOT"] == env["LOCAL_RANK"] == "3"
            assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2" and env["OMP_NUM_THREADS"] == "1"
            assert env["KEEPSTEP_RUN_DIR"] == str(n.run_dir) and "RANK" not in env
            assert os.getsid(n.pid(3)) == os.getpgid(n.pid(3)) == n.pid(3)

    asyncio.run(story())


def test_a_kill_is_reported_at_once_with_what_the_pages_say(node: Any) -> None:
    code = f"""
import worker_side
p = worker_side.page(); p.step = 7 + worker_side.WORKER; p.published = 6 + worker_side.WORKER
{PARK}"""

    async def story() -> None:
        async with node(code) as n:
            await n.start(0, 1)
            delays = []
            killed_s = time.monotonic()
            os.kill(n.pid(0), signal.SIGKILL)
            exited = await n.event(WorkerExited, worker=0)
            delays.append(time.monotonic() - killed_s)
            assert (exited.status, exited.step, exited.published) == (-signal.SIGKILL, 7, 7)
            assert killed_s <= exited.first_evidence_s <= time.monotonic()
            assert delays[0] < 1.0  # typically 2 ms; this machine may be busy

    asyncio.run(story())


@pytest.mark.parametrize(("ending", "status"), [("raise SystemExit(3)", 3), ("pass", 0), ("1/0", 1)])
def test_an_exit_status_is_reported_as_it_is(node: Any, ending: str, status: int) -> None:
    async def story() -> None:
        async with node(ending) as n:
            await n.start(0, parked=False)
            assert (await n.event(WorkerExited, worker=0)).status == status

    asyncio.run(story())


def test_what_a_dead_worker_started_dies_too_and_a_stopped_child_as_well(node: Any) -> None:
    code = f"""
import os, subprocess, worker_side
children = [subprocess.Popen(["sleep", "300"]) for _ in range(2)]
os.kill(children[1].pid, 19)
print(*[child.pid for child in children])
{PARK}"""

    async def story() -> None:
        async with node(code) as n:
            await n.start(0)
            children = [int(word) for word in n.log(0).split()]
            assert not any(gone(pid) for pid in children)
            os.kill(n.pid(0), signal.SIGKILL)
            await n.event(WorkerExited, worker=0)
            await n.until(lambda: all(gone(pid) for pid in children), "children live on")

    asyncio.run(story())


def test_a_command_that_cannot_run_is_one_clear_line(node: Any) -> None:
    async def story() -> None:
        async with node("", script="/no/such/program", args=()) as n:
            await n.start(0, parked=False)
            refused = await n.event(UsageRefused, worker=0)
            assert "/no/such/program" in refused.message and "No such file" in refused.message
            assert (await n.event(WorkerExited, worker=0)).status == 127

    asyncio.run(story())


def test_a_kill_with_grace_lets_the_worker_tidy_up_and_then_ends_it(node: Any) -> None:
    polite = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: (print('bye'), sys.exit(5)))\n"
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code = f"import worker_side\nif worker_side.WORKER == 0:\n {polite}else:\n {deaf}{PARK}"

    async def story() -> None:
        async with node(code) as n:
            await n.start(0, 1)
            await n.send(*(KillWorker(worker=w, reason="test", grace_s=0.5) for w in (0, 1)))
            assert (await n.event(WorkerExited, worker=0)).status == 5
            assert n.log(0) == "bye\n"
            assert (await n.event(WorkerExited, worker=1)).status == -signal.SIGKILL

    asyncio.run(story())


def test_a_stopped_worker_can_be_killed_without_waiting_for_its_grace(node: Any) -> None:
    async def story() -> None:
        async with node(PARK) as n:
            await n.start(0)
            os.kill(n.pid(0), signal.SIGSTOP)
            await n.until(lambda: state(n.pid(0)) == "T", "not stopped")
            await n.send(KillWorker(worker=0, reason="test", grace_s=15))
            assert (await n.event(WorkerExited, timeout_s=10, worker=0)).status == -signal.SIGKILL

    asyncio.run(story())


def test_stop_ends_workers_and_leaves_nothing(node: Any) -> None:
    code = f"""
import os, subprocess, worker_side
print(subprocess.Popen(["sleep", "300"], start_new_session=True).pid)
{PARK}"""

    async def story() -> None:
        async with node(code, config={"embedded": True}) as n:
            await n.start(0, 1)
            daemons = [int(n.log(worker)) for worker in (0, 1)]
            pids = [n.pid(0), n.pid(1)]
            socket_dir = n.agent._socket_dir
            guardian = n.agent._guardian._child.pid
            assert n.page_dir.exists() and socket_dir.exists() and not gone(guardian)
            await n.send(Stop(hard=False))
            await asyncio.wait_for(n.running, 20)
            assert {event.worker for event in n.events if isinstance(event, WorkerExited)} == {0, 1}
            assert all(gone(pid) for pid in [*pids, guardian])
            assert all(gone(pid) for pid in daemons), "a child in a session of its own was left"
            assert not n.page_dir.parent.exists() and not socket_dir.exists()

    asyncio.run(story())


def test_a_hard_stop_does_not_wait_for_the_grace(node: Any) -> None:
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{PARK}"

    async def story() -> None:
        async with node(code, config={"stop_grace_s": 60.0}) as n:
            await n.start(0)
            await n.send(Stop(hard=False))
            await asyncio.sleep(0.2)
            assert not n.running.done()
            await n.send(Stop(hard=True))
            await asyncio.wait_for(n.running, 20)

    asyncio.run(story())


def test_complaints_carry_the_newest_published_step_of_the_node(node: Any) -> None:
    code = """
import worker_side
from keepstep.core.events import Complained
p = worker_side.page(); p.published = 5 * worker_side.WORKER
c = worker_side.park()
if worker_side.WORKER == 0:
    c.receive()
    c.send(Complained(worker=0, generation=0, reason="gone"))
while c.receive(): pass"""

    async def story() -> None:
        async with node(code) as n:
            await n.start(0, 1)
            await n.announce(0, 0, 1)
            assert (await n.event(Complained, worker=0)).published == 5

    asyncio.run(story())


def test_a_worker_of_another_node_is_not_started_here(node: Any) -> None:
    async def story() -> None:
        async with node(PARK) as n:
            await n.send(StartWorker(worker=9, node="node-b", slot=0, reason="test"))
            await n.start(0)
            assert n.agent._workers.get(9) is None

    asyncio.run(story())

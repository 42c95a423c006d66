"""How an agent begins and ends: without its controller, refused, killed; and that nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from keepstep.agent import cleanup
from keepstep.core.actions import StartWorker
from keepstep.core.events import Complained, WorkerExited, WorkerParked
from keepstep.errors import ProtectionError, UsageError

pytestmark = pytest.mark.integration

PARK = "import worker_side; c = worker_side.park()\nwhile c.receive(): pass"


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that nobody reaps counts)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_an_embedded_agent_ends_everything_when_its_controller_stays_away(node: Any) -> None:
    async def story() -> None:
        async with node(PARK, config={"embedded": True, "controller_timeout_s": 0.5}) as n:
            await n.start(0, 1)
            pids = [n.pid(0), n.pid(1)]
            await n.vanish()
            with pytest.raises(ProtectionError, match=r"the controller was gone for 0.5 s"):
                await asyncio.wait_for(n.running, 20)
            assert all(gone(pid) for pid in pids) and not n.page_dir.exists()

    asyncio.run(story())


def test_evidence_waits_for_a_controller_that_comes_back(node: Any) -> None:
    code = """
import worker_side
from keepstep.core.actions import StartWorker
from keepstep.core.events import Complained
c = worker_side.park()
while c.receive():
    c.send(Complained(worker=worker_side.WORKER, generation=0, reason="nobody answers"))"""

    async def story() -> None:
        async with node(code) as n:
            await n.start(0, 1, 2)
            pids = {w: n.pid(w) for w in (0, 1, 2)}
            port = await n.vanish()
            os.kill(pids[0], signal.SIGKILL)
            await n.until(lambda: n.agent._workers.get(0).alive is False, "not seen")
            assert not any(isinstance(event, WorkerExited) for event in n.events)
            await n.listen(port)
            exited = await n.event(WorkerExited, worker=0)
            assert time.monotonic() - exited.first_evidence_s > 0
            assert n.hellos[0].workers == () and n.hellos[1].workers == (0, 1, 2), (
                "its end was still to be told"
            )
            await n.announce(0, 1, 2)
            await n.event(Complained, worker=1)
            assert not gone(pids[1]), "training goes on without a controller"

    asyncio.run(story())


def test_a_wrong_token_is_one_clear_line(node: Any) -> None:
    async def story() -> None:
        async with node(PARK, config={"token": "another"}) as n:
            with pytest.raises(ProtectionError, match=r"refused this agent: the token does not match"):
                await asyncio.wait_for(n.running, 20)

    asyncio.run(story())


def test_flags_that_cannot_be_read_are_refused(node: Any) -> None:
    async def story() -> None:
        async with node(PARK, tee="7") as n:
            with pytest.raises(UsageError, match=r"--tee '7' must be 0, 1, 2, 3, or a list"):
                await asyncio.wait_for(n.running, 20)

    asyncio.run(story())


LAUNCHER = """
import asyncio, sys
from pathlib import Path
from keepstep.agent.agent import Agent
from keepstep.agent.config import AgentConfig
config = AgentConfig(controller_url=sys.argv[1], token=sys.argv[2], node="node-b", slots=4,
                     run_dir=Path(sys.argv[3]), embedded=sys.argv[4] == "embedded")
asyncio.run(Agent(config).run())
"""


async def launched(n: Any, tmp_path: Path, how: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """An agent in a process of its own with one worker, and what that one started."""
    command = [sys.executable, "-c", LAUNCHER, n.url, n.token, str(tmp_path / "other"), how]
    process = subprocess.Popen(command)
    await n.until(lambda: "node-b" in n._connections, "the launcher does not connect")
    await n.send(StartWorker(worker=8, node="node-b", slot=0, reason="test"))
    await n.event(WorkerParked, worker=8)
    words = (tmp_path / "other" / "logs" / "worker-8.stdout").read_text().split()
    return process, [int(word) for word in words]


FAMILY = f"""
import os, subprocess, worker_side
print(os.getpid(), subprocess.Popen(["sleep", "300"]).pid,
      subprocess.Popen(["sleep", "300"], start_new_session=True).pid)
{PARK}"""

# A worker that does not end when its agent does: the trainer waits out its orphan timeout.
PATIENT_FAMILY = FAMILY.replace(
    "while c.receive(): pass",
    "import time\ntry:\n    while c.receive(): pass\nexcept OSError: pass\ntime.sleep(300)",
)


def socket_dirs_of(pid: int) -> list[Path]:
    return [p.parent for p in Path("/tmp").glob("keepstep-*/owner") if p.read_text().startswith(f"{pid} ")]


def test_a_launcher_killed_by_sigkill_takes_everything_with_it(node: Any, tmp_path: Path) -> None:
    async def story() -> None:
        async with node(FAMILY) as n:
            process, pids = await launched(n, tmp_path, "embedded")
            (socket_dir,) = socket_dirs_of(process.pid)
            page_dir = n.page_dir.parent / "node-b"
            assert page_dir.exists() and not any(gone(pid) for pid in pids)
            process.kill()
            process.wait()
            await n.until(lambda: all(gone(pid) for pid in pids), "orphans", 5)
            await n.until(lambda: not page_dir.exists() and not socket_dir.exists(), "files left", 5)

    asyncio.run(story())


def test_workers_of_a_killed_stand_alone_agent_live_on_and_its_leftovers_go_after_them(
    node: Any, tmp_path: Path
) -> None:
    async def story() -> None:
        async with node(PATIENT_FAMILY) as n:
            process, pids = await launched(n, tmp_path, "alone")
            page_dir = n.page_dir.parent / "node-b"
            process.kill()
            process.wait()
            cleanup.remove_stale()
            assert page_dir.exists() and not gone(pids[0]), "a restarted agent shall adopt it"
            (socket_dir,) = socket_dirs_of(process.pid)  # the workers know no other
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            await n.until(lambda: all(gone(pid) for pid in pids), "workers")
            cleanup.remove_stale()
            assert not page_dir.exists() and not socket_dir.exists()

    asyncio.run(story())


def test_folders_of_a_living_agent_are_nobodys_leftovers(node: Any) -> None:
    async def story() -> None:
        async with node(PARK) as n:
            await n.start(0)
            assert not {n.page_dir, n.agent._socket_dir} & set(cleanup.remove_stale())
            assert n.page_dir.exists()

    asyncio.run(story())

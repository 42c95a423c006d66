"""Living workers that stopped or hang: noticed, evidence taken, reported; slow ones are left alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.actions import KillWorker
from keepstep.core.agent import Suspicion
from keepstep.core.events import NodeProgressed, WorkerExited, WorkerSuspected

pytestmark = pytest.mark.integration

STACKS = """
import faulthandler, os, signal
faulthandler.register(signal.SIGUSR2, file=open(os.environ["KEEPSTEP_STACKS"], "w"), all_threads=True)
"""
TRAIN = """
import time, worker_side
from keepstep.wire.page import Phase
c = worker_side.park()
p = worker_side.page()
c.receive()
p.generation = 3
p.enter(Phase.STEP)
def work():
    while True:
        time.sleep(0.02)
        p.step += 1
        p.published = max(0, p.step - 1)
"""


def test_a_stopped_worker_is_reported_soon_and_killed_with_its_evidence_kept(node: Any) -> None:
    code = STACKS + TRAIN + "p.write_record('start', 9, '', b'record')\nprint('last line')\nwork()"

    async def story() -> None:
        async with node(code) as n:
            await n.start(0, 1)
            await n.announce(3, 0, 1)
            await n.until(lambda: n.log(0) and n.log(1), "no training")
            stopped_s = time.monotonic()
            os.kill(n.pid(0), signal.SIGSTOP)
            suspected = await n.event(WorkerSuspected, worker=0)
            assert 0.4 < time.monotonic() - stopped_s < 5  # typically 0.65 s
            assert stopped_s <= suspected.first_evidence_s <= time.monotonic()
            assert suspected.reason.startswith("stopped (state T)") and suspected.evidence["state"] == "T"
            await n.send(KillWorker(worker=0, reason="suspected", grace_s=0.0))
            exited = await n.event(WorkerExited, worker=0)
            assert exited.status == -signal.SIGKILL
            assert abs(exited.first_evidence_s - suspected.first_evidence_s) < 0.1, "the same moment"
            folder = n.run_dir / suspected.evidence["folder"]
            assert folder == n.run_dir / "evidence" / "worker-0-1"
            summary = json.loads((folder / "summary.json").read_text())
            assert summary["last_record"] == {"kind": "start", "step": 9, "lineage": "", "bytes": 6}
            assert summary["phase"] == "STEP" and summary["generation"] == 3 and summary["open_files"] > 2
            assert (folder / "stdout.tail").read_text() == "last line\n"
            assert "State:\tT (stopped)" in (folder / "proc-status").read_text()
            assert not any(isinstance(e, WorkerSuspected) and e.worker == 1 for e in n.events)

    asyncio.run(story())


def test_a_hung_worker_is_reported_with_the_stacks_of_all_its_threads(node: Any) -> None:
    code = (
        STACKS
        + """
import threading
def forgotten_lock(): threading.Event().wait()
def helper_thread(): threading.Event().wait()
threading.Thread(target=helper_thread, daemon=True).start()
print("up")
forgotten_lock()
"""
    )

    async def story() -> None:
        async with node(code) as n:
            await n.start(0, parked=False)
            await n.until(lambda: (n.run_dir / "logs" / "worker-0.stdout").exists() and n.log(0), "up")
            hung = Suspicion(worker=0, reason="no CPU", since_s=time.monotonic(), evidence={"state": "S"})
            n.agent._suspect(n.agent._workers.get(0), hung)
            suspected = await n.event(WorkerSuspected, worker=0)
            stacks = "\n".join(suspected.evidence["stacks"])
            assert suspected.evidence["stacks_from"] == "faulthandler"
            assert "forgotten_lock" in stacks and "helper_thread" in stacks
            folder = n.run_dir / suspected.evidence["folder"]
            assert "forgotten_lock" in (folder / "stacks.txt").read_text()

    asyncio.run(story())


def test_a_process_without_a_handler_survives_the_question_for_its_stacks(node: Any) -> None:
    async def story() -> None:
        async with node("print('up')\nimport time\ntime.sleep(300)") as n:
            await n.start(0, parked=False)
            await n.until(lambda: (n.run_dir / "logs" / "worker-0.stdout").exists() and n.log(0), "up")
            worker = n.agent._workers.get(0)
            worker.stacks.touch()
            facts: dict[str, Any] = {}
            await n.agent._witness.evidence.of_suspect(worker, facts)
            assert worker.alive and facts["stacks_from"] != "faulthandler"

    asyncio.run(story())


def test_progress_is_told_when_there_is_some_and_not_too_often(node: Any) -> None:
    async def story() -> None:
        async with node(TRAIN + "for _ in range(50):\n  time.sleep(0.02); p.step += 1\nc.receive()") as n:
            await n.start(0)
            await n.announce(3, 0)
            await n.event(NodeProgressed, steps={0: 50}, generation=3)
            count = len(n.events)
            assert count < 20
            await asyncio.sleep(0.5)
            assert len(n.events) == count

    asyncio.run(story())


def test_a_death_leaves_its_reason_and_its_last_lines(node: Any) -> None:
    code = "import sys; print('epoch 3', flush=True); sys.stderr.write('CUDA error: no luck'); sys.exit(9)"

    async def story() -> None:
        async with node(code) as n:
            await n.start(0, parked=False)
            await n.event(WorkerExited, worker=0)
            folder = n.run_dir / "evidence" / "worker-0-1"
            await n.until((folder / "summary.json").exists, "no evidence")
            assert json.loads((folder / "summary.json").read_text())["ended"] == "exit code 9"
            assert (folder / "stderr.tail").read_text() == "CUDA error: no luck"
            assert [line.text for line in n.lines] == ["[worker 0] CUDA error: no luck"]

    asyncio.run(story())


def test_console_lines_of_real_workers_carry_rank_and_generation(node: Any) -> None:
    code = """
import sys, worker_side
print("before the rank")
c = worker_side.park()
while (m := c.receive()):
    print("in", m.generation.number)
    sys.stderr.write("no newline at the end" if m.generation.number == 1 else "")
    if m.generation.number == 1: break
"""

    async def story() -> None:
        async with node(code) as n:
            await n.start(4, 5)
            await n.announce(0, 5, 4, fresh=True)
            await n.until(lambda: "in 0" in n.log(4) and "in 0" in n.log(5), "generation 0")
            await n.announce(1, 5, 4)
            for worker in (4, 5):
                await n.event(WorkerExited, worker=worker)
            by_worker = {w: [line.text for line in n.lines if line.worker == w] for w in (4, 5)}
            assert by_worker[5] == [
                "[rank 0 | worker 5 | gen 0] before the rank",
                "[rank 0 | worker 5 | gen 0] in 0",
                "[rank 0 | worker 5 | gen 1] in 1",
                "[rank 0 | worker 5 | gen 1] no newline at the end",
            ]
            assert by_worker[4] == ["[rank 1 | worker 4 | gen 1] no newline at the end"]

    asyncio.run(story())


def test_evidence_that_cannot_be_written_does_not_stop_the_agent(node: Any, tmp_path: Path) -> None:
    async def story() -> None:
        async with node("raise SystemExit(3)") as n:
            n.run_dir.mkdir(parents=True, exist_ok=True)
            (n.run_dir / "evidence").write_text("a file where the folder should be")
            await n.start(0, parked=False)
            await n.event(WorkerExited, worker=0)
            await asyncio.sleep(0.2)
            assert not n.running.done()
            await n.start(1, parked=False)
            await n.event(WorkerExited, worker=1)

    asyncio.run(story())


def test_whoever_hangs_while_others_wait_is_suspected_and_whoever_computes_is_not(node: Any) -> None:
    code = (
        TRAIN
        + """
for _ in range(20):
    time.sleep(0.02)
    p.step += 1
if worker_side.WORKER == 2:
    p.enter(Phase.GATE)  # it waits for the others
while True:
    time.sleep(0.3)
    until = time.thread_time() + 0.05
    while worker_side.WORKER == 1 and time.thread_time() < until:
        pass
"""
    )

    async def story() -> None:
        async with node(code, world_size=3) as n:
            await n.start(0, 1, 2)
            await n.announce(3, 0, 1, 2)
            suspected = await n.event(WorkerSuspected, timeout_s=40)
            assert suspected.worker == 0 and "no CPU, I/O or collective" in suspected.reason
            assert suspected.evidence["stacks_from"] in ("py-spy", "nowhere: py-spy took too long")
            await asyncio.sleep(1)
            assert [e.worker for e in n.events if isinstance(e, WorkerSuspected)] == [0]

    asyncio.run(story())

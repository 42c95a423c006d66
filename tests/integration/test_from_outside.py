"""Faults from outside a running job: stopped and continued ranks, killed spares and loader workers, user errors."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from keepstep.cli.reports import read_reports
from tests.integration.jobs import Job, assert_identical, command, environment, reference, run_job

DDP = ("--parallel", "ddp", "--until", "60", "--step-s", "0.1", "--workers", "1")
WAIT_S = 60.0


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not in {WAIT_S} s"
        time.sleep(0.05)


class Running:
    """A job under way, and its processes as the machine sees them."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[str]) -> None:
        self.run_dir = run_dir
        self.process = process

    def worker(self, number: int) -> psutil.Process:
        """The process of worker `number`."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if (
                    child.environ().get("KEEPSTEP_WORKER") == str(number)
                    and os.getpgid(child.pid) == child.pid
                ):
                    return child
            except (psutil.Error, ProcessLookupError):
                continue
        raise AssertionError(f"worker {number} is not there")

    def steps(self) -> int:
        """How many steps rank 0 has reported."""
        return len(read_reports(self.run_dir).counted(0))

    def has(self, kind: str) -> bool:
        """Whether the ledger holds an entry of this kind, beside generation 0."""
        entries = Job(0, "", self.run_dir).ledger(kind)
        return len(entries) > (1 if kind == "generation" else 0)


@contextmanager
def running(run_dir: Path, arguments: tuple[str, ...], *, ranks: int, spares: int) -> Iterator[Running]:
    output = run_dir.with_suffix(".out")
    with output.open("w") as file:
        process = subprocess.Popen(
            command(run_dir, arguments, ranks=ranks, spares=spares),
            env=environment(),
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield Running(run_dir, process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(30)


def finish(job: Running) -> Job:
    status = job.process.wait(100)
    return Job(status, job.run_dir.with_suffix(".out").read_text(), job.run_dir)


def test_a_stopped_rank_that_is_continued_after_its_fencing_changes_nothing(
    references: Path, tmp_path: Path
) -> None:
    undisturbed = reference(references, DDP, 2)
    with running(tmp_path / "run", DDP, ranks=2, spares=1) as job:
        wait_for(lambda: job.steps() > 8, "eight steps")
        victim = job.worker(1)
        victim.send_signal(signal.SIGSTOP)
        wait_for(lambda: job.has("generation"), "generation 1")
        try:
            victim.send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            pass  # ended already, which is what fencing is for
        wait_for(lambda: not victim.is_running() or victim.status() == "zombie", "the fenced worker's end")
        assert_identical(undisturbed, finish(job))


def test_a_parked_spare_that_dies_is_replaced_and_no_rank_is_touched(
    references: Path, tmp_path: Path
) -> None:
    undisturbed = reference(references, DDP, 2)
    with running(tmp_path / "run", DDP, ranks=2, spares=1) as job:
        wait_for(lambda: job.steps() > 4, "four steps")
        job.worker(2).kill()
        ended = finish(job)
    assert_identical(undisturbed, ended)
    assert len(ended.ledger("generation")) == 1
    assert "spare" in ended.output


def test_a_killed_loader_worker_costs_nothing(references: Path, tmp_path: Path) -> None:
    undisturbed = reference(references, DDP, 2)
    with running(tmp_path / "run", DDP, ranks=2, spares=1) as job:
        wait_for(lambda: job.steps() > 8, "eight steps")
        loaders = job.worker(1).children(recursive=True)
        assert loaders, "the rank has no loader worker"
        for loader in loaders:
            loader.kill()
        assert_identical(undisturbed, finish(job))


def test_a_slow_step_is_never_taken_for_a_death(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(
        "import time, torch, keepstep\n"
        "run = keepstep.init()\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "run.protect(model=model, optimizer=optimizer)\n"
        "for step in run.steps(until=12):\n"
        "    with step:\n"
        "        if step.number == 6 and run.rank == 1: time.sleep(6)\n"
        "        model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    job = run_job(tmp_path / "run", [str(script)], ranks=2, spares=1)
    assert job.status == 0, job.output + job.worker_log()
    assert len(job.ledger("generation")) == 1


def test_an_error_of_the_script_ends_the_job_with_its_traceback_and_burns_no_spare(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(
        "import torch, keepstep\n"
        "run = keepstep.init()\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "run.protect(model=model, optimizer=optimizer)\n"
        "for step in run.steps(until=12):\n"
        "    with step:\n"
        "        if step.number == 6 and run.rank == 1: {}['lost key']\n"
        "        model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    job = run_job(tmp_path / "run", [str(script)], ranks=2, spares=1)
    assert job.status == 1, job.output
    assert "KeyError: 'lost key'" in job.output
    assert len(job.ledger("generation")) == 1


def test_the_scripts_own_exit_code_is_the_jobs(tmp_path: Path) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(
        "import sys, torch, keepstep\n"
        "run = keepstep.init()\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "run.protect(model=model, optimizer=optimizer)\n"
        "for step in run.steps(until=12):\n"
        "    with step:\n"
        "        if step.number == 6: sys.exit(17)\n"
        "        model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    job = run_job(tmp_path / "run", [str(script)], ranks=2)
    assert job.status == 17, job.output


def test_an_error_of_user_code_in_a_poisoned_step_is_swallowed(tmp_path: Path) -> None:
    """The script chokes on the rubbish of a poisoned step; the step is served again and it does not."""
    script = tmp_path / "chokes.py"
    script.write_text(
        "import torch, keepstep, torch.distributed as dist\n"
        "run = keepstep.init()\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "run.protect(model=model, optimizer=optimizer)\n"
        "for step in run.steps(until=14):\n"
        "    with step:\n"
        "        count = torch.ones(1); dist.all_reduce(count)\n"
        "        assert count.item() == 2.0, 'a peer is missing'\n"
        "        model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "run.finish(lambda: print('saved', flush=True))\n"
    )
    fault = "rank=1,step=7,at=forward"
    job = run_job(tmp_path / "run", [str(script)], ranks=2, spares=1, faults=[fault])
    assert job.status == 0, job.output + job.worker_log()
    assert len(job.ledger("generation")) == 2
    assert job.output.count("saved") == 1


def test_what_comes_after_the_loop_is_done_by_the_replacement_of_rank_0(tmp_path: Path) -> None:
    script = tmp_path / "finishes.py"
    script.write_text(
        "import os, signal, torch, keepstep, pathlib, sys\n"
        "run = keepstep.init()\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "run.protect(model=model, optimizer=optimizer)\n"
        "for step in run.steps(until=8):\n"
        "    with step:\n"
        "        model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
        "def save():\n"
        "    mark = pathlib.Path(sys.argv[1])\n"
        "    if not mark.exists():\n"
        "        mark.touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "    print('saved', model.module.weight.sum().item(), flush=True)\n"
        "run.finish(save)\n"
    )
    job = run_job(tmp_path / "run", [str(script), str(tmp_path / "mark")], ranks=2, spares=1)
    assert job.status == 0, job.output + job.worker_log()
    assert job.output.count("saved") == 1
    assert len(job.ledger("generation")) == 2

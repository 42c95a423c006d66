"""Faults from outside a running job: stopped and continued ranks, killed spares and loader workers, user errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from keepstep.cli.reports import read_reports
from keepstep.controller.rundir import RunDirectory
from tests.integration.jobs import DDP, Job, assert_identical, command, environment, reference, run_job
from tests.integration.nodes import permit

WITH_LOADER = (*DDP, "--step-s", "0.05", "--workers", "1")
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

    def parked(self, number: int) -> bool:
        """Whether worker `number` waits as a spare."""
        address = RunDirectory(self.run_dir).address()
        assert address is not None
        token = {"Authorization": f"Bearer {address.token}"}
        with urllib.request.urlopen(
            urllib.request.Request(address.url + "/api/status", headers=token), timeout=10
        ) as answer:
            states = {row["worker"]: row["state"] for row in json.load(answer)["workers"]}
        return states.get(number) in ("warm", "hot")

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


def test_a_loader_worker_a_spare_and_a_rank_are_harmed_and_only_the_rank_is_replaced(
    references: Path, tmp_path: Path
) -> None:
    """In one job. The rank is stopped, and continued after its fencing: it changes nothing any more."""
    undisturbed = reference(references, WITH_LOADER, 2)
    permit(tmp_path, 8)
    with running(
        tmp_path / "run", (*WITH_LOADER, "--permit", str(tmp_path / "permit")), ranks=2, spares=1
    ) as job:
        wait_for(lambda: job.steps() >= 8, "eight steps")
        loaders = job.worker(1).children(recursive=True)
        assert loaders, "the rank has no loader worker"
        for loader in loaders:
            loader.kill()
        permit(tmp_path, 20)
        wait_for(lambda: job.steps() >= 20, "twenty steps")
        assert not job.has("generation")

        job.worker(2).kill()
        wait_for(lambda: job.parked(3), "a new spare")
        permit(tmp_path, 1000)
        wait_for(lambda: job.steps() > 24, "steps after the spare's death")
        assert not job.has("generation")

        victim = job.worker(1)
        victim.send_signal(signal.SIGSTOP)
        wait_for(lambda: job.has("generation"), "generation 1")
        try:
            victim.send_signal(signal.SIGCONT)
        except psutil.NoSuchProcess:
            pass  # ended already, which is what fencing is for
        wait_for(lambda: not victim.is_running() or victim.status() == "zombie", "the fenced worker's end")
        ended = finish(job)
    assert_identical(undisturbed, ended)
    assert ended.ledger("generation")[-1]["ranks"] == [0, 3] and len(ended.ledger("generation")) == 2
    assert "spare" in ended.output


def test_a_slow_step_is_no_death_rubbish_may_choke_user_code_and_what_comes_after_the_loop_is_done_once(
    tmp_path: Path,
) -> None:
    """Rank 1 takes 6 s for a step; it dies, and the script chokes on the rubbish of the poisoned step, which is served
    again; rank 0 dies in what comes after the loop, and its replacement does it.
    """
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, signal, sys, time, torch, keepstep, torch.distributed as dist\n"
        "run = keepstep.init()\n"
        "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "run.protect(model=model, optimizer=optimizer)\n"
        "for step in run.steps(until=14):\n"
        "    with step:\n"
        "        if step.number == 6 and run.rank == 1: time.sleep(6)\n"
        "        loss = model(torch.ones(2, 4)).sum()\n"
        "        seen = [torch.zeros(1), torch.zeros(1)]\n"
        "        dist.all_gather(seen, torch.tensor([float(run.rank)]))\n"
        "        if run.live and seen[0] == seen[1]:\n"
        "            print('choked', flush=True)\n"
        "            raise ValueError('the other rank has my number')\n"
        "        loss.backward(); optimizer.step(); optimizer.zero_grad()\n"
        "def save():\n"
        "    mark = pathlib.Path(sys.argv[1])\n"
        "    if not mark.exists():\n"
        "        mark.touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "    print('saved', model.module.weight.sum().item(), flush=True)\n"
        "run.finish(save)\n"
    )
    fault = "rank=1,step=9,at=forward"
    job = run_job(tmp_path / "run", [str(script), str(tmp_path / "mark")], ranks=2, spares=2, faults=[fault])
    assert job.status == 0, job.output + job.worker_log()
    choke, finish = job.ledger("incident_closed")
    assert [victim["rank"] for victim in choke["victims"]] == [1] and choke["victims"][0]["step"] == 9
    assert [victim["rank"] for victim in finish["victims"]] == [0]
    assert len(job.ledger("generation")) == 3
    assert job.output.count("choked") == 1
    assert job.output.count("saved") == 1


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

"""A rank is moved while its player lives: nothing is lost, nothing computed again, and the losses stay the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli.source import NoAnswer, request, status_of
from keepstep.controller.rundir import RunDirectory
from keepstep.errors import UsageError
from tests.integration.jobs import HOT, HSDP, Job, assert_identical, command, environment, reference

HELD, FREE = 8, 1_000_000
WAIT_S = 90.0


class Moving:
    """A job held before step 8 until `free`, and what can be asked of it."""

    def __init__(
        self, folder: Path, arguments: tuple[str, ...], ranks: int, spares: int, faults: tuple[str, ...]
    ) -> None:
        self.permit = folder / "permit"
        self.permit.write_text(str(HELD))
        self.run_dir = folder / "run"
        self.output = folder / "out"
        line = command(self.run_dir, (*arguments, "--permit", str(self.permit)), ranks=ranks, spares=spares)
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                line,
                env=environment(KEEPSTEP_FAULTS=json.dumps(faults)),
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def status(self) -> dict[str, Any]:
        return status_of(RunDirectory(self.run_dir))

    def wait_for(self, condition: Callable[[dict[str, Any]], object], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while True:
            try:
                if condition(self.status()):
                    return
            except (OSError, NoAnswer, UsageError, KeyError, TypeError, ValueError):
                pass  # it is just beginning
            assert self.process.poll() is None, f"{what}: the job has ended\n{self.output.read_text()}"
            assert time.monotonic() < deadline_s, f"{what}: not in {WAIT_S} s\n{self.output.read_text()}"
            time.sleep(0.05)

    def ready(self, kind: str, count: int = 1) -> None:
        """Until `count` spares are `kind` and the ranks stand at the permit."""
        self.wait_for(lambda s: s["spares"][kind] >= count and s["step"] >= HELD, f"{count} {kind} spares")

    def free(self) -> None:
        self.permit.write_text(str(FREE))

    def ask(self, what: str, **body: Any) -> None:
        request(RunDirectory(self.run_dir), f"/api/{what}", body)

    def worker(self, number: int) -> int:
        """The process id of a worker."""
        import psutil

        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if (
                    child.environ().get("KEEPSTEP_WORKER") == str(number)
                    and os.getpgid(child.pid) == child.pid
                ):
                    return int(child.pid)
            except (psutil.Error, ProcessLookupError):
                continue
        raise AssertionError(f"worker {number} is not there")

    def finish(self) -> Job:
        return Job(self.process.wait(100), self.output.read_text(), self.run_dir)


@contextmanager
def moving(
    folder: Path, arguments: tuple[str, ...], *, ranks: int, spares: int = 1, faults: tuple[str, ...] = ()
) -> Iterator[Moving]:
    job = Moving(folder, arguments, ranks, spares, faults)
    try:
        yield job
    finally:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)
            job.process.wait(30)


def migrations(job: Job) -> list[dict[str, Any]]:
    return [body for body in job.ledger("incident_closed") if body["cause"] == "migration"]


PACE = ("--step-s", "0.05")
ALONE = ("--parallel", "plain", "--clip", "--scaler", "--augment", "--samples", "4000", "--until", "90")
CASES = {
    # Without BatchNorm: what a forward changes crosses at the boundary, and all else with it.
    "ddp, a hot spare": (
        ("--parallel", "ddp", "--samples", "4000", "--until", "90", *HOT, *PACE),
        2,
        "hot",
        1,
    ),
    "hsdp, a warm spare, a loader and dropped samples": (
        (*HSDP, *PACE),
        4,
        "warm",
        2,
    ),
    "one rank, whose state has no replica": (
        (*ALONE, *PACE),
        1,
        "warm",
        0,
    ),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", CASES)
def test_a_rank_moves_and_nobody_computes_anything_again(name: str, references: Path, tmp_path: Path) -> None:
    arguments, ranks, kind, rank = CASES[name]
    undisturbed = reference(references, arguments, ranks)
    with moving(tmp_path, arguments, ranks=ranks) as job:
        job.ready(kind)
        job.free()
        told = subprocess.run(
            [sys.executable, "-m", "keepstep", "migrate", "--rank", str(rank), "--run", str(job.run_dir)],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        ended = job.finish()
    assert told.returncode == 0, told.stdout + told.stderr + ended.output
    assert "copies its state; training goes on" in told.stdout or "is the target" in told.stdout
    assert f"rank {rank}: played by worker {ranks}" in told.stdout
    assert_identical(undisturbed, ended)
    (incident,) = ended.ledger("incident_closed")
    assert (incident["cause"], incident["resolution"]) == ("migration", "moved")
    assert incident["steps_lost"] == incident["steps_recomputed"] == 0 and incident["bit_exact"]
    (moved,) = incident["evidence"]["moves"]
    assert (moved["rank"], moved["source"], moved["target"]) == (rank, rank, ranks)
    if moved["copied_bytes"]:  # AdamW keeps two values beside each parameter: a third of it is gradients
        assert incident["transfer_bytes"] < 0.4 * moved["copied_bytes"], (
            "more than gradients crossed at the boundary"
        )
    assert len(ended.ledger("generation")) == 2
    retired = [note for note in ended.ledger("note") if note["about"] == "retired"]
    assert [note["worker"] for note in retired] == [rank]


def test_a_target_that_dies_while_it_is_prepared_is_never_noticed(references: Path, tmp_path: Path) -> None:
    arguments = CASES["ddp, a hot spare"][0]
    undisturbed = reference(references, arguments, 2)
    with moving(tmp_path, arguments, ranks=2, spares=2) as job:
        job.ready("hot", 2)
        target = job.worker(2)
        os.kill(target, signal.SIGSTOP)  # it will not get far
        job.ask("moves", rank=1, reason="a test", by="a test")
        job.wait_for(lambda s: any(m["stage"] == "preparing" for m in s["moves"]), "a target")
        os.kill(target, signal.SIGKILL)
        job.free()
        job.wait_for(lambda s: not s["moves"] and s["generation"] == 1, "the move to the other spare")
        ended = job.finish()
    assert_identical(undisturbed, ended)
    (incident,) = ended.ledger("incident_closed")
    assert incident["cause"] == "migration" and incident["steps_recomputed"] == 0
    assert [body["ranks"] for body in ended.ledger("generation")] == [[0, 1], [0, 3]]


def test_a_source_that_dies_on_the_way_is_a_crash_and_its_target_takes_over(
    references: Path, tmp_path: Path
) -> None:
    arguments = CASES["ddp, a hot spare"][0]
    undisturbed = reference(references, arguments, 2)
    with moving(tmp_path, arguments, ranks=2, spares=2) as job:
        job.ready("hot", 2)
        job.ask("moves", rank=1, reason="a test", by="a test")
        job.wait_for(lambda s: any(m["stage"] == "preparing" for m in s["moves"]), "a target")
        os.kill(job.worker(1), signal.SIGKILL)
        job.free()
        ended = job.finish()
    assert_identical(undisturbed, ended)
    (incident,) = ended.ledger("incident_closed")
    assert (incident["cause"], incident["resolution"]) == ("death", "rebuilt") and incident["steps_lost"] == 0
    assert [body["ranks"] for body in ended.ledger("generation")] == [[0, 1], [0, 2]]


def test_what_cannot_be_moved_is_one_line(tmp_path: Path) -> None:
    with moving(tmp_path, (*ALONE, *PACE), ranks=1, spares=0) as job:
        job.wait_for(lambda s: s["step"] >= HELD, "the first steps")
        for body, text in (
            ({"rank": 7}, "there is no rank 7: this job has ranks 0 to 0"),
            ({"rank": 0, "to": "node9"}, "there is no node node9: the nodes are node0"),
            ({"rank": 0, "to": "node0"}, "node node0 is full"),
        ):
            with pytest.raises(UsageError, match=text):
                job.ask("moves", **body)
        job.ask("moves", rank=0)
        with pytest.raises(UsageError, match="rank 0 is moving already"):
            job.ask("moves", rank=0)
        with pytest.raises(UsageError, match="node node0 is not being drained"):
            job.ask("undrains", node="node0")
        job.wait_for(lambda s: s["moves"][0]["waits"] == "a spare", "the word that a spare is missing")

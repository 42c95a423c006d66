"""Runs whole jobs for the tests: `keepstep run` as a user starts it, with faults, and its undisturbed twin."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.cli.reports import Comparison, Reports, compare, read_reports
from keepstep.controller.ledger import LedgerReader

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
JOB_TIMEOUT_S = 120.0

# What most jobs train: those with as many ranks share one undisturbed run.
STEPS = 96
DDP = ("--parallel", "ddp", "--aside", "--norm", "--epochs", "99", "--until", str(STEPS))
HSDP = ("--parallel", "hsdp", "--aside", "--epochs", "99", "--until", str(STEPS))
HOT = ("--symmetric",)
# Flags of the script that change no loss and no byte of the state, and how many words each takes.
NOT_COMPUTED = {"--symmetric": 1, "--step-s": 2}


@dataclass(frozen=True, slots=True)
class Job:
    """A job that has ended."""

    status: int
    output: str
    run_dir: Path

    @property
    def reports(self) -> Reports:
        return read_reports(self.run_dir)

    def ledger(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Bodies of the ledger's entries of one kind (or all), oldest first."""
        with LedgerReader(self.run_dir / "ledger.sqlite") as ledger:
            return [entry.value() for entry in ledger.entries() if kind is None or entry.kind == kind]

    def worker_log(self) -> str:
        """Everything that the workers wrote to stderr."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')}"
            for path in sorted((self.run_dir / "logs").glob("*.stderr"))
        )


def environment(**extra: str) -> dict[str, str]:
    """The tests' own environment with what a job needs on top."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "KEEPSTEP_FINGERPRINT": "1", **extra}


def command(
    run_dir: Path, arguments: Sequence[str], *, ranks: int, spares: int, options: Sequence[str] = ()
) -> list[str]:
    """The command line of a job."""
    return [
        *(sys.executable, "-m", "keepstep", "run", "--nproc-per-node", str(ranks), "--spares", str(spares)),
        *("--log-dir", str(run_dir), *options),
        *(arguments if arguments and arguments[0].endswith(".py") else (str(SCRIPT), *arguments)),
    ]


def run_job(
    run_dir: Path,
    arguments: Sequence[str],
    *,
    ranks: int,
    spares: int = 0,
    faults: Sequence[str] = (),
    options: Sequence[str] = (),
    env: dict[str, str] | None = None,
    timeout_s: float = JOB_TIMEOUT_S,
) -> Job:
    """Run a job to its end. `faults`: in the vocabulary of `keepstep.core.faults`."""
    ended = subprocess.run(
        command(run_dir, arguments, ranks=ranks, spares=spares, options=options),
        env=environment(KEEPSTEP_FAULTS=json.dumps(list(faults)), **(env or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        text=True,
        errors="replace",
        check=False,
    )
    return Job(ended.returncode, ended.stdout, run_dir)


def computed(arguments: Sequence[str]) -> tuple[str, ...]:
    """The arguments that decide what is computed."""
    words, kept = list(arguments), []
    while words:
        count = NOT_COMPUTED.get(words[0], 0)
        kept.extend(words[: 0 if count else 1])
        del words[: count or 1]
    return tuple(kept)


def reference(folder: Path, arguments: Sequence[str], ranks: int) -> Job:
    """The undisturbed run, made once for all test processes of a session, by whoever needs it first."""
    arguments = computed(arguments)
    name = hashlib.sha256(repr((arguments, ranks)).encode()).hexdigest()[:12]
    run_dir, output = folder / name, folder / f"{name}.out"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            job = run_job(run_dir, arguments, ranks=ranks)
            assert job.status == 0, job.output + job.worker_log()
            output.write_text(job.output)
    return Job(0, output.read_text(), run_dir)


def assert_identical(undisturbed: Job, disturbed: Job) -> Comparison:
    """Every loss of every rank and step, and the final state: bit for bit."""
    assert disturbed.status == 0, disturbed.output + disturbed.worker_log()
    comparison = compare(undisturbed.reports, disturbed.reports)
    assert comparison.identical, f"{comparison.difference}\n{disturbed.output}\n{disturbed.worker_log()}"
    return comparison

"""A controller that takes up a run whose controller has died: ledger, token, address and the job's description.

Training has gone on meanwhile; agents find the same address again. It decides nothing: what the ledger means
is the core's affair (`JobMachine.resume`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from keepstep.controller.ledger import Entry, Ledger
from keepstep.controller.rundir import RunDirectory, write_private
from keepstep.core.actions import Persist
from keepstep.core.job import JobMachine
from keepstep.core.job_config import JobConfig
from keepstep.errors import UsageError, WireError
from keepstep.wire.codec import as_json, from_json
from keepstep.wire.messages import JobSpec

# What makes it another job. The rest (spares, mode, limits) may be given anew.
_IDENTITY = ("script", "args", "world_size", "launch")


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenUp:
    """A run that goes on. `ledger` is open and locked: whoever takes it up closes it."""

    ledger: Ledger
    entries: tuple[Entry, ...]
    spec: JobSpec
    token: str
    host: str
    port: int

    def machine(self, config: JobConfig) -> JobMachine:
        """The job's machine, as its ledger left it. Raises UsageError."""
        try:
            return JobMachine.resume(config, [Persist(kind=e.kind, body=e.value()) for e in self.entries])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self.ledger.path} does not tell of a job that could go on: {error}") from None


def keep(run_dir: RunDirectory, spec: JobSpec, host: str, port: int) -> None:
    """Write down what the next controller needs and the ledger does not say. Raises OSError."""
    body = {"spec": as_json(spec), "host": host, "port": port}
    write_private(run_dir.job_file, json.dumps(body, indent=2) + "\n")


def take_up(
    run_dir: RunDirectory, spec: JobSpec, *, job: str | None = None, token: str | None = None
) -> TakenUp:
    """Open a run that its controller has left behind. Raises UsageError, in one line, when there is none to go on with.

    `spec`: the job as it is described now; what makes it that job must not differ. `job`: its name, if the
    user gave one. `token`: None takes the one that lies in the run directory.
    """
    ledger = Ledger(run_dir.ledger)  # refuses when another controller writes it
    try:
        entries = tuple(ledger.entries())
        check = ledger.verify()
        if check.flaw is not None:
            raise UsageError(f"{ledger.path} is damaged, so nobody goes on from it: {check.flaw}")
        if is_over(ledger):
            code = next(entry for entry in entries if entry.kind == "end").value().get("exit_code")
            raise UsageError(
                f"{run_dir.path} already holds a run, and it has ended (exit code {code}): choose another --log-dir"
            )
        kept, host, port = _read(run_dir)
        _compare(run_dir, kept, spec, job)
        if token is None:
            token = _token(run_dir)
        merged = replace(spec, job=kept.job, working_dir=kept.working_dir, env=kept.env)
        return TakenUp(ledger=ledger, entries=entries, spec=merged, token=token, host=host, port=port)
    except BaseException:
        ledger.close()
        raise


def is_over(ledger: Ledger) -> bool:
    """Whether the job's end is written down: nobody may go on from there."""
    return any(entry.kind == "end" for entry in ledger.entries())


def _read(run_dir: RunDirectory) -> tuple[JobSpec, str, int]:
    try:
        raw: Any = json.loads(run_dir.job_file.read_text())
        spec = from_json(raw["spec"])
        if not isinstance(spec, JobSpec):
            raise WireError("it describes no job")
        return spec, str(raw["host"]), int(raw["port"])
    except (OSError, ValueError, KeyError, TypeError, WireError) as error:
        raise UsageError(
            f"{run_dir.path} already holds a run that cannot be taken up ({run_dir.job_file.name}: {error}): "
            "choose another --log-dir"
        ) from None


def _compare(run_dir: RunDirectory, kept: JobSpec, spec: JobSpec, job: str | None) -> None:
    differing = [name for name in _IDENTITY if getattr(kept, name) != getattr(spec, name)]
    if job is not None and job != kept.job:
        differing.insert(0, "job")
    if differing:
        name = differing[0]
        before, now = getattr(kept, name), job if name == "job" else getattr(spec, name)
        raise UsageError(
            f"{run_dir.path} holds another job, which has not ended: there {name} is {before!r}, not {now!r}. "
            "Choose another --log-dir, or start the controller as before"
        )


def _token(run_dir: RunDirectory) -> str:
    try:
        return run_dir.token_file.read_text().strip()
    except OSError as error:
        raise UsageError(
            f"the token of the run in {run_dir.path} is gone ({error.strerror}): give it with --token-file"
        ) from None

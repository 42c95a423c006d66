"""The three runs of a proof, one after the other, and what comes out of them.

Each is a whole job, started as a user starts it. It decides how many of them the question needs, and asks
`prove_compare` and `prove_faults` what they say.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.cli.jobs import JobFailed, LaunchedJob
from keepstep.cli.prove_compare import Death, Difference, first_difference, same_state, usual_cause
from keepstep.cli.prove_faults import Strike, beyond_the_end, deaths, strikes
from keepstep.cli.prove_record import RunRecord
from keepstep.cli.prove_view import ProveView
from keepstep.cli.reports import recomputation
from keepstep.core.faults import Fault
from keepstep.errors import KeepstepError

EXIT_IDENTICAL = 0
EXIT_DIFFERENT = 1
EXIT_NONDETERMINISTIC = 3
EXIT_NEVER_STRUCK = 4
EXIT_NO_ANSWER = 5

NO_LIMIT_S = 30 * 86_400.0
# A hang must end some time: after this, and so many times what an undisturbed run took.
HARMED_LIMIT_S, HARMED_LIMIT_FACTOR = 300.0, 10.0
RUNS = ("undisturbed-1", "undisturbed-2", "with-faults")
SAID = ("keepstep: generation ", "keepstep: incident ", "keepstep: error: ", "keepstep: warning: ")


class NoProof(KeepstepError):  # noqa: N818 - an outcome, not a fault of this code
    """A run failed for reasons of its own. The message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be proven."""

    script: str
    module: bool = False
    args: tuple[str, ...]
    ranks: int
    spares: int
    faults: Sequence[Fault]
    ignored: frozenset[str]
    limit_s: float | None


@dataclass(slots=True, kw_only=True)
class Proof:
    """What came out. `identical` is None when the question was never answered."""

    steps: int
    deterministic: bool = True
    identical: bool | None = None
    first_difference: Difference | None = None
    cause: str = ""
    strikes: list[Strike] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    recomputed_steps: int = 0
    committed_steps_lost: int = 0
    last_output: str = ""

    @property
    def exit_code(self) -> int:
        if not self.deterministic:
            return EXIT_NONDETERMINISTIC
        if self.first_difference is not None:
            return EXIT_DIFFERENT
        return EXIT_IDENTICAL if self.identical else EXIT_NEVER_STRUCK

    def as_json(self) -> dict[str, Any]:
        difference = self.first_difference
        return {
            "deterministic": self.deterministic,
            "identical": self.identical,
            "first_difference": None if difference is None else difference.as_json(),
            "usual_cause": self.cause or None,
            "faults": [strike.as_json() for strike in self.strikes],
            "steps": self.steps,
            "incidents": self.incidents,
            "recomputed_steps": self.recomputed_steps,
            "committed_steps_lost": self.committed_steps_lost,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A job that has ended."""

    record: RunRecord
    exit_code: int
    seconds: float
    incidents: list[dict[str, Any]]
    last_output: str


def carry_out(request: Request, folder: Path, view: ProveView) -> Proof:
    """The runs, as many as the question needs. Raises NoProof when one fails by itself."""
    calm = [_undisturbed(request, folder / name, view, number) for number, name in enumerate(RUNS[:2], 1)]
    first, second = (run.record for run in calm)
    proof = Proof(steps=first.steps, strikes=[Strike(fault=fault) for fault in request.faults])
    difference = _compare(first, second)
    if difference is not None:
        proof.deterministic = False
        proof.first_difference = difference
        proof.cause = usual_cause(difference, state_agrees=same_state(first, second))
        return proof
    if any(beyond_the_end(fault, first.steps) for fault in request.faults):
        return proof  # known before the third run: it would prove nothing
    limit_s = request.limit_s or HARMED_LIMIT_S + HARMED_LIMIT_FACTOR * max(run.seconds for run in calm)
    view.begin("with faults", first.steps)
    harmed = _run(request, folder / RUNS[2], view, limit_s=limit_s, faults=request.faults)
    proof.incidents = harmed.incidents
    proof.strikes = strikes(request.faults, folder / RUNS[2], harmed.incidents)
    twice = recomputation(harmed.record.lines)
    proof.recomputed_steps = max(twice.recomputed_steps, _sum(harmed.incidents, "steps_recomputed"))
    proof.committed_steps_lost = max(twice.committed_steps_lost, _sum(harmed.incidents, "steps_lost"))
    if harmed.exit_code != 0 and not any(strike.worker is not None for strike in proof.strikes):
        raise NoProof(
            f"the run with faults ended with exit code {harmed.exit_code} before any fault struck; its last output:\n"
            f"{harmed.last_output}"
        )
    if harmed.exit_code != 0:
        proof.last_output = harmed.last_output
        proof.first_difference = Difference(
            what="exit", name="exit code", expected="0", found=str(harmed.exit_code)
        )
    else:
        proof.first_difference = _compare(first, harmed.record, deaths(harmed.incidents))
    if proof.first_difference is not None:
        proof.identical = False
    elif all(strike.struck for strike in proof.strikes):
        proof.identical = True
    return proof


def _compare(expected: RunRecord, found: RunRecord, lost: Collection[Death] = ()) -> Difference | None:
    try:
        return first_difference(expected, found, lost)
    except ValueError as error:
        raise NoProof(
            f"{error}: does the script call keepstep.init() and run.protect(), and iterate over run.steps()?"
        ) from None


def _undisturbed(request: Request, run_dir: Path, view: ProveView, number: int) -> Run:
    view.begin(f"undisturbed, {number} of 2", None)
    run = _run(request, run_dir, view, limit_s=request.limit_s or NO_LIMIT_S)
    if run.exit_code != 0:
        raise NoProof(
            f"left alone, the script ends with exit code {run.exit_code}; its last output:\n{run.last_output}"
        )
    if run.incidents:
        raise NoProof(f"a run was to be undisturbed, and was not: {run.incidents[0].get('reason', '')}")
    return run


def _run(
    request: Request, run_dir: Path, view: ProveView, *, limit_s: float, faults: Sequence[Fault] = ()
) -> Run:
    """One job to its end. `faults`: empty for an undisturbed run, which needs no spares either."""
    record = RunRecord(run_dir, ignored=request.ignored)
    started_s = time.monotonic()
    with LaunchedJob(
        request.script,
        request.args,
        module=request.module,
        ranks=request.ranks,
        spares=request.spares if faults else 0,
        run_dir=run_dir,
        environment={
            "KEEPSTEP_FINGERPRINT": "steps",
            "KEEPSTEP_FAULTS": json.dumps([str(fault) for fault in faults]),
        },
    ) as job:

        def look() -> None:
            record.poll()
            view.reached(record.steps)
            for text in job.console_lines():
                if text.startswith(SAID):
                    view.note(text.removeprefix("keepstep: "))

        ending = ""
        try:
            code = job.wait_for_exit(timeout_s=limit_s, each_poll=look)
        except JobFailed as error:
            if not faults:
                raise NoProof(str(error)) from None
            view.note(f"it did not end within {limit_s:.0f} s and is ended now")
            job.end()
            code = job.exit_code if job.exit_code is not None else -1
            ending = str(error)
        view.end(time.monotonic() - started_s)
        ledger = run_dir / "ledger.sqlite"
        return Run(
            record=record,
            exit_code=code,
            seconds=time.monotonic() - started_s,
            incidents=job.incidents() if ledger.exists() else [],
            last_output=ending or job.last_output(),
        )


def _sum(incidents: Sequence[dict[str, Any]], name: str) -> int:
    return sum(int(incident.get(name) or 0) for incident in incidents)


# ---- what is said -------------------------------------------------------------------------------------


def verdict(request: Request, proof: Proof) -> list[str]:
    """The result for a human, its first line the answer."""
    difference = proof.first_difference
    if not proof.deterministic:
        return [
            "The script does not repeat itself: two undisturbed runs already differ, so nothing is proven about "
            "Keepstep.",
            f"first difference: {difference}",
            f"usual cause:      {proof.cause}",
        ]
    missed = [strike.why_not(proof.steps) for strike in proof.strikes if not strike.struck]
    cost = (
        f"{len(proof.incidents)} incident{'s' * (len(proof.incidents) != 1)}, "
        f"{proof.committed_steps_lost} committed steps lost, {proof.recomputed_steps} computed again"
    )
    told = [f"  {incident.get('reason', '')}" for incident in proof.incidents]
    if difference is not None and difference.what == "exit":
        return [
            f"Not identical: with faults the run ends with exit code {difference.found}.",
            cost,
            *told,
            "its last output:",
            proof.last_output,
        ]
    if difference is not None:
        return [f"Not identical: the first difference is {difference}.", cost, *told, *missed]
    if not proof.identical:
        return ["No proof: a fault never struck.", *missed]
    return [
        f"Identical: {proof.steps} steps on {request.ranks} ranks; every reported value and every tensor after "
        f"every step equal the undisturbed run bit for bit.",
        cost,
        *told,
    ]

"""The soak: jobs are harmed at random, and each must equal its undisturbed reference bit for bit.

`python -m tests.chaos.soak --kills 50 [--seed N] [--job N]`, or `make soak`. What is done comes from the seed
(see plan.py); a job that fails names the command that repeats it. The moment within a step is the machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from benchmarks.permit import permit_steps
from keepstep.cli.jobs import JobFailed, LaunchedJob
from keepstep.cli.prove_faults import strikes
from keepstep.cli.reports import Reports, compare, recomputation
from keepstep.controller.ledger import LedgerReader
from tests.chaos.plan import BURST_STEPS, Blow, JobPlan, draw, plans

SCRIPT = Path(__file__).parent / "job.py"
LIMIT_S = 300.0  # for any one thing that is waited for: nothing here is a measurement
ASK_EVERY_S = 0.3
BLOWS_PER_JOB = 5

Say = Callable[[str], object]


class SoakFailed(AssertionError):  # noqa: N818 - an outcome
    """A job was not what its reference is. The message ends with the command that repeats it."""


@dataclass(slots=True)
class Count:
    """What a soak has done so far."""

    kills: int = 0
    missed: int = 0
    jobs: int = 0
    incidents: int = 0
    recomputed: int = 0
    struck: list[str] = field(default_factory=list)


def soak(
    folder: Path, seed: int, kills: int, *, blows_per_job: int = BLOWS_PER_JOB, say: Say = print
) -> Count:
    """Harm jobs until so many kills have struck. Raises SoakFailed at the first job that is not identical."""
    count = Count()
    references = References(folder)
    most = 4 + 2 * kills // blows_per_job  # blows that never struck are made up for, within reason
    for number, plan in enumerate(islice(plans(seed, blows_per_job), most)):
        if count.kills >= kills:
            return count
        one(folder, seed, number, plan, blows_per_job, references, count, say)
    if count.kills < kills:
        raise SoakFailed(f"seed {seed}: {count.kills} of {kills} kills struck in {most} jobs")
    return count


def one(
    folder: Path,
    seed: int,
    number: int,
    plan: JobPlan,
    blows_per_job: int,
    references: References,
    count: Count,
    say: Say,
) -> None:
    """One job of a soak. Raises SoakFailed with the command that repeats it."""
    say(str(plan))
    try:
        Harmed(plan, folder, seed, count, say).run(references)
    except (JobFailed, AssertionError) as error:
        again = f"python -m tests.chaos.soak --seed {seed} --job {number} --blows {blows_per_job}"
        blows = "\n".join(f"  {blow}" for blow in plan.blows)
        raise SoakFailed(f"{plan}\n{blows}\n{error}\nrun directory: {folder}\nrepeat: {again}") from None


class References:
    """Undisturbed runs, one for each kind of job."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[str, int], Reports] = {}

    def of(self, plan: JobPlan) -> Reports:
        key = (plan.parallel, plan.steps)
        if key not in self._known:
            run_dir = self._folder / f"reference-{plan.parallel}-{plan.steps}"
            with _launch(plan, run_dir, [], spares=0) as job:
                if (code := job.wait_for_exit(timeout_s=LIMIT_S)) != 0:
                    raise JobFailed(f"the undisturbed run ended with {code}:\n{job.last_output()}")
                job.reader.poll()
                self._known[key] = job.reader.reports
        return self._known[key]


def _launch(plan: JobPlan, run_dir: Path, more: list[str], *, spares: int, faults: str = "[]") -> LaunchedJob:
    return LaunchedJob(
        SCRIPT,
        ["--parallel", plan.parallel, "--steps", str(plan.steps), *more],
        ranks=plan.ranks,
        spares=spares,
        run_dir=run_dir,
        environment={
            "KEEPSTEP_FINGERPRINT": "1",
            "KEEPSTEP_FAULTS": faults,
            "KEEPSTEP_MAX_RESTARTS": "1000",
            "OMP_NUM_THREADS": "1",
        },
    )


class Harmed:
    """One job that is harmed in every burst but the first."""

    def __init__(self, plan: JobPlan, folder: Path, seed: int, count: Count, say: Say) -> None:
        self._plan = plan
        self._folder = folder
        self._count = count
        self._say = say
        self._choice = random.Random(f"{seed}/{plan.name}")
        self._permit = folder / f"{plan.name}.permit"
        self._harmed: set[int] = set()  # workers, by whom an incident is explained

    def run(self, references: References) -> None:
        """Harm it, let it end, and compare. Raises JobFailed or AssertionError."""
        plan = self._plan
        reference = references.of(plan)
        faults = [fault for blow in plan.blows for fault in blow.faults]
        more = ["--permit", str(self._permit), *(["--symmetric"] if plan.symmetric else [])]
        self._allow(BURST_STEPS)
        ordered = "[" + ", ".join(f'"{fault}"' for fault in faults) + "]"
        run_dir = self._folder / plan.name
        with _launch(plan, run_dir, more, spares=plan.spares, faults=ordered) as job:
            for burst, blow in enumerate(plan.blows, 1):
                self._await_pause(job, burst * BURST_STEPS)
                if blow.awaits_spares:
                    self._await_spares(job)
                self._allow((burst + 1) * BURST_STEPS)
                if not blow.faults:
                    self._strike(job, blow)
            self._allow(plan.steps)
            code = job.wait_for_exit(timeout_s=LIMIT_S, each_poll=job.reader.poll)
            assert code == 0, f"exit code {code}:\n{job.last_output(40)}"
            self._judge(job, reference)
        self._count.jobs += 1

    # ---- while it runs ----------------------------------------------------------------------------

    def _allow(self, steps: int) -> None:
        permit_steps(self._permit, steps)

    def _await_pause(self, job: LaunchedJob, steps: int) -> None:
        def paused() -> bool:
            job.reader.poll()
            newest = [job.newest(rank) for rank in range(self._plan.ranks)]
            return all(line is not None and line.step >= steps - 1 for line in newest)

        job.wait_until(paused, timeout_s=LIMIT_S, what=f"all ranks to have finished {steps} steps")

    def _await_spares(self, job: LaunchedJob) -> None:
        ready = ["hot" if self._plan.symmetric else "warm"] * self._plan.spares
        asked_s = 0.0

        def there() -> bool:
            nonlocal asked_s
            if time.monotonic() - asked_s < ASK_EVERY_S:
                return False
            asked_s = time.monotonic()
            return list(job.spares().values()) == ready

        job.wait_until(there, timeout_s=LIMIT_S, what=f"{len(ready)} spares that are {ready[0]}")

    def _strike(self, job: LaunchedJob, blow: Blow) -> None:
        """The harm that comes from outside."""
        if blow.at_spare:
            for worker in job.spares():
                pid = job.workers().get(worker)
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    self._note(f"SIGKILL to spare {worker}", worker)
                    return
            self._miss(f"{blow}: no spare was there")
            return

        def reached() -> bool:
            job.reader.poll()
            newest = job.newest(blow.rank)
            return newest is not None and newest.step >= blow.step

        job.wait_until(reached, timeout_s=LIMIT_S, what=f"step {blow.step}", poll_s=0.002)
        lines = [line.time_s for line in job.reader.reports.lines[blow.rank]][-6:]
        moment_s = time.monotonic() + blow.fraction * (lines[-1] - lines[0]) / max(1, len(lines) - 1)
        job.wait_until(
            lambda: time.monotonic() >= moment_s, timeout_s=LIMIT_S, what="the moment", poll_s=0.001
        )
        harm = job.strike(blow.rank, signal.Signals[f"SIG{blow.signal}"])
        newest = job.newest(blow.rank)
        self._note(f"{blow} (in or after step {newest.step if newest else '?'})", harm.worker)

    def _note(self, what: str, worker: int) -> None:
        self._harmed.add(worker)
        self._count.kills += 1
        self._count.struck.append(what)
        self._say(f"  {what}: worker {worker}")

    def _miss(self, what: str) -> None:
        self._count.missed += 1
        self._say(f"  never struck: {what}")

    # ---- afterwards ---------------------------------------------------------------------------------

    def _judge(self, job: LaunchedJob, reference: Reports) -> None:
        incidents = job.incidents()
        faults = [fault for blow in self._plan.blows for fault in blow.faults]
        for strike in strikes(faults, job.run_dir, incidents):
            if strike.struck and strike.worker is not None:
                self._note(f"{strike.fault.kind} {strike.fault}", strike.worker)
            else:
                self._miss(strike.why_not(self._plan.steps))
                if strike.worker is not None:
                    self._harmed.add(strike.worker)
        reports = job.reader.reports
        comparison = compare(reference, reports)
        assert comparison.identical, f"not identical: {comparison.difference}\n{job.last_output(60)}"
        twice = recomputation(line for lines in reports.lines.values() for line in lines)
        lost = sum(int(incident["steps_lost"]) for incident in incidents)
        assert (lost, twice.committed_steps_lost) == (0, 0), (
            f"committed steps lost: {lost} by the ledger, {twice.committed_steps_lost} by the reports"
        )
        for incident in incidents:
            assert incident["state"] == "closed", f"incident {incident['number']} is still open"
            innocent = [v for v in incident["victims"] if v["worker"] not in self._harmed]
            assert not innocent, f"nobody harmed these, yet they were taken for dead: {innocent}"
        self._leaves_nothing(job)
        self._count.incidents += len(incidents)
        self._count.recomputed += sum(int(incident["steps_recomputed"]) for incident in incidents)
        self._say(f"  identical: {comparison.steps} steps, {len(incidents)} incidents")

    def _leaves_nothing(self, job: LaunchedJob) -> None:
        with LedgerReader(job.run_dir / "ledger.sqlite") as reader:
            names = [entry.value()["job"] for entry in reader.entries() if entry.kind == "job"]
        left = [str(path) for name in names for path in Path("/dev/shm").glob(f"keepstep-{name}*")]
        assert not left, f"left behind in shared memory: {left}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, help="repeats what was drawn [drawn, and printed]")
    parser.add_argument("--job", type=int, help="only this job of the seed")
    parser.add_argument("--blows", type=int, default=BLOWS_PER_JOB, help="harms per job [%(default)s]")
    parser.add_argument("--keep", type=Path, help="where the run directories go [a temporary folder]")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if arguments.seed is None else arguments.seed
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="keepstep-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    say = lambda text: print(text, flush=True)  # noqa: E731
    say(f"seed {seed}, run directories under {folder}")
    count = Count()
    try:
        if arguments.job is None:
            count = soak(folder, seed, arguments.kills, blows_per_job=arguments.blows, say=say)
        else:
            plan = draw(seed, arguments.job, arguments.blows)
            one(folder, seed, arguments.job, plan, arguments.blows, References(folder), count, say)
    except SoakFailed as error:
        say(f"FAILED {error}")
        return 1
    say(told(seed, count))
    return 0


def told(seed: int, count: Count) -> str:
    """The soak in one line."""
    return (
        f"seed {seed}: {count.kills} kills in {count.jobs} jobs, all identical; {count.incidents} incidents, "
        f"{count.recomputed} steps computed again, no committed step lost; {count.missed} blows never struck"
    )


if __name__ == "__main__":
    sys.exit(main())

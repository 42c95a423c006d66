"""One job, harmed many times: a burst of steps for each harm, and after it a pause until spares are ready again.

Starting a worker costs seconds, a step milliseconds: so the faults of a matrix share a job. Each is judged by itself:
its ranks' losses up to the end of its burst, its own incident, nobody else taken for dead. What a harm did wrong does
not hide what those before it did right.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.cli.jobs import JobFailed, LaunchedJob
from keepstep.cli.prove_faults import Strike, strikes
from keepstep.cli.reports import Reports, compare
from keepstep.core.faults import parse_fault
from tests.integration.jobs import SCRIPT, environment, reference

FIRST_HARM = 4  # step 2 is published, and the spares have rehearsed
STEPS_AFTER = 3  # of a burst, behind the harm: what strikes a moment later still finds the ranks at work
LIMIT_S = 120.0  # for any one thing that is waited for
ASK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Harm:
    """Faults of one burst; their `step=+K` counts from the burst's first step that `at` allows.

    `spares`: how many must be ready before. Faults before FIRST_HARM need none: they strike while the job starts.
    """

    name: str
    faults: tuple[str, ...]
    spares: int = 1
    at: Callable[[int], bool] = lambda step: True


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A harm with its steps: the faults as they are ordered, and the first step behind the burst."""

    harm: Harm
    faults: tuple[str, ...]
    end: int


def place(harms: Sequence[Harm], until: int) -> list[Placed]:
    """Burst after burst. The faults of the last one may name `step=end` (the last gate) and `step=last`."""
    placed, step = [], FIRST_HARM
    for harm in harms:
        while not harm.at(step):
            step += 1
        words = [text.replace("=end", f"={until}").replace("=last", f"={until - 1}") for text in harm.faults]
        faults = tuple(re.sub(r"=\+(\d+)", lambda m, at=step: f"={at + int(m[1])}", text) for text in words)
        newest = max(parse_fault(text).step for text in faults)
        if newest < FIRST_HARM - 1:
            placed.append(Placed(harm=harm, faults=faults, end=FIRST_HARM - 1))
            continue
        step = min(newest + 1 + STEPS_AFTER, until)
        placed.append(Placed(harm=harm, faults=faults, end=step))
        step += 1
    assert all(one.end < until for one in placed[:-1]), f"{until} steps are too few for {len(harms)} harms"
    return placed


@dataclass(slots=True)
class Verdict:
    """What was seen of one harm. `difference`: between the losses of the two runs up to the burst's end."""

    struck: list[Strike]
    difference: str
    incidents: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class Story:
    """A harmed job that has ended, and how it went with each harm. `failure`: why it stopped short of its end."""

    run_dir: Path
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    failure: str = ""
    output: str = ""
    difference: str = ""
    incidents: list[dict[str, Any]] = field(default_factory=list)
    innocent: list[int] = field(default_factory=list)

    def assert_cost_nothing(self, name: str, *, recomputed_max: int | None = 1) -> list[dict[str, Any]]:
        """The harm struck, the losses are the undisturbed ones, no committed step was lost. Returns its incidents."""
        assert name in self.verdicts, f"the job did not come to it: {self.failure}\n{self.output}"
        verdict = self.verdicts[name]
        assert all(strike.struck for strike in verdict.struck), f"{verdict.struck}\n{self.output}"
        assert not verdict.difference, f"{verdict.difference}\n{self.output}"
        for incident in verdict.incidents:
            assert incident["state"] == "closed", incident
            assert incident["steps_lost"] == 0, incident
            assert recomputed_max is None or incident["steps_recomputed"] <= recomputed_max, incident
        return verdict.incidents

    def assert_ended_identical(self) -> None:
        """Exit code 0, every loss and the final state bit for bit, and nobody taken for dead who was not harmed."""
        assert not self.failure, f"{self.failure}\n{self.output}"
        assert not self.difference, f"{self.difference}\n{self.output}"
        assert not self.innocent, f"nobody harmed these workers: {self.innocent}\n{self.output}"


def harmed_job(
    folder: Path,
    references: Path,
    arguments: tuple[str, ...],
    harms: Sequence[Harm],
    *,
    ranks: int,
    spares: int,
    symmetric: bool = True,
) -> Story:
    """Run a job to its end through all harms. Never raises: what failed is in the story."""
    undisturbed = reference(references, arguments, ranks).reports
    until = int(arguments[arguments.index("--until") + 1])
    placed = place(harms, until)
    faults = [fault for one in placed for fault in one.faults]
    permit, story = folder / "permit", Story(folder / "run")
    _permit(permit, FIRST_HARM - 1)
    more = ("--permit", str(permit), *(("--symmetric",) if symmetric else ()))
    quoted = "[" + ", ".join(f'"{fault}"' for fault in faults) + "]"
    with LaunchedJob(
        SCRIPT,
        [*arguments, *more],
        ranks=ranks,
        spares=spares,
        run_dir=story.run_dir,
        environment=environment(KEEPSTEP_FAULTS=quoted, KEEPSTEP_MAX_RESTARTS="1000"),
    ) as job:
        try:
            _conduct(job, story, placed, undisturbed, permit, until, "hot" if symmetric else "warm")
        except JobFailed as error:
            story.failure = str(error)
        story.output = f"{job.last_output(80)}\nrun directory: {story.run_dir}"
    _judge(job, story, placed, faults, undisturbed)
    return story


def _conduct(
    job: LaunchedJob,
    story: Story,
    placed: Sequence[Placed],
    undisturbed: Reports,
    permit: Path,
    until: int,
    ready: str,
) -> None:
    done = FIRST_HARM - 1
    for one in placed:
        _await_steps(job, done)
        if one.harm.spares:
            _await_spares(job, ready, one.harm.spares)
        last = one is placed[-1]
        done = until if last else one.end
        _permit(permit, done)
        if not last:
            _await_steps(job, done)
        else:
            code = job.wait_for_exit(timeout_s=LIMIT_S, each_poll=job.reader.poll)
            if code != 0:
                raise JobFailed(f"exit code {code}")
        difference = first_difference(undisturbed, job.reader.reports, done)
        story.verdicts[one.harm.name] = Verdict([], difference)


def _judge(
    job: LaunchedJob, story: Story, placed: Sequence[Placed], faults: Sequence[str], undisturbed: Reports
) -> None:
    story.incidents = job.incidents()
    comparison = compare(undisturbed, job.reader.reports)
    story.difference = comparison.difference
    all_struck = strikes([parse_fault(fault) for fault in faults], job.run_dir, story.incidents)
    harmed = {strike.worker for strike in all_struck}
    begin = 0
    for one in placed:
        struck = all_struck[begin : begin + len(one.faults)]
        begin += len(one.faults)
        if one.harm.name in story.verdicts:
            verdict = story.verdicts[one.harm.name]
            verdict.struck = struck
            numbers = {strike.incident for strike in struck}
            verdict.incidents = [incident for incident in story.incidents if incident["number"] in numbers]
    victims = [victim["worker"] for incident in story.incidents for victim in incident.get("victims", ())]
    story.innocent = [worker for worker in victims if worker not in harmed]


def first_difference(undisturbed: Reports, run: Reports, end: int) -> str:
    """Of the steps before `end`, on any rank; "" when there is none. Bit for bit."""
    for rank in undisturbed.ranks():
        ours, theirs = undisturbed.counted(rank), run.counted(rank)
        for step in range(end):
            if step not in theirs:
                return f"step {step}, rank {rank}: no report"
            one, other = (
                {name: value.hex() for name, value in lines[step].values.items()} for lines in (ours, theirs)
            )
            if one != other:
                return f"step {step}, rank {rank}: {dict(ours[step].values)} and {dict(theirs[step].values)}"
    return ""


def _permit(permit: Path, steps: int) -> None:
    draft = permit.with_suffix(".draft")
    draft.write_text(str(steps))
    draft.rename(permit)


def _await_steps(job: LaunchedJob, steps: int) -> None:
    """Until every rank has reported so many steps."""

    def done() -> bool:
        job.reader.poll()
        newest = [job.newest(rank) for rank in range(job.ranks)]
        return all(line is not None and line.step >= steps - 1 for line in newest)

    job.wait_until(done, timeout_s=LIMIT_S, what=f"all ranks to have done {steps} steps")


def _await_spares(job: LaunchedJob, ready: str, count: int) -> None:
    asked_s = 0.0

    def there() -> bool:
        nonlocal asked_s
        if time.monotonic() - asked_s < ASK_EVERY_S:
            return False
        asked_s = time.monotonic()
        return list(job.spares().values()).count(ready) >= count

    job.wait_until(there, timeout_s=LIMIT_S, what=f"{count} spares that are {ready}")

"""How long a failure takes: from the signal that ends a worker to the next new step of its rank.

Whole jobs under `keepstep run`, harmed from outside with real signals at random moments of a step, one worker
at a time. Each harm waits until the spare is ready and the machine quiet. Every job is compared, bit for bit,
with an undisturbed run of the same script. What the clock measures: keepstep.cli.reports, kill_to_next_new_step_s.
"""

from __future__ import annotations

import contextlib
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from common import Options, start, table, write
from permit import permit_steps

from keepstep.cli.jobs import Harm, JobFailed, LaunchedJob
from keepstep.cli.reports import compare, kill_to_next_new_step_s, recomputation

JOB = Path(__file__).resolve().parent / "recovery_job.py"
BURST_STEPS = {"ddp": 45, "hsdp": 21}
BEFORE_HARM = (
    2 / 3
)  # of a burst; the rest is permitted when the harm is done, so that there is always a next step
EARLIEST, LATEST = 4, 12  # the step of a burst in which a worker is harmed
START_LIMIT_S, RESUME_LIMIT_S, END_LIMIT_S = 120.0, 60.0, 120.0
SEED = 1
ALL = 1_000_000  # workers, whatever their number
Ordered = tuple[str, signal.Signals]  # the name of a figure, and how to come to it
ENVIRONMENT = {"KEEPSTEP_FINGERPRINT": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One job and what is done to it, burst by burst.

    `readiness`: of the spares that are started with it. With fewer spares than harms, a harm waits until a
    new spare is as ready as the first one; else each takes the best that is left, hot before warm.
    """

    name: str
    parallel: str
    ranks: int
    readiness: tuple[str, ...]
    harms: tuple[Ordered, ...]
    most_harms: int  # of all jobs of this kind, which take the same number of steps

    @property
    def burst_steps(self) -> int:
        return BURST_STEPS[self.parallel]

    @property
    def steps(self) -> int:
        return self.burst_steps * (self.most_harms + 1)

    def spares_before(self, burst: int) -> tuple[str, ...]:
        """What must be ready when the harm of a burst is done."""
        return self.readiness if len(self.readiness) < len(self.harms) else self.readiness[burst - 1 :]

    def permit(self, folder: Path) -> Path:
        return folder / f"{self.name}.permit"

    @property
    def arguments(self) -> list[str]:
        return ["--parallel", self.parallel, "--steps", str(self.steps)]


@dataclass(slots=True)
class Result:
    """What one job came to: seconds by figure, one for each harm."""

    series: Series
    times_s: dict[str, list[float]] = field(default_factory=dict)
    identical: bool = False
    difference: str = ""
    committed_steps_lost: int = 0
    recomputed_most: int = 0


def launch(series: Series, folder: Path, *, harmed: bool = True) -> LaunchedJob:
    """One job of a kind: to be harmed burst by burst, or left alone."""
    name = series.name if harmed else f"undisturbed-{series.parallel}"
    arguments = list(series.arguments)
    if harmed:
        permit_steps(series.permit(folder), series.burst_steps)
        arguments += ["--permit", str(series.permit(folder))]
        hot = series.readiness.count("hot")
        arguments += ["--hot", str(hot if hot < len(series.readiness) else ALL)] if hot else []
    return LaunchedJob(
        JOB,
        arguments,
        ranks=series.ranks,
        spares=len(series.readiness) if harmed else 0,
        run_dir=folder / name,
        environment=ENVIRONMENT,
    )


def measure(job: LaunchedJob, series: Series, folder: Path, choice: random.Random) -> Result:
    """Harm a job once in every burst but the first, and let it end."""
    permit = series.permit(folder)
    result = Result(series)
    for burst, (figure, number) in enumerate(series.harms, start=1):
        begin = burst * series.burst_steps
        await_quiet(job, series, begin, burst)
        pids = job.workers()  # looking for them takes as long as some steps
        permit_steps(permit, begin + int(BEFORE_HARM * series.burst_steps))
        harm = strike_in_burst(job, series, begin, number, choice, pids)
        permit_steps(permit, begin + series.burst_steps)
        result.times_s.setdefault(figure, []).append(await_new_step(job, harm))
    permit_steps(permit, series.steps)
    code = job.wait_for_exit(timeout_s=END_LIMIT_S, each_poll=job.reader.poll)
    if code != 0:
        raise JobFailed(f"{series.name}: the job ended with {code}:\n{job.last_output()}")
    incidents = job.incidents()
    if len(incidents) != len(series.harms):
        raise JobFailed(f"{series.name}: {len(series.harms)} signals, {len(incidents)} incidents")
    reports = job.reader.reports
    twice = recomputation(line for lines in reports.lines.values() for line in lines)
    lost = sum(int(incident["steps_lost"]) for incident in incidents)
    result.committed_steps_lost = max(twice.committed_steps_lost, lost)
    again = max(int(incident["steps_recomputed"]) for incident in incidents)
    result.recomputed_most = max(twice.most_in_a_generation, again)
    return result


def await_quiet(job: LaunchedJob, series: Series, steps: int, burst: int) -> None:
    """Until every rank pauses after `steps` steps and the spares for what is still to come are ready."""
    asked_s = 0.0
    wanted = series.spares_before(burst)

    def quiet() -> bool:
        nonlocal asked_s
        job.reader.poll()
        newest = [job.newest(rank) for rank in range(series.ranks)]
        if any(line is None or line.step < steps - 1 for line in newest):
            return False
        if time.monotonic() - asked_s < 0.2:
            return False
        asked_s = time.monotonic()
        return not Counter(wanted) - Counter(job.spares().values())

    job.wait_until(
        quiet, timeout_s=START_LIMIT_S, what=f"{series.ranks} ranks and spares that are {', '.join(wanted)}"
    )


def strike_in_burst(
    job: LaunchedJob,
    series: Series,
    first_step: int,
    number: signal.Signals,
    choice: random.Random,
    pids: Mapping[int, int],
) -> Harm:
    """Send the signal to a random rank, some way into a random step of the burst."""
    rank = choice.randrange(series.ranks)
    step = first_step + choice.randrange(EARLIEST, LATEST)

    def reached() -> bool:
        job.reader.poll()
        newest = job.newest(rank)
        return newest is not None and newest.step >= step

    job.wait_until(reached, timeout_s=RESUME_LIMIT_S, what=f"step {step}", poll_s=0.001)
    times = [line.time_s for line in job.reader.reports.lines[rank]][-8:]
    moment_s = time.monotonic() + choice.random() * (times[-1] - times[0]) / (len(times) - 1)
    job.wait_until(lambda: time.monotonic() >= moment_s, timeout_s=10, what="the moment", poll_s=0.0005)
    return job.strike(rank, number, pids)


def await_new_step(job: LaunchedJob, harm: Harm) -> float:
    took_s: float | None = None

    def resumed() -> bool:
        nonlocal took_s
        job.reader.poll()
        took_s = kill_to_next_new_step_s(job.reader.reports, harm.rank, harm.at_s)
        return took_s is not None

    job.wait_until(resumed, timeout_s=RESUME_LIMIT_S, what=f"rank {harm.rank} to go on")
    assert took_s is not None
    return took_s


def plan(quick: bool) -> list[Series]:
    """The jobs. Those of one kind of parallelism take the same number of steps, hence one undisturbed run."""
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    hot_ddp, stopped_ddp = ("ddp3_hot_kill_s", kill), ("ddp3_stop_s", stop)
    warm_ddp, hot_hsdp = ("ddp3_warm_kill_s", kill), ("hsdp4_hot_kill_s", kill)
    ddp, hsdp = ("ddp", 3), ("hsdp", 4)
    kinds: list[tuple[int, str, str, int, tuple[str, ...], tuple[Ordered, ...]]] = [
        (4, "hsdp4-hot", *hsdp, ("hot",), (hot_hsdp,) * 5),
        (4, "ddp3-hot", *ddp, ("hot",), (*(hot_ddp,) * 5, stopped_ddp)),
        (2, "ddp3-warm", *ddp, ("warm",), (warm_ddp,) * 3),
    ]
    if quick:  # all harms are over before the first new spare is started
        kinds = [
            (1, "hsdp4", *hsdp, ("hot",), (hot_hsdp,)),
            (1, "ddp3", *ddp, ("hot", "hot", "warm"), (stopped_ddp, hot_ddp, warm_ddp)),
        ]
    most: dict[str, int] = {}
    for _, _, parallel, _, _, harms in kinds:
        most[parallel] = max(most.get(parallel, 0), len(harms))
    return [
        Series(
            name=f"{name}-{number}",
            parallel=parallel,
            ranks=ranks,
            readiness=readiness,
            harms=harms,
            most_harms=most[parallel],
        )
        for count, name, parallel, ranks, readiness, harms in kinds
        for number in range(count)
    ]


def run_all(series: list[Series], at_once: int) -> list[Result]:
    """Every job, started `at_once` at a time and harmed one after the other while the others pause."""
    choice = random.Random(SEED)
    results = []
    with tempfile.TemporaryDirectory(prefix="keepstep-recovery-") as name, contextlib.ExitStack() as running:
        folder = Path(name)
        # Nothing is timed in these, and they are over before the first harm.
        calm = {
            one.parallel: running.enter_context(launch(one, folder, harmed=False))
            for one in {one.parallel: one for one in series}.values()
        }
        for begin in range(0, len(series), at_once):
            batch = series[begin : begin + at_once]
            with contextlib.ExitStack() as started:
                jobs = [started.enter_context(launch(one, folder)) for one in batch]
                if not begin:
                    finish_undisturbed(calm)
                for one, job in zip(batch, jobs, strict=True):  # the machine is quiet when all of them are
                    await_quiet(job, one, one.burst_steps, 1)
                for one, job in zip(batch, jobs, strict=True):
                    result = measure(job, one, folder, choice)
                    compared = compare(calm[one.parallel].reader.reports, job.reader.reports)
                    result.identical, result.difference = compared.identical, compared.difference
                    results.append(result)
    return results


def finish_undisturbed(calm: Mapping[str, LaunchedJob]) -> None:
    for parallel, job in calm.items():
        if job.wait_for_exit(timeout_s=END_LIMIT_S) != 0:
            raise JobFailed(f"the undisturbed {parallel} run failed:\n{job.last_output()}")
        job.reader.poll()


def times_by_figure(results: list[Result]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for one in results:
        for figure, times_s in one.times_s.items():
            found.setdefault(figure, []).extend(times_s)
    return found


def figures(results: list[Result]) -> dict[str, float]:
    """The names are those that the README and the JSON use."""
    times = times_by_figure(results)
    found: dict[str, float] = {figure: median(times_s) for figure, times_s in times.items()}
    found["kills"] = sum(map(len, times.values()))
    found["runs"] = len(results)
    found["identical_runs"] = sum(one.identical for one in results)
    found["committed_steps_lost"] = sum(one.committed_steps_lost for one in results)
    found["recomputed_max"] = max(one.recomputed_most for one in results)
    return found


def main(chosen: Options) -> None:
    series = plan(chosen.quick)
    results = run_all(series, at_once=len(series) if chosen.quick else 1)
    rows = [
        (figure, len(times_s), median(times_s), min(times_s), max(times_s))
        for figure, times_s in times_by_figure(results).items()
    ]
    print(table(("signal to the next new step", "harms", "median s", "min s", "max s"), rows))
    found = figures(results)
    print(
        f"\n{found['identical_runs']:.0f} of {found['runs']:.0f} harmed jobs equal the undisturbed one bit for bit; "
        f"committed steps lost {found['committed_steps_lost']:.0f}; "
        f"steps computed again by one harm, at most {found['recomputed_max']:.0f}"
    )
    for one in results:
        if not one.identical:
            print(f"{one.series.name}: {one.difference}")
    write(chosen, found, {"choice": SEED}, ("psutil",))


if __name__ == "__main__":
    start(main, __doc__)

"""`keepstep demo`: kill a rank of a real training run, and prove that the run never noticed.

Two whole jobs, started as a user starts them: one that loses a rank to SIGKILL at a random moment, and its
undisturbed twin. Then every loss of every rank and the final state are compared, bit for bit.
"""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import keepstep
from keepstep.cli.charts import IncidentMark, draw_twin_runs
from keepstep.cli.demo_view import DemoView
from keepstep.cli.jobs import Harm, JobFailed, LaunchedJob, stoppable
from keepstep.cli.reports import Comparison, Reports, compare, kill_to_next_new_step_s, recomputation
from keepstep.errors import UsageError

RANKS = 4
SPARES = 1
JOB_LIMIT_S = 170.0
START_LIMIT_S = 150.0
LEAST_STEPS = 20
SAID = "keepstep: "  # how the launcher marks its own lines
PROGRESS = re.compile(r"keepstep: \w+: (step \d|waiting for)")  # the view shows that itself
ASK_EVERY_S = 0.5
app = typer.Typer(add_completion=False, rich_markup_mode=None)

PHASES = ("detect", "decide", "connect", "vote", "transfer", "resume")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is going to happen, all of it from the seed."""

    seed: int
    steps: int
    rank: int
    step: int
    fraction: float

    @staticmethod
    def draw(seed: int, steps: int) -> Plan:
        """A rank, a step in the run's middle third, and how far into that step."""
        choice = random.Random(seed)
        return Plan(
            seed=seed,
            steps=steps,
            rank=choice.randrange(RANKS),
            step=choice.randrange(steps // 3, 2 * steps // 3),
            fraction=choice.random(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the two runs came to."""

    comparison: Comparison
    committed_steps_lost: int
    recomputed_steps: int
    kill_to_next_new_step_s: float | None
    phases_s: dict[str, float]

    @property
    def identical(self) -> bool:
        return self.comparison.identical

    def as_json(self) -> dict[str, Any]:
        return {
            "identical": self.identical,
            "steps": self.comparison.steps,
            "committed_steps_lost": self.committed_steps_lost,
            "recomputed_steps": self.recomputed_steps,
            "kill_to_next_new_step_s": self.kill_to_next_new_step_s,
            "phases_s": self.phases_s,
        }


@app.command()
def demo(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer updates of each run.")] = 80,
    seed: Annotated[int | None, typer.Option(help="Repeat the choice of rank and moment.")] = None,
    out: Annotated[Path, typer.Option(help="Run directories and the chart.")] = Path("keepstep-runs/demo"),
) -> None:
    """Train a small GPT on 4 ranks with a spare, kill a rank in mid-step, prove that nothing was lost."""
    if steps < LEAST_STEPS:
        raise UsageError(f"--steps {steps} is too short for a kill in its middle: at least {LEAST_STEPS}")
    script = find_example("gpt.py")
    plan = Plan.draw(random.SystemRandom().randrange(10_000) if seed is None else seed, steps)
    console = Console(highlight=False)
    folder = new_folder(out)

    with stoppable():
        struck, harm, incident = run_struck(console, script, plan, folder / "struck")
        undisturbed = run_undisturbed(console, script, plan, folder / "undisturbed")

    outcome = judge(undisturbed, struck, harm, incident)
    chart = folder / "loss.png"
    newest = max((ln.step for ln in struck.lines[plan.rank] if ln.time_s <= harm.at_s), default=-1)
    draw_twin_runs(
        chart,
        title="A GPT of 1.6 million parameters on 4 ranks (HSDP 2×2), one killed",
        undisturbed=undisturbed,
        struck=struck,
        mark=IncidentMark(
            step=newest + 1, rank=plan.rank, lasted_s=outcome.kill_to_next_new_step_s or float("nan")
        ),
        identical=outcome.identical,
    )
    show_outcome(console, outcome, plan, chart)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(outcome.as_json(), indent=2) + "\n")
    if not outcome.identical or outcome.committed_steps_lost:
        raise typer.Exit(1)


def find_example(name: str) -> Path:
    """An example of the checkout that Keepstep runs from. Raises UsageError when there is none."""
    path = Path(keepstep.__file__).resolve().parent.parent / "examples" / name
    if not path.is_file():
        raise UsageError(
            f"examples/{name} is not installed with the package: clone the repository and run `make demo` there"
        )
    return path


def new_folder(out: Path) -> Path:
    """A folder of its own for each demo, so that no earlier result is overwritten."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(1, 100))):
        folder = out / (stamp + suffix)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"cannot write {out}: {error.strerror}") from None
        return folder
    raise UsageError(f"{out} is full of demos of this very second")


# ---- the two runs -----------------------------------------------------------------------------------


def launch(script: Path, plan: Plan, run_dir: Path, *, spares: int) -> LaunchedJob:
    return LaunchedJob(
        script,
        ["--parallel", "hsdp", "--symmetric", "--steps", str(plan.steps)],
        ranks=RANKS,
        spares=spares,
        run_dir=run_dir,
        environment={"KEEPSTEP_FINGERPRINT": "1"},
    )


def run_struck(
    console: Console, script: Path, plan: Plan, run_dir: Path
) -> tuple[Reports, Harm, dict[str, Any]]:
    """The run that loses a rank: its reports, what was done to it, and the incident in the ledger."""
    title = f"keepstep run --nproc-per-node {RANKS} --spares {SPARES} examples/gpt.py --parallel hsdp"
    with (
        launch(script, plan, run_dir, spares=SPARES) as job,
        DemoView(console, title, ranks=RANKS, steps=plan.steps) as view,
    ):
        watch = Watch(job, view)
        view.note(f"seed {plan.seed}: rank {plan.rank} will be killed in or after step {plan.step}")
        job.wait_until(lambda: watch.poll() and watch.due(plan), timeout_s=START_LIMIT_S, what="the kill")
        moment_s = time.monotonic() + plan.fraction * watch.step_time_s(plan.rank)
        job.wait_until(lambda: time.monotonic() >= moment_s, timeout_s=10, what="the moment of the kill")
        harm = job.strike(plan.rank)
        view.struck(harm)

        def resumed() -> bool:
            watch.poll()
            return kill_to_next_new_step_s(job.reader.reports, harm.rank, harm.at_s) is not None

        job.wait_until(resumed, timeout_s=60, what="training to resume")
        took_s = kill_to_next_new_step_s(job.reader.reports, harm.rank, harm.at_s)
        view.note(f"rank {harm.rank} reports a new step, {took_s:.3f} s after the kill", "bold green")
        view.calm_again()
        finish(job, watch)
        return job.reader.reports, harm, only_incident(job)


def run_undisturbed(console: Console, script: Path, plan: Plan, run_dir: Path) -> Reports:
    """The same job, left alone."""
    with (
        launch(script, plan, run_dir, spares=0) as job,
        DemoView(console, "the same, undisturbed", ranks=RANKS, steps=plan.steps) as view,
    ):
        finish(job, Watch(job, view))
        return job.reader.reports


def finish(job: LaunchedJob, watch: Watch) -> None:
    code = job.wait_for_exit(timeout_s=JOB_LIMIT_S, each_poll=watch.poll)
    if code != 0:
        raise JobFailed(f"the job ended with {code}:\n{job.last_output()}")


class Watch:
    """Passes on to the view what a job says and reports."""

    def __init__(self, job: LaunchedJob, view: DemoView) -> None:
        self._job = job
        self._view = view
        self._spares: dict[int, str] = {}
        self._asked_s = 0.0

    def poll(self) -> bool:
        """Always True, so that it can stand in a condition."""
        for text in self._job.console_lines():
            if text.startswith(SAID) and not PROGRESS.match(text):
                self._view.note(text.removeprefix(SAID))
        self._view.reported(self._job.reader.poll())
        if time.monotonic() - self._asked_s > ASK_EVERY_S:
            self._asked_s = time.monotonic()
            self._spares = self._job.spares()
            self._view.spares(self._spares)
        return True

    def due(self, plan: Plan) -> bool:
        """Whether the step is reached and the spare is hot (or it is getting late: then a warm one it is)."""
        newest = self._job.newest(plan.rank)
        if newest is None or newest.step < plan.step - 1:
            return False
        return newest.step >= int(0.8 * plan.steps) or "hot" in self._spares.values()

    def step_time_s(self, rank: int) -> float:
        times = [line.time_s for line in self._job.reader.reports.lines[rank]][-12:]
        return median(b - a for a, b in pairwise(times))


def only_incident(job: LaunchedJob) -> dict[str, Any]:
    found = job.incidents()
    if len(found) != 1:
        raise JobFailed(f"one rank was killed, and the ledger has {len(found)} incidents: {found}")
    return found[0]


# ---- what they came to --------------------------------------------------------------------------------


def judge(undisturbed: Reports, struck: Reports, harm: Harm, incident: dict[str, Any]) -> Outcome:
    """Hold the runs against each other. Steps lost and recomputed: the worse of ledger and reports."""
    twice = recomputation(line for lines in struck.lines.values() for line in lines)
    phases = incident["phases_s"]
    return Outcome(
        comparison=compare(undisturbed, struck),
        committed_steps_lost=max(twice.committed_steps_lost, int(incident["steps_lost"])),
        recomputed_steps=max(twice.recomputed_steps, int(incident["steps_recomputed"])),
        kill_to_next_new_step_s=kill_to_next_new_step_s(struck, harm.rank, harm.at_s),
        phases_s={name: float(phases[name]) for name in PHASES if phases.get(name) is not None},
    )


def show_outcome(console: Console, outcome: Outcome, plan: Plan, chart: Path) -> None:
    table = Table(
        title="the incident", title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False
    )
    table.add_column(justify="left")
    table.add_column(justify="right")
    table.add_column()
    longest = max(outcome.phases_s.values(), default=0.0) or 1.0
    for name, seconds in outcome.phases_s.items():
        bar = "█" * max(1, round(30 * seconds / longest))
        table.add_row(name, f"{1000 * seconds:.0f} ms", f"[cyan]{bar}[/]")
    console.print()
    console.print(table)
    took = outcome.kill_to_next_new_step_s
    console.print(f"\nkill to the next new step   {'never' if took is None else f'{took:.3f} s'}")
    console.print(f"committed steps lost        {outcome.committed_steps_lost}")
    console.print(f"steps computed again        {outcome.recomputed_steps}")
    compared = outcome.comparison
    if outcome.identical:
        console.print(
            f"\n[bold green]Identical[/]: {compared.steps} steps × {compared.ranks} ranks, every loss and the "
            f"final state equal the undisturbed run bit for bit.",
            soft_wrap=True,
        )
    else:
        console.print(f"\n[bold red]Not identical[/]: {compared.difference}", soft_wrap=True)
    console.print(f"chart: {chart}\nrepeat the choice of rank and moment: keepstep demo --seed {plan.seed}")

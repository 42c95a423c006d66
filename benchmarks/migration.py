"""What it costs to move a rank while its player lives: the stall, the speed meanwhile, and what crosses when.

A whole job under `keepstep run`, with a hot spare, trains in bursts; in each burst but the first a random rank is
moved. A step is the time between two lines of one rank's report. The stall is the longest step of any rank from
the request until the source has retired, less the median step of the burst before it. Training speed while the
target is prepared: the median step then, against the same. Every job is compared, bit for bit, with an undisturbed
run of the same script.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from common import Options, start, table, write
from permit import permit_steps

from keepstep.cli.jobs import JobFailed, LaunchedJob
from keepstep.cli.reports import Line, compare
from keepstep.cli.source import request
from keepstep.controller.rundir import RunDirectory

JOB = Path(__file__).resolve().parent / "migration_job.py"
START_LIMIT_S, MOVE_LIMIT_S, END_LIMIT_S = 300.0, 240.0, 300.0
EARLIEST = 6  # the step of a burst in which a move is asked for
SEED = 1
ENVIRONMENT = {"KEEPSTEP_FINGERPRINT": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A job: its network, and how often a rank of it is moved. `burst`: steps of a burst."""

    name: str
    figure: str
    ranks: int
    width: int
    burst: int
    moves: int
    spares: int = 1

    @property
    def steps(self) -> int:
        return self.burst * (self.moves + 1)

    @property
    def arguments(self) -> list[str]:
        return ["--steps", str(self.steps), "--width", str(self.width)]


@dataclass(slots=True, kw_only=True)
class Move:
    """One migration, in seconds and bytes."""

    stall_s: float
    step_s: float
    preparing_s: list[float]
    wait_s: float
    background_bytes: int
    boundary_bytes: int
    fits: bool


@dataclass(slots=True)
class Result:
    size: Size
    moves: list[Move] = field(default_factory=list)
    identical: bool = False
    difference: str = ""
    recomputed: int = 0
    lost: int = 0


def plan(quick: bool) -> list[Size]:
    if quick:
        return [
            Size(name="5M parameters, 4 ranks", figure="", ranks=4, width=1250, burst=24, moves=2, spares=2)
        ]
    return [
        Size(name="5M parameters, 4 ranks", figure="", ranks=4, width=1250, burst=40, moves=20),
        Size(name="100 MB of state, 2 ranks", figure="_100mb", ranks=2, width=1650, burst=24, moves=3),
        Size(name="1 GB of state, 2 ranks", figure="_1gb", ranks=2, width=5250, burst=12, moves=1),
    ]


def measure(size: Size, folder: Path, choice: random.Random) -> Result:
    result = Result(size)
    permit = folder / "permit"
    permit_steps(permit, size.burst)
    with contextlib.ExitStack() as running:
        calm = running.enter_context(
            LaunchedJob(
                JOB,
                size.arguments,
                ranks=size.ranks,
                spares=0,
                run_dir=folder / "calm",
                environment=ENVIRONMENT,
            )
        )
        if calm.wait_for_exit(timeout_s=END_LIMIT_S + 20 * size.steps) != 0:
            raise JobFailed(f"the undisturbed run failed:\n{calm.last_output()}")
        calm.reader.poll()
        job = running.enter_context(
            LaunchedJob(
                JOB,
                [*size.arguments, "--permit", str(permit)],
                ranks=size.ranks,
                spares=size.spares,
                run_dir=folder / "moved",
                environment=ENVIRONMENT,
            )
        )
        for number in range(1, size.moves + 1):
            await_quiet(job, size, number)
            permit_steps(permit, (number + 1) * size.burst)
            result.moves.append(move(job, size, number, choice))
        permit_steps(permit, size.steps)
        if job.wait_for_exit(timeout_s=END_LIMIT_S, each_poll=job.reader.poll) != 0:
            raise JobFailed(f"{size.name}: the job failed:\n{job.last_output()}")
        compared = compare(calm.reader.reports, job.reader.reports)
        result.identical, result.difference = compared.identical, compared.difference
        result.recomputed = sum(int(incident["steps_recomputed"]) for incident in job.incidents())
        result.lost = sum(int(incident["steps_lost"]) for incident in job.incidents())
    return result


def await_quiet(job: LaunchedJob, size: Size, burst: int) -> None:
    """Until the ranks pause before a burst, and a spare is hot."""

    def quiet() -> bool:
        job.reader.poll()
        newest = [job.newest(rank) for rank in range(size.ranks)]
        if any(line is None or line.step < burst * size.burst - 1 for line in newest):
            return False
        return "hot" in job.spares().values()

    job.wait_until(quiet, timeout_s=START_LIMIT_S, what="a hot spare", poll_s=0.2)


def move(job: LaunchedJob, size: Size, burst: int, choice: random.Random) -> Move:
    """Ask for one move in the middle of a burst, and follow it to its end."""
    rank, first = choice.randrange(size.ranks), burst * size.burst

    def reached() -> bool:
        job.reader.poll()
        newest = job.newest(0)
        return newest is not None and newest.step >= first + min(EARLIEST, size.burst // 3)

    job.wait_until(reached, timeout_s=MOVE_LIMIT_S, what="the burst", poll_s=0.002)
    asked_s = time.time()
    request(
        RunDirectory(job.run_dir), "/api/moves", {"rank": rank, "reason": "measured", "by": "migration.py"}
    )

    def moved() -> bool:
        job.reader.poll()
        done = job.incidents()
        return len(done) == burst and done[-1]["closed_s"] is not None

    job.wait_until(moved, timeout_s=MOVE_LIMIT_S, what=f"rank {rank} to have moved", poll_s=0.1)
    closed_s = time.time()
    incident = job.incidents()[-1]
    body: dict[str, Any] = incident["evidence"]["moves"][0]
    end = first + size.burst
    lines = {
        r: [line for line in job.reader.reports.lines[r] if first <= line.step < end]
        for r in range(size.ranks)
    }
    before = [s for r in lines for s in steps_between(lines[r], 0.0, asked_s)]
    during = [s for r in lines for s in steps_between(lines[r], asked_s, closed_s)]
    ready_s = asked_s + body["ready_s"] - body["asked_s"]
    return Move(
        stall_s=max(during) - median(before),
        step_s=median(before),
        preparing_s=[s for r in lines for s in steps_between(lines[r], asked_s, ready_s)],
        wait_s=float(incident["phases_s"]["decide"]),
        background_bytes=int(body["copied_bytes"]),
        boundary_bytes=int(incident["transfer_bytes"]),
        fits=bool(body["fits"]),
    )


def steps_between(lines: Sequence[Line], begin_s: float, end_s: float) -> list[float]:
    """Seconds of the steps that ended within a span of time; the first of a burst is left out: it paused."""
    ordered = sorted(lines, key=lambda line: line.time_s)
    pairs = itertools.pairwise(ordered[1:])
    return [
        later.time_s - line.time_s for line, later in pairs if begin_s < later.time_s and line.time_s < end_s
    ]


def figures(results: Sequence[Result]) -> dict[str, float]:
    found: dict[str, float] = {
        "runs": len(results),
        "identical_runs": sum(one.identical for one in results),
        "recomputed_steps": sum(one.recomputed for one in results),
        "committed_steps_lost": sum(one.lost for one in results),
    }
    for one in results:
        name = one.size.figure
        found[f"stall{name}_s"] = median(move.stall_s for move in one.moves)
        found[f"stall{name}_max_s"] = max(move.stall_s for move in one.moves)
        found[f"median_step{name}_s"] = median(move.step_s for move in one.moves)
        found[f"migrations{name}"] = len(one.moves)
        found[f"background{name}_bytes"] = median(move.background_bytes for move in one.moves)
        found[f"boundary{name}_bytes"] = median(move.boundary_bytes for move in one.moves)
        preparing = [seconds for move in one.moves for seconds in move.preparing_s]
        if preparing:
            found[f"preparation_speed{name}"] = found[f"median_step{name}_s"] / median(preparing)
    return found


def main(chosen: Options) -> None:
    choice = random.Random(SEED)
    results = []
    for size in plan(chosen.quick):
        with tempfile.TemporaryDirectory(prefix="keepstep-migration-") as name:
            results.append(measure(size, Path(name), choice))
    rows = [
        (
            one.size.name,
            len(one.moves),
            median(move.stall_s for move in one.moves),
            max(move.stall_s for move in one.moves),
            median(move.step_s for move in one.moves),
            median(move.background_bytes for move in one.moves) / 1e6,
            median(move.boundary_bytes for move in one.moves) / 1e6,
            sum(move.fits for move in one.moves),
        )
        for one in results
    ]
    heads = (
        "job",
        "moves",
        "stall s",
        "at most s",
        "step s",
        "ahead MB",
        "at the switch MB",
        "copies that fitted",
    )
    print(table(heads, rows))
    found = figures(results)
    print(
        f"\n{found['identical_runs']:.0f} of {found['runs']:.0f} jobs equal the undisturbed one bit for bit; steps computed "
        f"again {found['recomputed_steps']:.0f}, lost {found['committed_steps_lost']:.0f}"
    )
    for one in results:
        if not one.identical:
            print(f"{one.size.name}: {one.difference}")
    write(chosen, found, {"choice": SEED}, ("psutil",))


if __name__ == "__main__":
    start(main, __doc__)

"""One seed or many: run the story, catch what breaks, say how to repeat it."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keepstep.core.job import JobMachine
from keepstep.core.worker import WorkerMachine
from keepstep.errors import InvariantError
from keepstep.sim.cluster import Cluster
from keepstep.sim.invariants import Violation
from keepstep.sim.story import story_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a seed went. `violation` is empty when every promise held and training finished."""

    seed: int
    name: str
    events: int
    generations: int
    violation: str = ""
    trace: tuple[str, ...] = ()

    @property
    def repeat_with(self) -> str:
        return f"python -m keepstep.sim --seed {self.seed} --trace"


def run_seed(
    seed: int,
    *,
    trace: bool = False,
    worker_machine: type[WorkerMachine] = WorkerMachine,
    job_machine: type[JobMachine] = JobMachine,
) -> Outcome:
    """Run one seed to its end; a broken promise is in the outcome, not raised."""
    story = story_of(seed)
    lines: list[str] | None = [] if trace else None
    cluster = Cluster(story, worker_machine, job_machine, lines)
    violation = ""
    try:
        cluster.run()
    except (Violation, InvariantError) as broken:
        violation = str(broken)
    except Exception:  # the core itself fell over: that is a finding as well
        violation = traceback.format_exc()
    return Outcome(
        seed=seed,
        name=story.name,
        events=cluster.events,
        generations=len(cluster.invariants.durable),
        violation=violation,
        trace=tuple(lines or ()),
    )


def sweep(seeds: Sequence[int], processes: int = 2) -> Iterator[Outcome]:
    """Run many seeds, in no particular order."""
    if processes <= 1:
        yield from map(run_seed, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=100)

"""The bounded worlds: those that every run explores, the larger ones, and one for each hole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from keepstep.core.types import Course, Verdict, Vote
from keepstep.core.verdict import course_towards, newest_lineage, verdict
from keepstep.core.worker import WorkerMachine
from keepstep.core.worker_events import (
    BlockEnded,
    CollectiveFailed,
    CopyCompleted,
    CopyStarted,
    Publish,
)
from keepstep.core.worker_phase import WorkerPhase
from tests.model.world import Rules, World

QUICK = {
    "two replicas, two crashes, every phase": World(shards="aa", spares=3, steps=2, crash=2, fine=True),
    "two replicas, a crash and a spurious failure": World(
        shards="aa", spares=2, steps=1, crash=1, flaky=1, fine=True
    ),
    "a zombie": World(shards="aa", spares=2, steps=1, zombie=1, fine=True),
    "three replicas, two crashes": World(shards="aaa", spares=2, steps=1, crash=2),
    "two shards without twins": World(shards="ab", spares=2, steps=1, crash=1, flaky=1, fine=True),
    "two by two, two steps": World(shards="abab", spares=1, steps=2, crash=1),
    "controller crash": World(shards="aa", spares=2, steps=1, crash=1, controller=1),
    "planned move, a crash": World(shards="aa", spares=3, steps=1, crash=1, plan=1),
    "planned move of a shard": World(shards="ab", spares=1, steps=2, plan=1),
    "planned move, a spurious failure": World(shards="aa", spares=2, steps=1, flaky=1, plan=1),
}
FULL = {
    "two shards, a checkpoint": World(shards="ab", spares=3, steps=2, crash=2, checkpoint=1),
    "checkpoints, a crash, a spurious failure, controller crash, every phase": World(
        shards="ab", spares=3, steps=2, crash=1, flaky=1, controller=1, checkpoint=1, fine=True
    ),
    "checkpoints, two crashes, a zombie": World(
        shards="ab", spares=4, steps=2, crash=2, zombie=1, checkpoint=1
    ),
    "checkpoints, planned move, a crash": World(
        shards="ab", spares=3, steps=2, crash=1, plan=1, checkpoint=1
    ),
    "a zombie and a spurious failure": World(shards="aa", spares=2, steps=1, zombie=1, flaky=1, fine=True),
    "controller crash, a zombie": World(shards="aa", spares=3, steps=2, crash=1, zombie=1, controller=1),
    "uneven shards, two crashes": World(shards="aba", spares=2, steps=2, crash=2),
    "two by two, two crashes": World(shards="abab", spares=2, steps=1, crash=2),
    "planned move, a crash, every phase": World(shards="aa", spares=3, steps=2, crash=1, plan=1, fine=True),
    "planned move, a crash and a spurious failure": World(
        shards="aa", spares=3, steps=1, crash=1, flaky=1, plan=1
    ),
    "planned move of an uneven shard": World(shards="abb", spares=2, steps=2, crash=1, plan=1),
    "planned move, controller crash": World(shards="aa", spares=3, steps=2, crash=1, controller=1, plan=1),
}


# ---- workers and verdicts with one rule switched off --------------------------------------------


class WithoutMask(WorkerMachine):
    """An interrupt turns it round in the middle of its update."""

    unmasked = frozenset({"passed", "applied"})
    loud = False

    def turn_round(self, begun: bool) -> None:
        self.phase = WorkerPhase.WAIT
        if begun:
            self.has_state, self.attempt = False, None


class WithoutQuiet(WorkerMachine):
    """It votes as soon as it is interrupted, though the update that the gate released goes on."""

    unmasked = frozenset({"passed"})
    loud = True

    def turn_round(self, begun: bool) -> None:
        self.phase = WorkerPhase.WAIT


class WithoutKeep(WorkerMachine):
    """Cleaning up after a failure drops the complete gradients."""

    def step(self, event: Any) -> Any:
        actions = super().step(event)
        if isinstance(event, CollectiveFailed):
            self.attempt = None
        return actions


class WithoutByWorker(WorkerMachine):
    """A finished copy counts for nothing until the first own commit."""

    extra = False

    def step(self, event: Any) -> Any:
        if isinstance(event, CopyCompleted):
            self.extra = True
        elif isinstance(event, BlockEnded):
            self.extra = False
        return super().step(event)

    def _vote(self, generation: Any) -> Vote:
        vote = super()._vote(generation)
        if not self.extra:
            return vote
        return Vote(
            worker=vote.worker, rank=vote.rank, shard=vote.shard, held_shard=None, step=None, lineage=None
        )


class WithoutStable(WorkerMachine):
    """Publishes a step as soon as itself has it."""

    def step(self, event: Any) -> Any:
        return [Publish(step=a.step + 1) if isinstance(a, Publish) else a for a in super().step(event)]


class WithoutLastByte(WorkerMachine):
    """A copy counts as state from its first byte on."""

    def step(self, event: Any) -> Any:
        actions = super().step(event)
        if isinstance(event, CopyStarted) and self.verdict is not None and self.verdict.lineage is not None:
            self.has_state, self.held_shard = True, self.shard
            self.step_count, self.lineage = self.verdict.lineage.step, self.verdict.lineage
        return actions


def without_fallback(votes: Sequence[Vote]) -> Verdict:
    """The target is simply the newest step; if a shard cannot reach it, all roll back."""
    steps = [vote.step for vote in votes if vote.step is not None and vote.held_shard == vote.shard]
    decided = verdict(votes)
    if steps and decided.target is not None and decided.target < max(steps):
        back = {vote.worker: Course.ROLLBACK for vote in votes}
        return Verdict(target=None, lineage=None, courses=back, checkpoint=None, reason="not the maximum")
    return decided


def without_tag(votes: Sequence[Vote]) -> Verdict:
    """Every state of the right step counts, whatever its lineage."""
    decided = verdict(votes)
    if decided.target is None:
        return decided
    step = decided.target
    courses = {}
    for vote in votes:
        course = course_towards(vote, step, newest_lineage(votes, step))
        if vote.step == step:
            course = Course.KEEP
        elif vote.step == step - 1 and vote.attempt is not None:
            course = Course.ROLL
        courses[vote.worker] = course
    return Verdict(
        target=step, lineage=decided.lineage, courses=courses, checkpoint=None, reason="whatever its lineage"
    )


@dataclass(frozen=True, kw_only=True)
class Hole:
    """A rule switched off, the smallest world that needs it, and what then breaks."""

    world: World
    finding: str
    options: dict[str, Any] = field(default_factory=dict)


HOLES = {
    "mask": Hole(
        world=World(shards="aa", spares=2, steps=1, crash=1, fine=True),
        finding="the protocol itself destroyed a live copy",
        options={"machine": WithoutMask},
    ),
    "quiet": Hole(
        world=World(shards="aa", spares=1, steps=1, flaky=1, fine=True),
        finding="but holds (0,)",
        options={"machine": WithoutQuiet},
    ),
    "keep": Hole(
        world=World(shards="ab", spares=1, steps=1, flaky=1, fine=True),
        finding="a rollback although every shard had a live copy",
        options={"machine": WithoutKeep},
    ),
    "byworker": Hole(
        world=World(shards="aa", spares=3, steps=1, crash=2),
        finding="a rollback although every shard had a live copy",
        options={"machine": WithoutByWorker},
    ),
    "last byte": Hole(
        world=World(shards="aa", spares=2, steps=1, crash=1),
        finding="claims a state that it does not hold whole",
        options={"machine": WithoutLastByte},
    ),
    "complaint": Hole(
        world=World(shards="aa", spares=1, steps=1, flaky=1),
        finding="training does not resume",
        options={"rules": Rules(complaint=False)},
    ),
    "retell": Hole(
        world=World(shards="aa", spares=1, steps=1, crash=1, controller=1),
        finding="training does not resume",
        options={"rules": Rules(retell=False)},
    ),
    "durable": Hole(
        world=World(shards="aa", spares=3, steps=1, crash=2, controller=1),
        finding="two maps with one generation number",
        options={"rules": Rules(durable=False)},
    ),
    "stable and announce": Hole(
        world=World(shards="aa", spares=2, steps=1, crash=1),
        finding="went back from step 1 to 0, silently",
        options={"machine": WithoutStable, "rules": Rules(announce=False)},
    ),
    "fence and tag": Hole(
        world=World(shards="aa", spares=3, steps=1, crash=1, zombie=1, controller=1),
        finding="replicas diverged",
        options={"rules": Rules(fence=False), "decide": without_tag},
    ),
    "cktag": Hole(
        world=World(shards="ab", spares=3, steps=2, crash=2, checkpoint=1),
        finding="but holds",
        options={"rules": Rules(cktag=False)},
    ),
    "cknamed": Hole(
        world=World(shards="ab", spares=3, steps=2, crash=1, zombie=1, checkpoint=1),
        finding="but holds",
        options={"rules": Rules(cknamed=False)},
    ),
    "donor": Hole(
        world=World(shards="ab", spares=1, steps=2, plan=1),
        finding="the protocol itself destroyed a live copy",
        options={"rules": Rules(donor=False)},
    ),
    "pending": Hole(
        world=World(shards="aa", spares=2, steps=1, flaky=1, plan=1),
        finding="training does not resume",
        options={"rules": Rules(pending=False)},
    ),
    "announce": Hole(
        world=World(shards="aa", spares=3, steps=2, crash=2, plan=1),
        finding="silently",
        options={"rules": Rules(announce=False)},
    ),
    "fallback": Hole(
        world=World(shards="abb", spares=2, steps=2, crash=1, plan=1),
        finding="a rollback although every shard had a live copy",
        options={"decide": without_fallback},
    ),
}
# Holes whose way is long; explored with --full only.
LONG_HOLES = frozenset({"announce", "fallback", "fence and tag"})

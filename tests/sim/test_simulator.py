"""The shipped core on virtual workers: random faults, invariants after every event, then liveness."""

from __future__ import annotations

import subprocess
import sys

import pytest

from keepstep.core.actions import Announce, Persist
from keepstep.core.events import AgentJoined, Complained
from keepstep.core.job import JobMachine
from keepstep.core.worker import WorkerMachine, WorkerPhase
from keepstep.core.worker_events import CollectiveFailed, CopyStarted, Interrupted, Publish
from keepstep.sim.month import Month, MonthCluster
from keepstep.sim.run import run_seed, sweep
from keepstep.sim.story import FAULT_KINDS, NODE_KINDS, story_of

SEEDS = 10_000
MUTANT_SEEDS = 2_000


@pytest.mark.timeout(600)
def test_every_promise_holds_and_every_job_finishes() -> None:
    generations = 0
    for outcome in sweep(range(SEEDS), processes=2):
        assert not outcome.violation, f"{outcome.violation}\nrepeat with: {outcome.repeat_with}"
        generations += outcome.generations
    assert generations > 1.5 * SEEDS, "the stories have become too quiet to prove anything"


def test_the_stories_hold_every_kind_of_fault_and_world() -> None:
    stories = [story_of(seed) for seed in range(500)]
    kinds = {mishap.kind for story in stories for mishap in story.mishaps}
    assert kinds == {*FAULT_KINDS, *NODE_KINDS}
    assert {story.name for story in stories} == {"ddp2", "ddp3", "hsdp4", "fsdp2", "uneven3"}


@pytest.mark.parametrize("seed", [1, 7, 42])
def test_a_seed_always_tells_the_same_story(seed: int) -> None:
    assert run_seed(seed, trace=True) == run_seed(seed, trace=True)


def test_one_command_repeats_a_seed_with_its_trace() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keepstep.sim", "--seed", "3", "--trace"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "controller: generation 0" in done.stdout and "every promise held" in done.stdout


# ---- the simulator finds what it is there to find -------------------------------------------------


class DropsGradientsAtAFailedGate(WorkerMachine):
    def step(self, event):
        actions = super().step(event)
        if isinstance(event, CollectiveFailed) and self.phase is WorkerPhase.TURN:
            self.attempt = None
        return actions


class TurnsRoundInTheUpdate(WorkerMachine):
    def step(self, event):
        if isinstance(event, Interrupted) and self.masked:
            self.phase = WorkerPhase.TURN
        return super().step(event)


class CountsAHalfCopyAsState(WorkerMachine):
    def step(self, event):
        actions = super().step(event)
        if isinstance(event, CopyStarted) and self.phase is WorkerPhase.RECEIVE and self.verdict:
            self.has_state, self.step_count = True, self.verdict.target
            self.lineage, self.held_shard = self.verdict.lineage, self.shard
        return actions


class PublishesTheStepThatOnlyItHolds(WorkerMachine):
    def step(self, event):
        return [Publish(step=a.step + 1) if isinstance(a, Publish) else a for a in super().step(event)]


class AnnouncesBeforePersisting(JobMachine):
    def step(self, event, now_s):
        actions = super().step(event, now_s)
        return sorted(actions, key=lambda a: isinstance(a, Persist) and a.kind == "generation")


class IgnoresComplaints(JobMachine):
    def step(self, event, now_s):
        return [] if isinstance(event, Complained) else super().step(event, now_s)


class DoesNotTellAgain(JobMachine):
    def step(self, event, now_s):
        actions = super().step(event, now_s)
        if isinstance(event, AgentJoined):
            actions = [action for action in actions if not isinstance(action, Announce)]
        return actions


@pytest.mark.parametrize(
    ("mutant", "finding"),
    [
        (DropsGradientsAtAFailedGate, "was live in every shard"),
        (TurnsRoundInTheUpdate, ""),
        (CountsAHalfCopyAsState, "claims a state|does not hold"),
        (PublishesTheStepThatOnlyItHolds, "goes back from published step"),
        (AnnouncesBeforePersisting, "announced before it was durable"),
        (IgnoresComplaints, "does not resume"),
        (DoesNotTellAgain, ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_rule_is_found(mutant: type, finding: str) -> None:
    kind = "worker_machine" if issubclass(mutant, WorkerMachine) else "job_machine"
    for seed in range(MUTANT_SEEDS):
        outcome = run_seed(seed, **{kind: mutant})
        if outcome.violation:
            assert not finding or any(part in outcome.violation for part in finding.split("|")), (
                outcome.violation
            )
            return
    pytest.fail(f"{mutant.__name__} survived {MUTANT_SEEDS} seeds")


def test_a_month_of_failures_at_many_times_the_published_rate() -> None:
    came = MonthCluster(Month(ranks=512, spares=32, rate=20.0, days=10.0, replicas=8)).run()
    assert came.failure_count > 20
    assert came.incidents and came.stalled_s > 0
    assert came.generations > came.incidents  # the first one is nobody's failure

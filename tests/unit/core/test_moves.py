"""Planned moves: prepared while training goes on, switched once, given up without a trace, never in a failure's way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from keepstep.core.actions import Action, Announce, KillWorker, Lend, Persist, Prepare, StartWorker
from keepstep.core.events import (
    AgentJoined,
    Complained,
    Progressed,
    Resumed,
    VerdictReached,
    WorkerExited,
    WorkerParked,
)
from keepstep.core.job import JobConfig, JobMachine
from keepstep.core.move_events import DrainRequested, LendReady, MoveReady, MoveRequested, UndrainRequested
from tests.unit.core.jobs import Job, of, training
from tests.unit.core.test_nodes import cluster


def prepare(job: Job, rank: int, **more: str) -> Prepare:
    """Ask for a move and let its source answer; what the target is told."""
    [lend] = of(Lend, job.tell(MoveRequested(rank=rank, reason="hot", by="me", **more)))
    [told] = of(Prepare, job.tell(LendReady(worker=lend.worker, target=lend.target, address="x:1")))
    return told


def ready(job: Job, told: Prepare) -> list[Action]:
    return job.tell(MoveReady(worker=told.worker, rank=told.rank, bytes=10, seconds=0.1))


def vote(job: Job, worker: int, target: int = 6) -> list[Action]:
    number = job.generation.number
    return job.tell(
        VerdictReached(
            worker=worker,
            generation=number,
            target=target,
            course="keep",
            reason="",
            connect_s=0.0,
            vote_s=0.0,
            recomputed=0,
        )
    )


def test_a_move_is_told_ahead_and_retires_its_source_once_all_have_resumed() -> None:
    job = training(spares=1)
    told = prepare(job, 1)
    assert (told.worker, told.rank, told.source, told.address) == (3, 1, 1, "x:1")
    assert job.generation.number == 0, "nothing is announced while the target prepares itself"
    [ahead] = of(Announce, ready(job, told))
    assert ahead.ahead and ahead.generation.planned
    assert ahead.generation.ranks == (0, 3, 2) and ahead.generation.donors == {1: 1}
    [now] = of(Announce, vote(job, 0))
    assert not now.ahead and now.generation == ahead.generation
    job.resume_all(7)
    [kill] = of(KillWorker, job.last)
    assert kill.worker == 1 and "has moved to worker 3" in kill.reason
    [closed] = job.persisted("incident_closed")
    assert (closed["cause"], closed["resolution"], closed["steps_recomputed"]) == ("migration", "moved", 0)
    job.die(1)
    assert job.generation.number == 1 and not job.machine.state.gone() and not job.machine.state.moves.by_rank
    assert job.machine.state.incident is None


def test_a_target_that_dies_while_it_is_prepared_is_replaced_and_no_rank_is_touched() -> None:
    job = training(spares=2)
    told = prepare(job, 1)
    [lend] = of(Lend, job.die(told.worker))
    assert lend.target == 4 and job.generation.number == 0 and job.machine.state.incident is None


def test_a_move_whose_targets_die_again_and_again_is_given_up() -> None:
    job = training(spares=3)
    told = prepare(job, 1)
    for target in (3, 4, 5):
        job.die(target)
    assert not job.machine.state.moves.by_rank and "3 targets in a row were lost" in job.said()
    assert told.worker == 3 and job.generation.number == 0


def test_the_source_takes_its_rank_back_when_the_target_dies_in_the_switch() -> None:
    job = training(spares=1)
    ready(job, prepare(job, 1))
    job.die(3)
    job.let_time_pass(0.1)
    assert job.generation.number == 2 and job.generation.ranks == (0, 1, 2) and not job.generation.donors
    assert not of(Announce, job.past)[-1].ahead
    job.resume_all(7)
    assert job.machine.state.moves.by_rank[1].target != 3, "the move is tried again"


def test_a_source_that_dies_while_its_target_prepares_is_a_crash_with_that_heir() -> None:
    job = training(spares=2)
    for spare in (3, 4):
        job.tell(WorkerParked(worker=spare, readiness="hot"))
    told = prepare(job, 2)
    other = 3 if told.worker == 4 else 4
    job.die(2)
    job.let_time_pass(0.1)
    assert job.generation.ranks == (0, 1, told.worker) and other not in job.generation.ranks
    job.resume_all(7)
    assert not job.machine.state.moves.by_rank


def test_another_ranks_crash_takes_the_spare_that_no_move_has_claimed() -> None:
    job = training(spares=2)
    told = prepare(job, 2)
    job.die(0)
    job.let_time_pass(0.1)
    assert told.worker not in job.generation.ranks


def test_a_crash_during_the_switch_keeps_the_donor_until_everybody_has_resumed() -> None:
    job = training(spares=2)
    ready(job, prepare(job, 1))
    job.die(0)
    job.let_time_pass(0.1)
    assert (
        job.generation.ranks == (4, 3, 2) and job.generation.donors == {1: 1} and not job.generation.planned
    )
    job.resume_all(7)
    assert [kill.worker for kill in of(KillWorker, job.last)] == [1]


def test_a_failure_before_the_switch_makes_all_enter_it_at_once() -> None:
    job = training(spares=1)
    ready(job, prepare(job, 1))
    [now] = of(Announce, job.tell(Complained(worker=2, generation=0, reason="closed", step=6, published=5)))
    assert not now.ahead and now.generation.number == 1


def test_a_switch_that_does_not_come_is_entered_at_its_limit() -> None:
    job = training(spares=1, switch_timeout_s=5.0)
    ready(job, prepare(job, 1))
    [now] = of(Announce, job.let_time_pass(6.0))
    assert not now.ahead and now.generation.number == 1


def test_a_move_without_a_spare_starts_a_worker_and_waits_for_it() -> None:
    job = training(spares=0, slots=4)
    [start] = of(StartWorker, job.tell(MoveRequested(rank=1)))
    assert job.machine.state.moves.by_rank[1].waits == f"worker {start.worker} to start"
    [lend] = of(Lend, job.tell(WorkerParked(worker=start.worker, readiness="warm")))
    assert (lend.worker, lend.target) == (1, start.worker)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (MoveRequested(rank=9), "there is no rank 9"),
        (MoveRequested(rank=1, to="nowhere"), "there is no node nowhere"),
        (MoveRequested(rank=1, to="a"), "node a is full"),
        (DrainRequested(node="nowhere"), "there is no node nowhere"),
        (UndrainRequested(node="a"), "node a is not being drained"),
    ],
)
def test_what_cannot_be_done_has_a_reason(request_: MoveRequested, text: str) -> None:
    job = cluster({"a": 2, "b": 2, "c": 2}, world_size=4, shards="xxxx")
    assert text in str(job.machine.refusal(request_))
    job.tell(request_)
    assert not job.machine.state.moves.by_rank and not job.machine.state.moves.draining


def test_a_job_in_setup_or_in_observation_moves_nothing() -> None:
    young = Job(JobMachine(JobConfig(world_size=1)))
    young.tell(AgentJoined(node="here", slots=1))
    assert "in its setup" in str(young.machine.refusal(MoveRequested(rank=0)))
    watching = training(observe=True)
    assert "observe" in str(watching.machine.refusal(MoveRequested(rank=0)))


def test_a_drained_node_loses_all_its_ranks_together_and_gets_nothing_new() -> None:
    job = cluster({"a": 2, "b": 2, "c": 2}, world_size=4, shards="xxxx")
    lends = of(Lend, job.tell(DrainRequested(node="b", reason="fan")))
    assert [lend.worker for lend in lends] == [2, 3]
    prepared = [
        of(Prepare, job.tell(LendReady(worker=lend.worker, target=lend.target, address="x:1")))[0]
        for lend in lends
    ]
    assert not of(Announce, ready(job, prepared[0])), "the ranks of one node switch together"
    [ahead] = of(Announce, ready(job, prepared[1]))
    assert ahead.generation.donors == {2: 2, 3: 3} and set(ahead.generation.ranks[2:]) == {4, 5}
    vote(job, 0)
    job.resume_all(9)
    assert sorted(kill.worker for kill in of(KillWorker, job.last)) == [2, 3]
    assert "node b is drained: no rank is played there any more" in job.said()
    for worker in (2, 3):
        job.die(worker)
    assert not of(StartWorker, job.let_time_pass(10.0))
    job.tell(UndrainRequested(node="b"))
    assert {order.node for order in of(StartWorker, job.let_time_pass(10.0))} == {"b"}


def test_a_drain_that_finds_one_spare_moves_one_rank_and_says_what_the_other_waits_for() -> None:
    job = cluster({"a": 2, "b": 2, "c": 1}, world_size=4, shards="xxxx")
    [lend] = of(Lend, job.tell(DrainRequested(node="b", reason="fan")))
    [told] = of(Prepare, job.tell(LendReady(worker=lend.worker, target=lend.target, address="x:1")))
    [ahead] = of(Announce, ready(job, told))
    assert len(ahead.generation.donors) == 1
    assert job.machine.state.moves.by_rank[3].waits == "a spare"


def test_with_whole_nodes_as_the_unit_a_drain_waits_for_all_its_targets() -> None:
    job = cluster({"a": 2, "b": 2, "c": 1}, world_size=4, shards="xxxx", replace_unit="node")
    [lend] = of(Lend, job.tell(DrainRequested(node="b", reason="fan")))
    [told] = of(Prepare, job.tell(LendReady(worker=lend.worker, target=lend.target, address="x:1")))
    assert not of(Announce, ready(job, told))


def test_an_agent_that_comes_back_hears_of_its_moves_again() -> None:
    job = training(spares=1)
    prepare(job, 1)
    again = job.tell(AgentJoined(node="here", slots=4, workers=(0, 1, 2, 3)))
    assert [lend.target for lend in of(Lend, again)] == [3]


def restarted(job: Job, earlier: Sequence[Action] = ()) -> Job:
    entries = [action for action in [*earlier, *job.past] if isinstance(action, Persist)]
    later = Job(JobMachine.resume(job.machine.config, entries))
    living = tuple(w.number for w in job.machine.state.members.alive())
    later.tell(AgentJoined(node="here", slots=4, workers=living))
    for worker in living:
        if worker not in later.generation.members:
            later.tell(WorkerParked(worker=worker, readiness="warm"))
    step = 6
    later.tell(
        Progressed(
            worker=later.generation.ranks[0], generation=later.generation.number, step=step, published=step
        )
    )
    return later


def test_a_move_that_was_asked_for_begins_anew_after_the_controllers_restart() -> None:
    job = training(spares=1)
    prepare(job, 1)
    later = restarted(job)
    assert [(lend.worker, lend.target) for lend in of(Lend, later.past)] == [(1, 3)]


def test_a_planned_generation_is_entered_after_the_controllers_restart_and_its_donor_retires() -> None:
    job = training(spares=1)
    ready(job, prepare(job, 1))
    later = restarted(job)
    assert any(a.generation.number == 1 and not a.ahead for a in of(Announce, later.past))
    for worker in later.generation.ranks:
        later.tell(Resumed(worker=worker, generation=1, step=7))
    assert [kill.worker for kill in of(KillWorker, later.past)] == [1]
    third = restarted(later, job.past)
    third.tell(WorkerExited(worker=1, status=-9))
    assert third.generation.number == 1 and not third.machine.state.gone()


def test_a_drain_outlives_the_controller() -> None:
    job = training(spares=1)
    job.tell(DrainRequested(node="here", reason="fan"))
    assert restarted(job).machine.state.moves.draining == {"here": "fan"}

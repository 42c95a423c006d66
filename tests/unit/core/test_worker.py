"""Promises of the worker's machine, row by row of the protocol's table."""

from __future__ import annotations

import pytest

from keepstep.core.types import Attempt, Generation, Lineage, Vote
from keepstep.core.worker import WorkerMachine, WorkerPhase
from keepstep.core.worker_events import (
    ApplyUpdate,
    BlockEnded,
    CastVote,
    CollectiveFailed,
    Complain,
    Connect,
    Connected,
    CopyCompleted,
    CopyStarted,
    CutGroups,
    EnterGate,
    GatePassed,
    GradientsCompleted,
    Interrupted,
    Leave,
    PlanAnnounced,
    PlanDue,
    Publish,
    ReceiveState,
    RedoStep,
    SafePointReached,
    ServeState,
    StateAdopted,
    StepStarted,
    VotesCounted,
)
from keepstep.errors import InvariantError

FIRST = Generation(number=0, ranks=(0, 1), fresh=True)
SECOND = Generation(number=1, ranks=(0, 2))


def running(worker: int = 0, steps: int = 0) -> WorkerMachine:
    machine = WorkerMachine(worker)
    machine.shard = "a"
    assert machine.step(Interrupted(generation=FIRST)) == [Connect(generation=FIRST)]
    assert machine.step(Connected(generation=0)) == []
    for _ in range(steps):
        commit(machine)
    return machine


def commit(machine: WorkerMachine) -> None:
    machine.step(StepStarted())
    machine.step(GradientsCompleted())
    machine.step(GatePassed())
    machine.step(BlockEnded())


def spare_vote(worker: int, rank: int) -> Vote:
    return Vote(worker=worker, rank=rank, shard="a", held_shard=None, step=None, lineage=None)


def vote_of(machine: WorkerMachine) -> Vote:
    assert machine.generation is not None
    [cast] = machine.step(Connected(generation=machine.generation.number))
    assert isinstance(cast, CastVote)
    return cast.vote


def test_a_fresh_generation_starts_at_step_zero_without_a_vote() -> None:
    machine = running()
    assert (machine.phase, machine.step_count, machine.lineage) == (WorkerPhase.RUN, 0, Lineage())
    assert machine.has_state


def test_a_passed_gate_publishes_the_steps_before_it_and_the_block_end_commits() -> None:
    machine = running(steps=3)
    assert machine.step(GradientsCompleted()) == [EnterGate(pending=0)]
    assert machine.attempt == Attempt(0, 3)
    assert machine.step(GatePassed()) == [Publish(step=3), ApplyUpdate(roll=False)]
    assert machine.step_count == 3
    assert machine.step(BlockEnded()) == []
    assert (machine.step_count, machine.attempt, machine.lineage.step) == (4, None, 4)


def test_a_failed_gate_keeps_the_gradients_and_complains() -> None:
    machine = running()
    machine.step(GradientsCompleted())
    assert machine.step(CollectiveFailed(reason="closed")) == [Complain(generation=0, reason="closed")]
    assert machine.attempt == Attempt(0, 0)
    machine.step(SafePointReached())
    assert machine.phase is WorkerPhase.WAIT


def test_an_interrupt_cuts_at_once_and_turns_round_at_the_safe_point() -> None:
    machine = running()
    machine.step(StepStarted())
    assert machine.step(Interrupted(generation=SECOND)) == [CutGroups()]
    assert machine.generation == FIRST and machine.next_generation == SECOND
    assert machine.step(SafePointReached()) == [Connect(generation=SECOND)]


def test_gradients_that_complete_after_the_cut_are_rubbish() -> None:
    machine = running()
    machine.step(Interrupted(generation=SECOND))
    assert machine.step(GradientsCompleted()) == [Connect(generation=SECOND)]
    assert machine.attempt is None


def test_an_interrupt_during_the_update_waits_for_the_end_of_the_block() -> None:
    machine = running()
    machine.step(GradientsCompleted())
    machine.step(GatePassed())
    assert machine.masked
    assert machine.step(Interrupted(generation=SECOND)) == [CutGroups()]
    assert machine.step(SafePointReached()) == []
    assert machine.step(BlockEnded()) == [Connect(generation=SECOND)]
    assert machine.step_count == 1


def test_an_interrupt_of_the_own_or_an_older_generation_is_ignored() -> None:
    machine = running()
    machine.step(Interrupted(generation=SECOND))
    machine.step(SafePointReached())
    for late in (FIRST, SECOND):
        assert machine.step(Interrupted(generation=late)) == []
    assert machine.generation == SECOND


def test_a_second_interrupt_during_recovery_starts_it_again() -> None:
    machine = running()
    machine.step(Interrupted(generation=SECOND))
    machine.step(SafePointReached())
    third = Generation(number=2, ranks=(0, 3))
    assert machine.step(Interrupted(generation=third)) == [CutGroups(), Connect(generation=third)]
    assert machine.step(Connected(generation=1)) == []
    assert vote_of(machine).step == 0


def test_a_fenced_worker_leaves_and_stays_away() -> None:
    machine = running(worker=1)
    [leave] = machine.step(Interrupted(generation=SECOND))
    assert isinstance(leave, Leave)
    assert machine.step(Interrupted(generation=FIRST)) == []
    assert machine.phase is WorkerPhase.LEFT


def test_a_worker_that_plays_leaves_when_the_world_starts_afresh() -> None:
    machine = running()
    [leave] = machine.step(Interrupted(generation=Generation(number=1, ranks=(0, 2), fresh=True)))
    assert isinstance(leave, Leave)


def test_a_spare_ignores_generations_that_do_not_need_it() -> None:
    machine = WorkerMachine(7)
    assert machine.step(Interrupted(generation=SECOND)) == []
    assert machine.phase is WorkerPhase.PARKED


def test_redo_when_nobody_passed_the_gate_and_the_survivor_serves_the_spare() -> None:
    machine = running(steps=2)
    machine.step(Interrupted(generation=SECOND))
    machine.step(SafePointReached())
    votes = (vote_of(machine), spare_vote(2, 1))
    serve, redo = machine.step(VotesCounted(generation=1, votes=votes))
    assert isinstance(serve, ServeState) and serve.targets == (2,)
    assert redo == RedoStep()
    assert (machine.phase, machine.step_count) == (WorkerPhase.RUN, 2)


def test_roll_forward_applies_the_own_gradients_and_serves_only_afterwards() -> None:
    ahead, behind = running(0, steps=2), running(1, steps=1)
    behind.step(GradientsCompleted())
    generation = Generation(number=1, ranks=(0, 1, 2))
    votes = []
    for machine in (ahead, behind):
        machine.step(Interrupted(generation=generation))
        machine.step(SafePointReached())
        votes.append(vote_of(machine))
    votes.append(spare_vote(2, 2))
    counted = VotesCounted(generation=1, votes=tuple(votes))
    assert behind.step(counted) == [ApplyUpdate(roll=True)]
    [serve] = behind.step(BlockEnded())
    assert isinstance(serve, ServeState) and serve.targets == (2,)
    assert behind.lineage == ahead.lineage and behind.phase is WorkerPhase.RUN


def test_a_copy_counts_from_its_last_byte_and_the_old_state_until_the_first() -> None:
    spare, survivor = WorkerMachine(2), running(steps=2)
    spare.shard = "a"
    for machine in (spare, survivor):
        machine.step(Interrupted(generation=SECOND))
    survivor.step(SafePointReached())
    votes = (vote_of(survivor), vote_of(spare))
    [receive] = spare.step(VotesCounted(generation=1, votes=votes))
    assert isinstance(receive, ReceiveState) and receive.sources == (0,)
    spare.step(CopyStarted())
    assert not spare.has_state
    spare.step(CopyCompleted())
    assert spare.has_state and spare.lineage == survivor.lineage and spare.held_shard == "a"


def test_a_copy_that_broke_leaves_no_state() -> None:
    spare, survivor = WorkerMachine(2), running(steps=2)
    spare.shard = "a"
    for machine in (spare, survivor):
        machine.step(Interrupted(generation=SECOND))
    survivor.step(SafePointReached())
    spare.step(VotesCounted(generation=1, votes=(vote_of(survivor), vote_of(spare))))
    spare.step(CopyStarted())
    assert spare.step(CollectiveFailed(reason="source is gone")) == [
        Complain(generation=1, reason="source is gone")
    ]
    spare.step(Interrupted(generation=Generation(number=2, ranks=(0, 2))))
    assert vote_of(spare).step is None


def test_a_planned_switch_goes_through_the_gate_and_keeps_the_source_as_a_donor() -> None:
    plan = Generation(number=1, ranks=(2, 1), donors={0: 0}, planned=True)
    source, peer, target = running(0), running(1), WorkerMachine(2)
    target.shard = "a"
    for machine in (source, peer):
        assert machine.step(PlanAnnounced(generation=plan)) == []
    assert target.step(PlanAnnounced(generation=plan)) == [Connect(generation=plan)]
    votes = [vote_of(target)]
    assert peer.step(PlanDue(number=1, step=1)) == source.step(PlanDue(number=1, step=0)) == []
    for machine, pending in ((source, 1), (peer, 0)):  # only the source knows when its target is ready
        assert machine.step(GradientsCompleted()) == [EnterGate(pending=pending)]
        machine.step(GatePassed(pending=1))
        assert machine.step(BlockEnded()) == [CutGroups(), Connect(generation=plan)]
        votes.append(vote_of(machine))
    counted = VotesCounted(generation=1, votes=tuple(votes))
    [receive] = target.step(counted)
    assert isinstance(receive, ReceiveState) and receive.sources == (0, 1)
    [serve] = source.step(counted)
    assert isinstance(serve, ServeState) and source.phase is WorkerPhase.DONOR


def test_a_plan_that_is_due_in_another_step_waits_and_one_that_cannot_be_met_does_not() -> None:
    plan = Generation(number=1, ranks=(2, 1), donors={0: 0}, planned=True)
    machine = running(0, steps=2)
    machine.step(PlanAnnounced(generation=plan))
    machine.step(PlanDue(number=1, step=1))  # the target's copy is a step too old
    assert machine.step(GradientsCompleted()) == [EnterGate(pending=0)]
    machine.step(GatePassed(pending=0))
    machine.step(BlockEnded())
    machine.step(PlanDue(number=1, step=None))
    assert machine.step(GradientsCompleted()) == [EnterGate(pending=1)]


def test_a_target_that_adopted_the_state_of_the_switch_copies_nothing() -> None:
    plan = Generation(number=1, ranks=(2, 1), donors={0: 0}, planned=True)
    source, peer, target = running(0), running(1), WorkerMachine(2)
    target.shard = "a"
    source.step(PlanAnnounced(generation=plan))
    source.step(PlanDue(number=1, step=0))
    votes = []
    for machine in (source, peer):
        machine.step(GradientsCompleted())
        machine.step(GatePassed(pending=1))
        machine.step(BlockEnded())
    peer.step(PlanAnnounced(generation=plan))
    target.step(StateAdopted(step=source.step_count, lineage=source.lineage))
    assert target.step(PlanAnnounced(generation=plan)) == [Connect(generation=plan)]
    votes = [vote_of(machine) for machine in (target, source, peer)]
    counted = VotesCounted(generation=1, votes=tuple(votes))
    assert target.step(counted) == peer.step(counted) == [RedoStep()]
    assert source.step(counted) == [] and source.phase is WorkerPhase.DONOR


def test_adopted_state_that_is_written_over_does_not_count() -> None:
    target = WorkerMachine(2)
    target.shard = "a"
    target.step(StateAdopted(step=3, lineage=Lineage("x", 3)))
    target.step(CopyStarted())
    target.step(Interrupted(generation=SECOND))
    assert vote_of(target).step is None


def test_a_rank_that_learns_of_a_plan_only_from_the_gate_waits_for_its_map() -> None:
    plan = Generation(number=1, ranks=(2, 1), donors={0: 0}, planned=True)
    machine = running(1)
    machine.step(GradientsCompleted())
    machine.step(GatePassed(pending=1))
    assert machine.step(BlockEnded()) == []
    assert machine.phase is WorkerPhase.WAIT
    assert Connect(generation=plan) in machine.step(Interrupted(generation=plan))


def test_an_event_that_cannot_happen_tells_the_story() -> None:
    machine = running()
    with pytest.raises(InvariantError, match=r"worker 0 in phase run.*\n.*Interrupted"):
        machine.step(GatePassed())

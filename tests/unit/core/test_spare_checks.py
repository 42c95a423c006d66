"""A spare that fails its check is ended and never used; its slot is given up after the second failure."""

from __future__ import annotations

import pytest

from keepstep.core.actions import Announce, CheckSpare, KillWorker, MeasureLink, Persist, StartWorker
from keepstep.core.events import (
    AgentJoined,
    LinkMeasured,
    SpareChecked,
    StateDescribed,
    WorkerParked,
)
from keepstep.core.faults import CheckFault, is_check_fault, parse_check_fault
from keepstep.core.job import JobMachine
from keepstep.core.types import StatePart
from tests.unit.core.jobs import Job, of, training

GIGA = 10**9


def good(worker: int, free_bytes: int = 0) -> SpareChecked:
    return SpareChecked(worker=worker, ok=True, free_bytes=free_bytes)


def bad(worker: int) -> SpareChecked:
    return SpareChecked(worker=worker, ok=False, detail="cuda:3 computes wrongly")


def start_next(job: Job) -> int:
    """Let the refill start a spare; its number."""
    actions = job.let_time_pass(5)
    (start,) = of(StartWorker, actions)
    return start.worker


def test_a_worker_that_fails_before_it_parks_is_ended_and_another_is_started_on_another_slot() -> None:
    job = training(world_size=2, spares=1, slots=4)
    job.die(2)  # the spare
    number = start_next(job)
    actions = job.tell(bad(number))
    (kill,) = of(KillWorker, actions)
    assert kill.worker == number
    assert "cuda:3 computes wrongly" in kill.reason
    job.die(number)
    (start,) = of(StartWorker, job.let_time_pass(5))
    assert start.slot == 3, "a slot without a failure comes first"
    assert job.machine.state.start_failures == 0, "a failed check is no script that cannot start"


def test_a_slot_is_quarantined_at_the_second_failure_and_stays_so_for_the_next_controller() -> None:
    job = training(world_size=2, spares=1, slots=3)
    job.die(2)
    for _ in range(2):
        number = start_next(job)
        job.tell(bad(number))
        job.die(number)
    assert not of(StartWorker, job.let_time_pass(60)), "no slot is left for a spare"
    assert "slot 2 of here is quarantined" in job.said()
    resumed = JobMachine.resume(job.machine.config, of(Persist, job.past))
    assert resumed.state.members.quarantined == {("here", 2)}


def test_a_failing_spare_never_gets_a_rank() -> None:
    job = training(world_size=2, spares=2)
    job.tell(bad(2))
    job.die(1)
    job.let_time_pass(0.1)
    assert job.generation.ranks == (0, 3)


def test_spares_are_asked_every_hour_and_one_that_does_not_answer_is_ended() -> None:
    job = training(world_size=2, spares=2, spare_check_s=3600, spare_check_timeout_s=60)
    for worker in (2, 3):
        job.tell(good(worker))
    asked = of(CheckSpare, job.let_time_pass(3599))
    assert not asked
    asked = of(CheckSpare, job.let_time_pass(2))
    assert {action.worker for action in asked} == {2, 3}
    job.tell(good(2))
    actions = job.let_time_pass(61)
    assert [action.worker for action in of(KillWorker, actions)] == [3]
    assert "no answer within 60 s" in job.said()
    again = of(CheckSpare, job.let_time_pass(3600))
    assert {action.worker for action in again} == {2}


def test_a_promotion_does_not_wait_for_a_check_that_is_under_way() -> None:
    job = training(world_size=2, spares=1, spare_check_s=10)
    job.tell(good(2))
    job.let_time_pass(10.5)
    job.die(1)
    actions = job.let_time_pass(0.05) + job.last
    assert of(Announce, actions)
    assert job.generation.ranks == (0, 2)
    assert not of(KillWorker, job.tell(bad(2))), "a rank is no spare any more"
    assert not of(KillWorker, job.let_time_pass(100))


def test_a_spare_without_room_for_the_state_of_a_rank_is_ended_once_the_size_is_known() -> None:
    job = training(world_size=2, spares=2)
    job.tell(good(2, free_bytes=2 * GIGA))
    job.tell(good(3, free_bytes=20 * GIGA))
    part = StatePart(part="parameters", identity="p", tensors=1, bytes=3 * GIGA)
    for rank in range(2):
        job.tell(
            StateDescribed(worker=rank, rank=rank, step=2, shard="s", place="a whole copy", parts=(part,))
        )
    assert [action.worker for action in of(KillWorker, job.past)] == [2]
    assert "2 GB of memory free, the state of a rank has 3 GB" in job.said()
    number = start_next_after(job, 2)
    job.tell(good(number, free_bytes=GIGA))
    assert [action.worker for action in of(KillWorker, job.last)] == [number]


def start_next_after(job: Job, dead: int) -> int:
    job.die(dead)
    return start_next(job)


def test_mode_observe_ends_no_spare() -> None:
    job = training(world_size=2, spares=1, observe=True)
    assert not of(KillWorker, job.tell(bad(2)))
    assert "would end spare worker 2" in job.said()


# ---- between nodes --------------------------------------------------------------------------------


def of_two_nodes() -> Job:
    job = training(world_size=2, spares=0, slots=2)
    job.tell(AgentJoined(node="other", slots=1))
    job.machine.state.members.start("other", 0)
    job.tell(WorkerParked(worker=2, readiness="warm"))
    job.tell(good(2))
    return job


def test_the_link_of_a_spare_on_another_node_is_measured_and_a_slow_one_ends_it_at_the_second_look() -> None:
    job = of_two_nodes()
    (measure,) = of(MeasureLink, job.past)
    assert (measure.node, measure.to) == ("other", "here")
    slow = LinkMeasured(node="other", to="here", bytes_per_s=1_000_000)
    assert of(MeasureLink, job.tell(slow)), "one bad measurement proves nothing"
    actions = job.tell(slow)
    assert [action.worker for action in of(KillWorker, actions)] == [2]
    assert "its node reaches here with 1 MB/s only" in job.said()


def test_a_good_link_after_a_bad_one_counts() -> None:
    job = of_two_nodes()
    job.tell(LinkMeasured(node="other", to="here", detail="cannot send to here: timed out"))
    job.tell(LinkMeasured(node="other", to="here", bytes_per_s=GIGA))
    job.tell(LinkMeasured(node="other", to="here", detail="cannot send to here: timed out"))
    assert not of(KillWorker, job.past)


# ---- the vocabulary -------------------------------------------------------------------------------


def test_a_bad_check_can_be_ordered_by_slot_or_worker() -> None:
    assert parse_check_fault("slot=3,check=bad") == CheckFault(slot=3)
    late = parse_check_fault(" worker=4, check=bad, since=2")
    assert str(late) == "worker=4,check=bad,since=2"
    assert not late.strikes(4, 0, 1)
    assert late.strikes(4, 0, 2)
    assert not is_check_fault("rank=2,step=7")


@pytest.mark.parametrize(
    "text", ["check=bad", "slot=1,worker=2,check=bad", "slot=1,check=odd", "slot=x,check=bad", "rank=1,check=bad"]
)  # fmt: skip
def test_an_order_that_means_nothing_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError):
        parse_check_fault(text)

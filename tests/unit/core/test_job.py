"""Promises of the controller's machine: how a job starts, and what becomes of a rank whose worker dies."""

from __future__ import annotations

import json

import pytest

from keepstep.core.actions import (
    Announce,
    EndJob,
    KillWorker,
    Persist,
    Say,
    StandBy,
    StartWorker,
)
from keepstep.core.events import (
    AgentJoined,
    AgentLost,
    Progressed,
    WorkerParked,
)
from keepstep.core.job import JobConfig, JobMachine
from tests.unit.core.jobs import Job, complain, of, started, training

# ---- the start ----------------------------------------------------------------------------------


def test_all_workers_start_as_spares_and_generation_zero_follows_the_slots() -> None:
    job = Job(JobMachine(JobConfig(world_size=2, spares=1)))
    begun = job.tell(AgentJoined(node="here", slots=4))
    assert [(s.worker, s.slot) for s in of(StartWorker, begun)] == [(0, 0), (1, 1), (2, 2)]
    job.tell(WorkerParked(worker=2, readiness="warm"))
    assert of(Announce, job.tell(WorkerParked(worker=1, readiness="warm"))) == []
    [announce] = of(Announce, job.tell(WorkerParked(worker=0, readiness="warm")))
    assert announce.generation.ranks == (0, 1) and announce.generation.fresh
    assert announce.generation.store == "here"


def test_a_slow_first_slot_does_not_hold_the_start_for_long() -> None:
    job = Job(JobMachine(JobConfig(world_size=2, spares=1)))
    job.tell(AgentJoined(node="here", slots=3))
    for worker in (1, 2):
        job.tell(WorkerParked(worker=worker, readiness="warm"))
    [announce] = of(Announce, job.let_time_pass(1.0))
    assert announce.generation.ranks == (1, 2)


def test_spares_stand_by_as_a_rank_that_is_not_zero() -> None:
    job = started(world_size=2, spares=2)
    assert {s.worker: s.rehearse_rank for s in of(StandBy, job.past)} == {2: 1, 3: 1}


def test_a_script_that_dies_before_init_ends_the_job_with_its_code() -> None:
    job = Job(JobMachine(JobConfig(world_size=2)))
    job.tell(AgentJoined(node="here", slots=2))
    [end] = of(EndJob, job.die(1, status=1))
    assert end.exit_code == 1 and "before it reached keepstep.init()" in end.reason


def test_a_script_that_never_calls_init_is_told_so() -> None:
    job = Job(JobMachine(JobConfig(world_size=2)))
    job.tell(AgentJoined(node="here", slots=2))
    [end] = of(EndJob, job.die(0, status=0))
    assert end.exit_code == 2 and "without calling keepstep.init()" in end.reason


def test_too_few_slots_are_waited_for_and_then_given_up() -> None:
    job = Job(JobMachine(JobConfig(world_size=3, spare_timeout_s=100)))
    job.tell(AgentJoined(node="here", slots=2))
    actions = job.let_time_pass(101)
    assert [s for s in of(Say, actions) if "still waiting for 1 free slot" in s.text]
    assert of(EndJob, actions)[0].exit_code == 75


# ---- a death ------------------------------------------------------------------------------------


def test_a_dead_rank_goes_to_the_spare_and_everything_is_written_before_it_is_told() -> None:
    job = training()
    job.die(1, step=7, published=6)
    actions = job.let_time_pass(0.02)
    kinds = [a.kind if isinstance(a, Persist) else type(a).__name__ for a in actions]
    assert kinds.index("generation") < kinds.index("Announce")
    assert job.generation.ranks == (0, 3, 2)
    [announce] = of(Announce, actions)
    assert (
        "rank 1: worker 1 was ended by SIGKILL at step 7 (generation 0); worker 3 takes over"
        in announce.reason
    )
    assert job.persisted("incident")[0]["rank"] == 1


def test_two_deaths_at_once_make_one_generation() -> None:
    job = training(spares=2)
    job.die(1), job.die(2)
    job.let_time_pass(0.02)
    assert (job.generation.number, job.generation.ranks) == (1, (0, 3, 4))


def test_a_hot_spare_is_preferred() -> None:
    job = training(spares=2)
    job.tell(WorkerParked(worker=4, readiness="hot"))
    job.die(0)
    job.let_time_pass(0.02)
    assert job.generation.ranks == (4, 1, 2)


def test_a_lost_node_takes_all_its_workers_with_it_in_one_generation() -> None:
    job = Job(JobMachine(JobConfig(world_size=2, spares=2)))
    job.tell(AgentJoined(node="a", slots=2))
    job.tell(AgentJoined(node="b", slots=2))
    for worker in range(4):
        job.tell(WorkerParked(worker=worker, readiness="warm"))
    job.tell(Progressed(worker=0, generation=0, step=5, published=5))
    job.tell(AgentLost(node="a", reason="no heartbeat"))
    job.let_time_pass(0.02)
    assert job.generation.ranks == (2, 3) and job.generation.store == "b"


def test_a_second_failure_during_recovery_belongs_to_the_same_incident() -> None:
    job = training(spares=2)
    job.die(1)
    job.let_time_pass(0.02)
    job.die(3)
    job.let_time_pass(0.02)
    assert (job.generation.number, job.generation.ranks) == (2, (0, 4, 2))
    job.resume_all(step=6)
    [closed] = job.persisted("incident_closed")
    assert closed["generations"] == [1, 2] and len(closed["victims"]) == 2


def test_a_death_in_setup_restarts_every_rank_with_new_workers() -> None:
    job = started()
    job.die(1)
    killed = [k.worker for k in of(KillWorker, job.let_time_pass(0.02))]
    assert killed == [0, 2, 3]
    for worker in killed:
        job.die(worker)
    assert [s.worker for s in of(StartWorker, job.past)] == list(range(8))
    for worker in range(4, 8):
        job.tell(WorkerParked(worker=worker, readiness="warm"))
    assert job.generation.fresh and not set(job.generation.ranks) & {0, 1, 2, 3}
    job.resume_all(step=1)
    [closed] = job.persisted("incident_closed")
    assert closed["resolution"] == "restarted_in_setup"


def test_the_same_failure_at_the_same_step_the_third_time_is_the_scripts_own() -> None:
    job = training(spares=3)
    for worker in (1, 3, 4):
        job.die(worker, status=-11, step=7)
        job.let_time_pass(0.02)
    [end] = of(EndJob, job.past)
    assert end.exit_code == 139 and "for the 3. time" in end.reason and "SIGSEGV" in end.reason


def test_failures_at_different_steps_are_not_the_scripts_own() -> None:
    job = training(spares=3)
    for step, worker in enumerate((1, 3, 4)):
        job.die(worker, step=step)
        job.let_time_pass(0.02)
    assert of(EndJob, job.past) == []


def test_a_death_without_any_spare_uses_the_freed_slot() -> None:
    job = training(spares=0)
    job.die(1)
    actions = job.let_time_pass(0.02)
    [start] = of(StartWorker, actions)
    assert (start.slot, start.worker) == (1, 3) and "restart 1 of 3" in start.reason
    assert job.machine.snapshot()["state"] == "waiting"
    job.tell(WorkerParked(worker=3, readiness="warm"))
    assert job.generation.ranks == (0, 3, 2)


def test_restarts_are_counted_and_then_a_spare_is_waited_for_and_given_up() -> None:
    job = training(spares=0, max_restarts=1, spare_timeout_s=100)
    job.die(1, step=3)
    job.let_time_pass(0.02)
    job.tell(WorkerParked(worker=3, readiness="warm"))
    job.die(3, step=4)
    actions = job.let_time_pass(99)
    says = [s.text for s in of(Say, actions)]
    assert any(
        "still waiting for a spare for rank 1" in text and "giving up after 100 s" in text for text in says
    )
    assert sum("still waiting" in text for text in says) == 3
    assert of(EndJob, job.let_time_pass(2))[0].exit_code == 75


def test_a_dead_spare_is_replaced_and_no_generation_is_made() -> None:
    job = training()
    job.die(3)
    assert of(StartWorker, job.let_time_pass(3))[0].slot == 3
    assert job.generation.number == 0 and job.persisted("incident") == []


def test_the_number_of_spares_is_kept_once_training_goes_on() -> None:
    job = training()
    job.die(1)
    job.let_time_pass(0.02)
    assert of(StartWorker, job.let_time_pass(60)) == []
    job.resume_all(step=6)
    assert of(StartWorker, job.let_time_pass(1.9)) == []
    assert [s.slot for s in of(StartWorker, job.let_time_pass(0.2))] == [1]


def test_spares_that_keep_dying_while_starting_are_not_started_for_ever() -> None:
    job = training()
    job.die(3)
    job.let_time_pass(60)
    for worker in range(4, 7):
        job.die(worker)
        job.let_time_pass(60)
    assert max(s.worker for s in of(StartWorker, job.past)) == 6
    assert "no more are started" in job.said()


def test_a_fenced_workers_word_counts_for_nothing() -> None:
    job = training()
    job.die(1)
    job.let_time_pass(0.02)
    before = job.generation
    complain(job, 1, generation=1)
    job.tell(Progressed(worker=1, generation=1, step=99, published=99))
    job.let_time_pass(1)
    assert job.generation == before and job.machine.snapshot()["published"] == 5


# ---- its numbers and its picture ----------------------------------------------------------------


def test_a_nonsensical_number_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        JobConfig(world_size=0)
    with pytest.raises(ValueError, match="gather_s"):
        JobConfig(world_size=1, gather_s=-1)


def test_the_snapshot_is_json_and_names_everything() -> None:
    job = training()
    job.die(1)
    picture = json.loads(json.dumps(job.machine.snapshot()))
    assert picture["state"] == "recovering" and picture["incident"]["rank"] == 1
    assert [rank["worker"] for rank in picture["ranks"]] == [0, 1, 2]
    assert picture["spares"][0]["worker"] == 3 and picture["free_slots"] == [{"node": "here", "slot": 1}]

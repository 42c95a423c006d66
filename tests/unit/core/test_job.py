"""Promises of the controller's machine: what it does when something dies, fails, waits or ends."""

from __future__ import annotations

import json

import pytest

from keepstep.core.actions import (
    Announce,
    EndJob,
    KillWorker,
    Persist,
    Release,
    Say,
    StandBy,
    StartWorker,
)
from keepstep.core.events import (
    AgentJoined,
    AgentLost,
    Complained,
    FingerprintTaken,
    PersistFailed,
    Progressed,
    Resumed,
    ScriptFailed,
    StateReceived,
    StopRequested,
    UsageRefused,
    VerdictReached,
    WorkerExited,
    WorkerFinished,
    WorkerParked,
    WorkerSuspected,
)
from keepstep.core.job import JobConfig, JobMachine
from tests.unit.core.jobs import Job, of, started, training


def complain(job: Job, worker: int, generation: int | None = None, **more):
    number = job.generation.number if generation is None else generation
    return job.tell(Complained(worker=worker, generation=number, reason="connection closed", **more))


def learn(job: Job, worker: int, target: int | None, course: str = "keep", **more):
    return job.tell(
        VerdictReached(
            worker=worker,
            generation=job.generation.number,
            target=target,
            course=course,
            reason="as voted",
            connect_s=0.02,
            vote_s=0.01,
            **more,
        )
    )


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


# ---- suspicion and complaints -------------------------------------------------------------------


def test_a_stopped_rank_is_fenced_and_killed_with_its_evidence_kept() -> None:
    job = training()
    [kill] = of(
        KillWorker,
        job.tell(WorkerSuspected(worker=2, reason="stopped for 0.6 s", evidence={"state": "T"})),
    )
    assert kill.worker == 2 and kill.grace_s == 0
    job.let_time_pass(0.02)
    assert job.generation.ranks == (0, 1, 3)
    job.die(2)
    job.resume_all(step=6)
    [closed] = job.persisted("incident_closed")
    assert closed["cause"] == "suspicion" and closed["evidence"] == {"2": {"state": "T"}}


def test_a_complaint_without_a_death_keeps_the_map() -> None:
    job = training()
    complain(job, 1)
    assert job.let_time_pass(0.1) == []
    job.let_time_pass(0.1)
    assert (job.generation.number, job.generation.ranks) == (1, (0, 1, 2))
    job.resume_all(step=6)
    assert job.persisted("incident_closed")[0]["resolution"] == "same_map"


def test_a_death_within_the_grace_explains_the_complaint() -> None:
    job = training()
    complain(job, 0)
    seen_s = job.now_s
    job.let_time_pass(0.1)
    job.die(1)
    job.let_time_pass(0.5)
    assert (job.generation.number, job.generation.ranks) == (1, (0, 3, 2))
    assert job.persisted("incident")[0]["first_evidence_s"] == seen_s


def test_an_older_complaint_is_ignored() -> None:
    job = training()
    job.die(1)
    job.let_time_pass(0.02)
    complain(job, 0, generation=0)
    job.let_time_pass(1)
    assert job.generation.number == 1


def test_generations_that_come_to_nothing_end_the_job() -> None:
    job = training(same_map_limit=2)
    for _ in range(3):
        complain(job, 1)
        job.let_time_pass(0.2)
    assert "2 generations in a row came to nothing" in of(EndJob, job.past)[0].reason


def test_a_complaint_in_setup_restarts_the_world() -> None:
    job = started()
    complain(job, 1)
    assert len(of(KillWorker, job.let_time_pass(0.2))) == 4


# ---- verdicts and costs -------------------------------------------------------------------------


def test_the_incident_tells_its_phases_and_costs() -> None:
    job = training()
    job.die(1, step=7, published=6, first_evidence_s=job.now_s - 0.004)
    job.let_time_pass(0.02)
    learn(job, 0, 7), learn(job, 2, 7), learn(job, 3, 7, course="receive")
    job.tell(StateReceived(worker=3, generation=1, transfer_s=0.05, bytes=1000, sources=(0, 2)), 0.1)
    job.resume_all(step=8)
    [closed] = job.persisted("incident_closed")
    assert (closed["resolution"], closed["steps_lost"], closed["steps_recomputed"]) == ("rebuilt", 0, 1)
    assert closed["bit_exact"] and closed["replacements"] == {"1": 3}
    phases = closed["phases_s"]
    assert phases["connect"] == 0.02 and phases["transfer"] == 0.05 and phases["detect"] >= 0.004
    assert sum(phases.values()) == pytest.approx(closed["total_s"])
    json.dumps(closed)


def test_a_verdict_without_a_live_copy_starts_the_script_again_and_says_so() -> None:
    job = training()
    job.die(1)
    job.let_time_pass(0.02)
    learn(job, 0, None, course="rollback")
    assert {k.worker for k in of(KillWorker, job.last)} == {0, 2, 3}
    for worker in (0, 2, 3):
        job.die(worker)
    for worker in range(4, 8):
        job.tell(WorkerParked(worker=worker, readiness="warm"))
    assert job.generation.fresh
    job.resume_all(step=1)
    [closed] = job.persisted("incident_closed")
    assert (closed["resolution"], closed["steps_lost"], closed["bit_exact"]) == ("rollback", 5, False)
    assert "no live copy is left" in job.said()


def test_a_target_below_the_published_step_is_never_silent() -> None:
    job = training()
    job.die(1)
    job.let_time_pass(0.02)
    learn(job, 0, 4)
    assert "goes back from step 5 to 4: 1 committed steps are lost" in job.said()


def test_twins_that_differ_are_named() -> None:
    job = training()
    for worker, digest in ((0, "aa"), (1, "aa"), (2, "bb")):
        job.tell(FingerprintTaken(worker=worker, rank=worker, step=4, shard="s", digest=digest))
    assert "silent corruption, or state that is not replicated" in job.said()
    assert [n["ranks"] for n in job.persisted("note") if n["about"] == "fingerprint"] == [[0, 2]]


# ---- the end ------------------------------------------------------------------------------------


def test_the_job_ends_with_zero_when_all_have_finished() -> None:
    job = training()
    for worker in (0, 1, 2):
        job.tell(WorkerFinished(worker=worker, step=10))
    assert of(Release, job.past) == [Release(workers=(3,))]
    for worker in (3, 0, 1):
        job.die(worker, status=0)
    assert of(EndJob, job.past) == []
    assert of(EndJob, job.die(2, status=0))[0].exit_code == 0


def test_a_complaint_after_the_last_gate_is_answered_by_release() -> None:
    job = training()
    job.tell(WorkerFinished(worker=0, step=10))
    assert of(Release, complain(job, 1)) == [Release(workers=(1,))]
    job.let_time_pass(1)
    assert job.generation.number == 0


def test_the_scripts_own_exception_ends_the_job_with_that_workers_code() -> None:
    job = training()
    job.tell(ScriptFailed(worker=1, summary="ValueError: no", traceback="Traceback: ..."))
    assert "ValueError: no\nTraceback" in job.said()
    complain(job, 0)
    [end] = of(EndJob, job.die(1, status=3))
    assert end.exit_code == 3 and job.generation.number == 0


def test_a_machines_exception_is_like_a_death() -> None:
    job = training()
    killed = job.tell(ScriptFailed(worker=1, summary="CUDA error", traceback="...", hardware=True))
    assert [k.worker for k in of(KillWorker, killed)] == [1]
    job.let_time_pass(0.02)
    assert job.generation.ranks == (0, 3, 2)


def test_what_a_spare_rehearses_never_ends_the_job() -> None:
    job = training()
    job.tell(ScriptFailed(worker=3, summary="ValueError: no", traceback="..."))
    job.tell(UsageRefused(worker=3, message="refused"))
    job.die(3, status=1)
    assert of(EndJob, job.let_time_pass(1)) == [] and job.generation.number == 0


def test_refused_usage_ends_the_job_with_code_two() -> None:
    job = started()
    [end] = of(EndJob, job.tell(UsageRefused(worker=1, message="optimizer is not protected")))
    assert (end.exit_code, end.reason) == (2, "optimizer is not protected")


def test_a_rank_that_leaves_by_itself_while_others_go_on_ends_the_job_in_one_line() -> None:
    job = training()
    job.die(1, status=0)
    assert of(EndJob, job.let_time_pass(10)) == []
    complain(job, 0)
    [end] = of(EndJob, job.let_time_pass(1))
    assert end.exit_code == 1 and "rank 1: worker 1 ended by itself with status 0" in end.reason


def test_all_ranks_that_leave_by_themselves_end_the_job_well() -> None:
    job = training(spares=0)
    for worker in (0, 1, 2):
        job.die(worker, status=0)
    assert of(EndJob, job.past)[0].exit_code == 0


@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_stop_asks_everybody_to_end_and_waits(signal: str, code: int) -> None:
    job = training()
    kills = of(KillWorker, job.tell(StopRequested(signal=signal)))
    assert len(kills) == 4 and all(kill.grace_s > 0 for kill in kills)
    for worker in range(4):
        job.die(worker, status=-15)
    assert of(EndJob, job.past)[0].exit_code == code


def test_a_second_stop_is_at_once() -> None:
    job = training()
    job.tell(StopRequested(signal="SIGINT"))
    kills = of(KillWorker, job.tell(StopRequested(signal="SIGINT", hard=True)))
    assert len(kills) == 4 and all(kill.grace_s == 0 for kill in kills)


def test_a_stop_that_nobody_obeys_ends_anyway() -> None:
    job = training()
    job.tell(StopRequested(signal="SIGTERM"))
    assert of(EndJob, job.let_time_pass(60))[0].exit_code == 143


def test_nothing_is_answered_after_the_end() -> None:
    job = started()
    job.tell(UsageRefused(worker=1, message="no"))
    assert job.die(0) == [] and job.machine.next_deadline_s(job.now_s) is None


def test_a_full_disk_is_said_once_and_training_goes_on() -> None:
    job = training()
    for _ in range(3):
        job.tell(PersistFailed(reason="no space left"))
    assert job.said().count("the ledger cannot be written") == 1
    job.die(1)
    job.let_time_pass(0.02)
    assert job.generation.number == 1


# ---- watching, coming back ----------------------------------------------------------------------


def test_a_controller_that_comes_back_tells_the_newest_generation_again() -> None:
    job = training()
    job.die(1)
    job.let_time_pass(0.02)
    again = Job(JobMachine.resume(job.machine.config, [a for a in job.past if isinstance(a, Persist)]))
    [announce] = of(Announce, again.tell(AgentJoined(node="here", slots=4, workers=(0, 2, 3))))
    assert announce.generation == job.generation
    again.die(0)
    again.let_time_pass(0.02)
    assert of(StartWorker, again.past)[0].worker == 4, "a number is never given twice"
    assert of(KillWorker, again.past) == [], "setup is over: the others stay"


def test_a_controller_that_comes_back_finds_who_died_meanwhile() -> None:
    job = training()
    again = Job(JobMachine.resume(job.machine.config, [a for a in job.past if isinstance(a, Persist)]))
    again.tell(AgentJoined(node="here", slots=4, workers=(0, 2, 3)))
    again.tell(WorkerParked(worker=3, readiness="hot"))
    again.let_time_pass(0.02)
    assert again.generation.ranks == (0, 3, 2)


def test_the_snapshot_is_json_and_names_everything() -> None:
    job = training()
    job.die(1)
    picture = json.loads(json.dumps(job.machine.snapshot()))
    assert picture["state"] == "recovering" and picture["incident"]["rank"] == 1
    assert [rank["worker"] for rank in picture["ranks"]] == [0, 1, 2]
    assert picture["spares"][0]["worker"] == 3 and picture["free_slots"] == [{"node": "here", "slot": 1}]


def test_time_alone_never_asks_for_endless_ticks() -> None:
    job = training(spares=0, max_restarts=0)
    complain(job, 0)
    job.tell(WorkerExited(worker=1, status=-9))
    complain(job, 2)
    job.let_time_pass(500)


def test_a_nonsensical_number_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        JobConfig(world_size=0)
    with pytest.raises(ValueError, match="gather_s"):
        JobConfig(world_size=1, gather_s=-1)


def test_a_late_report_of_an_old_generation_does_not_close_the_incident() -> None:
    job = training()
    job.die(1)
    job.let_time_pass(0.02)
    for worker in (0, 1, 2):
        job.tell(Resumed(worker=worker, generation=0, step=6))
    assert job.persisted("incident_closed") == []


def test_a_complaint_that_fell_due_does_not_spin_while_deaths_are_gathered() -> None:
    job = training(gather_s=5.0)
    complain(job, 0)
    job.die(1)
    job.now_s += 1.0
    due_s = job.machine.next_deadline_s(job.now_s)
    assert due_s is not None and due_s > job.now_s


def test_a_rank_that_hangs_in_the_last_gate_is_released_after_a_while() -> None:
    job = training()
    job.tell(WorkerFinished(worker=0, step=10))
    assert of(Release, job.let_time_pass(2)) == [Release(workers=(1, 2))]


def test_an_end_that_was_written_but_not_carried_out_is_carried_out_by_the_next_controller() -> None:
    job = started()
    job.tell(UsageRefused(worker=1, message="no"))
    again = Job(JobMachine.resume(job.machine.config, [a for a in job.past if isinstance(a, Persist)]))
    assert of(EndJob, again.tell(AgentJoined(node="here", slots=4)))[0].exit_code == 2


def test_a_node_whose_agent_does_not_come_back_to_a_new_controller_is_lost() -> None:
    job = Job(JobMachine(JobConfig(world_size=1, spares=1)))
    job.tell(AgentJoined(node="a", slots=1))
    job.tell(AgentJoined(node="b", slots=1))
    job.tell(WorkerParked(worker=0, readiness="warm"))
    job.tell(WorkerParked(worker=1, readiness="warm"))
    job.tell(Progressed(worker=0, generation=0, step=5, published=5))
    again = Job(JobMachine.resume(job.machine.config, [a for a in job.past if isinstance(a, Persist)]))
    again.tell(AgentJoined(node="b", slots=1, workers=(1,)))
    again.tell(WorkerParked(worker=1, readiness="warm"))
    again.let_time_pass(31)
    assert again.generation.ranks == (1,) and "its agent did not come back within 30 s" in again.said()


def test_what_ended_while_the_controller_was_away_is_told_with_its_status() -> None:
    job = training(spares=0)
    again = Job(JobMachine.resume(job.machine.config, [a for a in job.past if isinstance(a, Persist)]))
    exited, finished = {0: 0, 1: 0, 2: 0}, (0, 1, 2)
    again.tell(AgentJoined(node="here", slots=3, exited=exited, finished=finished))
    assert of(EndJob, again.past)[0].exit_code == 0

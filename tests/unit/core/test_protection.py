"""Mode observe tells what it would do and does nothing; a failing self-check ends protection, never training."""

from __future__ import annotations

import pytest

from keepstep.core.actions import Announce, EndJob, KillWorker, Persist, StartWorker
from keepstep.core.events import (
    Complained,
    FingerprintTaken,
    ScriptFailed,
    SelfCheckFailed,
    SelfCheckPassed,
    WorkerSuspected,
)
from keepstep.core.job import JobMachine
from keepstep.core.observing import UNWOUND_EXIT_CODE
from tests.unit.core.jobs import Job, of, started, training

FULL = "its record cannot be kept: [Errno 28] No space left on device"


def closed(job: Job) -> list[dict]:
    return job.persisted("incident_closed")


def touched(job: Job) -> list[object]:
    """What observing must never do once the world has started."""
    begun = job.past.index(of(Announce, job.past)[0])
    return [a for a in job.past[begun + 1 :] if isinstance(a, (Announce, KillWorker, StartWorker))]


def twins(job: Job, *shards: str, digest: str = "d") -> None:
    for rank, shard in enumerate(shards):
        job.tell(FingerprintTaken(worker=rank, rank=rank, step=2, shard=shard, digest=digest))


# ---- observe ------------------------------------------------------------------------------------


def test_a_death_becomes_an_incident_that_says_what_would_be_done_and_ends_the_job() -> None:
    job = training(observe=True)
    twins(job, "a", "a", "a")
    job.die(1)
    job.let_time_pass(0.02)
    [incident] = closed(job)
    assert (incident["cause"], incident["resolution"]) == ("death", "observed")
    would = incident["would"]
    assert would["generation"] == 1 and would["replacements"] == {"1": 3} and would["course"] == "rebuilt"
    assert would["steps_lost"] == 0 and would["steps_recomputed"] == 1
    assert "would append generation 1 and promote worker 3 to rank 1" in would["text"]
    assert of(EndJob, job.past)[0].exit_code == 137 and touched(job) == []


def test_observing_a_death_without_a_spare_says_that_one_would_have_to_be_found() -> None:
    job = training(observe=True, spares=0)
    job.die(2, status=3)
    job.let_time_pass(0.02)
    [incident] = closed(job)
    assert incident["would"]["without_worker"] == [2] and "no spare" in incident["would"]["text"]
    assert of(EndJob, job.past)[0].exit_code == 3


def test_observing_the_death_of_the_last_copy_says_how_many_steps_would_be_lost() -> None:
    job = training(observe=True, published=40)
    twins(job, "a", "a", "b")
    job.die(2)
    job.let_time_pass(0.02)
    would = closed(job)[0]["would"]
    assert would["course"] == "rollback" and would["steps_lost"] == 40
    assert "rank 2 has no live twin" in would["text"]


def test_observing_a_death_in_setup_says_that_every_rank_would_start_again() -> None:
    job = started(observe=True)
    job.die(0)
    job.let_time_pass(0.02)
    assert closed(job)[0]["would"]["course"] == "restarted_in_setup"
    assert of(EndJob, job.past)[0].exit_code == 137 and touched(job) == []


def test_a_suspect_is_told_once_for_each_step_and_left_alone() -> None:
    job = training(observe=True)
    for _ in range(5):
        job.tell(WorkerSuspected(worker=2, reason="stopped for 1 s"))
    [incident] = closed(job)
    assert (
        incident["resolution"] == "observed" and "would fence and kill worker 2" in incident["would"]["text"]
    )
    assert touched(job) == [] and job.machine.snapshot()["state"] == "running"


def test_survivors_that_end_with_their_collectives_are_a_consequence_of_the_first_death() -> None:
    job = training(observe=True)
    job.die(0, status=UNWOUND_EXIT_CODE)
    job.die(1)
    job.die(2, status=UNWOUND_EXIT_CODE)
    job.let_time_pass(1.0)
    [incident] = closed(job)
    assert [victim["worker"] for victim in incident["victims"]] == [1]
    assert of(EndJob, job.past)[0].exit_code == 137


def test_collectives_that_fail_though_nobody_died_end_an_observed_job_with_code_1() -> None:
    job = training(observe=True)
    job.tell(Complained(worker=0, generation=0, reason="timed out"))
    job.die(0, status=UNWOUND_EXIT_CODE)
    job.let_time_pass(1.0)
    [incident] = closed(job)
    assert incident["cause"] == "complaint" and incident["would"]["course"] == "same_map"
    assert of(EndJob, job.past)[0].exit_code == 1


def test_a_machines_error_is_observed_and_ends_the_job_as_the_scripts_own() -> None:
    job = training(observe=True)
    job.tell(ScriptFailed(worker=1, summary="RuntimeError: CUDA error", traceback="", hardware=True))
    [incident] = closed(job)
    assert incident["cause"] == "hardware" and incident["would"]["replacements"] == {"1": 3}
    job.die(1, status=79)
    assert of(EndJob, job.past)[0].exit_code == 79


# ---- self-checks --------------------------------------------------------------------------------


def test_a_rank_whose_record_cannot_be_kept_is_not_replaced_and_the_others_are() -> None:
    job = training()
    job.tell(SelfCheckFailed(worker=1, check="record", reason=FULL))
    shield = job.machine.snapshot()["protection"]
    assert shield == {"on": False, "reason": f"rank 1: {FULL}", "ranks": [1]}
    assert job.said().count("protection off: rank 1: worker 1") == 1
    job.die(2)
    job.let_time_pass(0.02)
    assert job.generation.ranks == (0, 1, 3), "rank 2 is protected"
    job.resume_all(6)
    job.die(1)
    job.let_time_pass(0.02)
    [end] = of(EndJob, job.past)
    assert end.exit_code == 137 and "protection is off" in end.reason and "No space left" in end.reason
    assert closed(job)[-1]["resolution"] == "unprotected"


def test_protection_is_on_again_when_the_check_holds_again() -> None:
    job = training()
    job.tell(SelfCheckFailed(worker=1, check="record", reason=FULL))
    job.tell(SelfCheckFailed(worker=1, check="record", reason=FULL))
    job.tell(SelfCheckPassed(worker=1, check="record"))
    job.tell(SelfCheckPassed(worker=1, check="record"))
    assert job.machine.snapshot()["protection"]["on"]
    assert job.said().count("protection off") == 1 and job.said().count("protection is on again") == 1
    job.die(1)
    job.let_time_pass(0.02)
    assert job.generation.ranks == (0, 3, 2)


def test_twins_that_differ_switch_protection_off_and_training_goes_on() -> None:
    job = training()
    twins(job, "a", "a")
    job.tell(FingerprintTaken(worker=2, rank=2, step=2, shard="a", digest="other"))
    shield = job.machine.snapshot()["protection"]
    assert not shield["on"] and "differ" in shield["reason"] and shield["ranks"] == []
    assert of(EndJob, job.past) == [] and job.machine.snapshot()["state"] == "running"
    job.die(0)
    job.let_time_pass(0.02)
    assert job.generation.number == 0 and of(EndJob, job.past)[0].exit_code == 137


@pytest.mark.parametrize("cause", ["record", "twins"])
def test_a_controller_that_comes_back_knows_that_protection_is_off(cause: str) -> None:
    job = training()
    if cause == "record":
        job.tell(SelfCheckFailed(worker=1, check="record", reason=FULL))
    else:
        twins(job, "a", "a")
        job.tell(FingerprintTaken(worker=2, rank=2, step=2, shard="a", digest="other"))
    entries = [action for action in job.past if isinstance(action, Persist)]
    again = JobMachine.resume(job.machine.config, entries)
    assert again.snapshot()["protection"] == job.machine.snapshot()["protection"]


def test_a_check_of_a_worker_that_is_gone_means_nothing() -> None:
    job = training()
    job.tell(SelfCheckFailed(worker=3, check="record", reason=FULL))
    assert job.machine.snapshot()["protection"]["on"], "a spare's record protects nobody"

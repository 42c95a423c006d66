"""Promises of the controller's machine: how a job ends, well or badly, and who is told."""

from __future__ import annotations

import pytest

from keepstep.core.actions import (
    EndJob,
    KillWorker,
    Release,
)
from keepstep.core.events import (
    PersistFailed,
    ScriptFailed,
    StopRequested,
    UsageRefused,
    WorkerFinished,
)
from tests.unit.core.jobs import complain, of, started, training


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


def test_a_rank_that_hangs_in_the_last_gate_is_released_after_a_while() -> None:
    job = training()
    job.tell(WorkerFinished(worker=0, step=10))
    assert of(Release, job.let_time_pass(2)) == [Release(workers=(1, 2))]

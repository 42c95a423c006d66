"""What the exit code says of a rank that dies when all steps are done: its own work after the loop is the question."""

from __future__ import annotations

import signal

import pytest

from keepstep.core.actions import EndJob, Persist
from keepstep.core.events import AgentJoined, WorkerExited, WorkerFinished
from keepstep.core.job import JobMachine
from tests.unit.core.jobs import Job, of, training

KILLED = -signal.SIGKILL


def finish(job: Job, worker: int, generation: int = 0, status: int = 0) -> None:
    job.tell(WorkerFinished(worker=worker, step=10, generation=generation))
    job.die(worker, status=status)


def end_of(job: Job) -> EndJob:
    if not (ends := of(EndJob, job.past)):
        job.let_time_pass(60)
        ends = of(EndJob, job.past)
    (end,) = ends
    return end


@pytest.mark.parametrize(
    ("rank", "phase", "code", "said"),
    [
        (
            0,
            "GATE",
            137,
            "rank 0 (worker 0) was ended by SIGKILL in its last gate: what the script does there",
        ),
        (1, "GATE", 0, "rank 1 (worker 1) was ended by SIGKILL in its last gate: what the script does there"),
        (0, "DONE", 137, "rank 0 (worker 0) was ended by SIGKILL in what the script does after its loop"),
        (1, "DONE", 137, "rank 1 (worker 1) was ended by SIGKILL in what the script does after its loop"),
        (0, "", 137, "rank 0 (worker 0) was ended by SIGKILL after its last step"),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
def test_a_rank_that_dies_when_the_others_have_their_steps(
    rank: int, phase: str, code: int, said: str, first: bool
) -> None:
    """Dying first it opens an incident, which nobody comes back to repair."""
    job = training()
    others = [worker for worker in range(3) if worker != rank]
    if first:
        job.tell(WorkerExited(worker=rank, status=KILLED, step=10, phase=phase))
        job.let_time_pass(1)
    for worker in others:
        finish(job, worker)
    for worker in {*job.generation.ranks} - {*others, rank}:
        job.die(worker, status=0)  # the replacement, released
    if not first:
        job.tell(WorkerExited(worker=rank, status=KILLED, step=10, phase=phase))
    end = end_of(job)
    assert end.exit_code == code, end.reason
    if code:
        assert end.reason.startswith("training is complete, all 10 steps are committed on every rank, but ")
        assert said in end.reason and end.reason.endswith(
            "(work handed to run.finish() is protected: a replacement does it)"
        )
    else:
        assert end.reason == "all ranks have finished"
        assert said in job.said() and "so this is no failure" in job.said()
    assert [body["resolution"] for body in job.persisted("incident_closed")] == ["after_training"] * first


def test_a_replacement_that_passed_the_last_gate_has_made_the_death_good() -> None:
    """Its `Resumed` may come later than another's word that all is finished."""
    job = training()
    job.tell(WorkerExited(worker=0, status=KILLED, step=10, phase="GATE"))
    job.let_time_pass(1)
    assert job.generation.ranks == (3, 1, 2)
    for worker in (1, 2, 3):
        finish(job, worker, generation=1)
    assert end_of(job).exit_code == 0


def test_a_code_of_the_scripts_own_end_is_the_jobs_code() -> None:
    job = training()
    finish(job, 0)
    finish(job, 1, status=-signal.SIGSEGV)
    finish(job, 2, status=3)
    end = end_of(job)
    assert end.exit_code == 139
    assert "rank 1 (worker 1) was ended by SIGSEGV after the end of its loop; rank 2" in end.reason
    assert "run.finish" not in end.reason, "it would not have helped"


def test_a_controller_that_comes_back_still_knows_whose_work_is_missing() -> None:
    job = training()
    job.tell(WorkerExited(worker=0, status=KILLED, step=10, phase="DONE"))
    finish(job, 1)
    again = Job(JobMachine.resume(job.machine.config, [a for a in job.past if isinstance(a, Persist)]))
    again.tell(AgentJoined(node="here", slots=4, exited={0: KILLED, 1: 0, 2: 0, 3: 0}, finished=(1, 2)))
    end = end_of(again)
    assert end.exit_code == 137 and "rank 0 (worker 0) was ended by SIGKILL" in end.reason

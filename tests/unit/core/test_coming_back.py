"""Promises of the controller's machine when it is made anew from its ledger: a controller that comes back."""

from __future__ import annotations

from keepstep.core.actions import (
    Announce,
    EndJob,
    KillWorker,
    Persist,
    StartWorker,
)
from keepstep.core.events import (
    AgentJoined,
    Progressed,
    UsageRefused,
    WorkerParked,
)
from keepstep.core.job import JobConfig, JobMachine
from tests.unit.core.jobs import Job, of, started, training


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

"""Which node plays which ranks when a world starts: the user's order, so many each, spare nodes never."""

from __future__ import annotations

import itertools

import pytest

from keepstep.core.actions import Announce, StartWorker
from keepstep.core.events import AgentJoined, WorkerParked
from keepstep.core.job import JobConfig, JobMachine
from tests.unit.core.jobs import Job, of

SPARE = {"keepstep": "spare", "node_rank": "2"}
NODES = {
    # The names say another order than the places.
    "zeus": AgentJoined(node="zeus", slots=3, labels={"node_rank": "0"}),
    "apollo": AgentJoined(node="apollo", slots=3, labels={"node_rank": "1"}),
    "spare": AgentJoined(node="spare", slots=3, labels=SPARE),
}


@pytest.mark.parametrize("order", list(itertools.permutations(NODES)))
def test_ranks_follow_the_users_order_whoever_joins_first(order: tuple[str, ...]) -> None:
    job = Job(JobMachine(JobConfig(world_size=4, spares=3, nodes=2, ranks_per_node=2)))
    for name in order:
        job.tell(NODES[name])
    places = {one.worker: (one.node, one.slot) for one in of(StartWorker, job.past)}
    for worker in places:
        job.tell(WorkerParked(worker=worker, readiness="warm"))
    job.let_time_pass(1.0)
    assert len(of(Announce, job.past)) == 1
    ranks = [places[worker] for worker in job.generation.ranks]
    assert ranks == [("zeus", 0), ("zeus", 1), ("apollo", 0), ("apollo", 1)]


def test_a_spare_node_does_not_count_as_one_of_the_jobs_nodes() -> None:
    job = Job(JobMachine(JobConfig(world_size=2, spares=1, nodes=2, ranks_per_node=1)))
    job.tell(NODES["zeus"])
    job.tell(NODES["spare"])
    assert not of(StartWorker, job.past)
    job.tell(NODES["apollo"])
    assert {one.node for one in of(StartWorker, job.past)} >= {"zeus", "apollo"}

"""What `status` shows beside the ranks: nodes, spares, protection, records; whoever drew the picture."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from keepstep.cli import live
from keepstep.cli.status import _picture
from keepstep.controller.incidents import IncidentBook
from keepstep.controller.view import live_status
from keepstep.core.actions import StartWorker
from keepstep.core.events import AgentJoined, WorkerParked
from keepstep.core.job import JobConfig, JobMachine
from tests.unit.core.jobs import Job, of


def status(nodes: int = 2, **changes: Any) -> dict[str, Any]:
    """The picture that the shipped machine gives of a job that has just started."""
    job = Job(JobMachine(JobConfig(world_size=2, spares=1, job="j", nodes=nodes, ranks_per_node=2 // nodes)))
    for number in range(nodes):
        job.tell(
            AgentJoined(node=f"n{number}", slots=2, labels={"rack": f"r{number}", "node_rank": str(number)})
        )
    for action in of(StartWorker, list(job.past)):
        job.tell(WorkerParked(worker=action.worker, readiness="warm"))
    for spare in job.machine.snapshot()["spares"]:
        job.tell(WorkerParked(worker=spare["worker"], readiness="hot"))
    machine = job.machine
    return {**live_status({**machine.snapshot(), **changes}, IncidentBook(), mode="run", started_s=0.0)}


def drawn(value: dict[str, Any]) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(_picture(value))
    return console.export_text()


def test_nodes_are_listed_with_labels_ranks_and_spares() -> None:
    shown = status()
    assert [node["node"] for node in shown["nodes"]] == ["n0", "n1"]
    assert sorted(rank for node in shown["nodes"] for rank in node["ranks"]) == [0, 1]
    assert sum(node["spares"] for node in shown["nodes"]) == shown["spares"]["hot"] == 1
    text = drawn(shown)
    assert "rack=r1" in text and "spares: 1 hot" in text and "protection on" in text


def test_one_healthy_node_takes_no_table() -> None:
    assert live.node_table(status(nodes=1)) is None


def test_an_older_machine_without_nodes_is_still_shown() -> None:
    machine = JobMachine(JobConfig(world_size=1, job="j"))
    old = {name: value for name, value in machine.snapshot().items() if name != "nodes"}
    shown = live_status(old, IncidentBook(), mode="run", started_s=0.0)
    assert shown["nodes"] == [] and "spares: none" in drawn(shown)


def test_protection_off_and_records_held_nowhere_else_are_said() -> None:
    shield = {"on": False, "reason": "a self-check failed", "ranks": [1]}
    text = drawn(status(protection=shield, unkept_ranks=[0, 1]))
    assert "protection off for rank 1: a self-check failed" in text and "protection on" not in text
    assert "records not held elsewhere: ranks 0-1" in text
    assert "nothing is done" in drawn({**status(), "mode": "observe"})


def test_a_large_world_lists_only_what_differs() -> None:
    shown = status()
    row = shown["workers"][0]
    shown["workers"] = [{**row, "rank": n, "worker": n, "state": "playing", "step": 50} for n in range(2000)]
    shown["workers"][7]["step"] = 3
    shown["workers"][9]["state"] = "dead"
    text = drawn(shown)
    assert "2000 workers" in text and len(text.splitlines()) < 30


def test_the_blame_stands_under_the_newest_incident() -> None:
    incident = {
        "number": 3,
        "state": "closed",
        "reason": "r",
        "blame": {"kind": "outsider", "text": "rank 2 stood outside"},
    }
    assert "rank 2 stood outside" in live.incident_line(incident)
    assert "nobody" not in live.incident_line({**incident, "blame": {"kind": "nobody", "text": "nobody"}})

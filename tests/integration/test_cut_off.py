"""Nodes whose network is cut, in real namespaces: the job goes on elsewhere, and who was cut off never counts again.

Nothing is refused and nobody is told: what is sent is lost, as behind a switch that died.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import DDP, HOT, reference
from tests.integration.nodes import Cluster, Node, assert_ended_well, cluster, network, permit

TRAINED = (*DDP, *HOT, "--step-s", "0.02")
EVERY_STEP = {"KEEPSTEP_FINGERPRINT": "steps"}

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def commits(node: Node) -> dict[tuple[int, int], Any]:
    """What was committed on a node: (rank, step) -> digests of the state after it."""
    found = {}
    for path in (node.run_dir / "reports").glob("rank-*.jsonl"):
        for text in path.read_text().splitlines():
            line = json.loads(text)
            if line.get("fingerprint"):
                found[int(path.stem.removeprefix("rank-")), line["step"]] = line["tensors"]
    return found


def assert_nothing_committed_after(job: Cluster, cut_off: Node) -> None:
    """Its workers went no further than the step that was under way, and had in it what their heirs have."""
    resumed_at = min(line.step for lines in job.reports().lines.values() for line in lines if line.generation)
    theirs = commits(cut_off)
    heirs = {
        at: value for node in job.nodes.values() if node is not cut_off for at, value in commits(node).items()
    }
    assert theirs and max(step for _, step in theirs) <= resumed_at
    for at in theirs.keys() & heirs.keys():
        assert theirs[at] == heirs[at], f"rank and step {at}"
    ours = {worker for worker, place in places(job).items() if place == cut_off.name}
    lines = [line for lines in job.reports().lines.values() for line in lines if line.worker in ours]
    assert {line.generation for line in lines} == {0}


def places(job: Cluster) -> dict[int, str]:
    """Worker -> its node, of all that were ever started."""
    return {note["worker"]: note["node"] for note in job.ledger("note") if note["about"] == "worker"}


def await_recovery(job: Cluster, incidents: int = 1) -> None:
    job.wait_until(lambda: len(job.ledger("incident_closed")) == incidents, 60, "the recovery", poll_s=0.1)


@pytest.mark.parametrize(("victim", "way"), [("node0", "drop_from"), ("node1", "drop_to")])
def test_a_node_that_is_cut_one_way_is_replaced(
    references: Path, tmp_path: Path, victim: str, way: str
) -> None:
    """node0 plays rank 0 and holds the store of the generation."""
    undisturbed = reference(references, TRAINED, 4)
    with (
        network() as wires,
        cluster(tmp_path, TRAINED, spares=2, permitted=6, network=wires, environment=EVERY_STEP) as job,
    ):
        job.wait_for_spares(["hot", "hot"])
        permit(tmp_path, 1000)
        job.wait_for_step(10)
        getattr(wires, way)(victim)
        assert_ended_well(job, undisturbed)
        node = job.nodes[victim]
        assert_nothing_committed_after(job, node)
        if way == "drop_from":  # they hear that they are replaced
            job.wait_until(lambda: not node.workers(), 10, "the end of its workers")
        reason = job.ledger("incident_closed")[0]["reason"]
    assert f"is lost with node {victim} (it was silent for" in reason and "cannot reach it either" in reason


def test_a_node_is_cut_off_for_three_seconds_and_may_only_come_back_with_new_workers(
    references: Path, tmp_path: Path
) -> None:
    undisturbed = reference(references, TRAINED, 4)
    with (
        network() as wires,
        cluster(tmp_path, TRAINED, spares=2, permitted=6, network=wires, environment=EVERY_STEP) as job,
    ):
        job.wait_for_spares(["hot", "hot"])
        node = job.nodes["node1"]
        old = node.workers()
        permit(tmp_path, 40)
        job.wait_for_step(10)
        wires.cut("node1")
        cut_s = time.monotonic()
        await_recovery(job)
        assert_nothing_committed_after(job, node)
        assert [node.workers()[number].pid for number in old] == [one.pid for one in old.values()], (
            "nobody told them"
        )

        job.wait_until(lambda: time.monotonic() > cut_s + 3.0, 10, "the network")
        wires.heal("node1")
        job.wait_until(
            lambda: not set(old) & set(node.workers()), 30, "the end of the old workers", poll_s=0.1
        )
        job.wait_for_spares(["hot", "hot"])
        assert sorted(places(job)[number] for number in node.workers()) == ["node1", "node1"]
        assert "node node1 is heard again; it was given up while it was silent" in job.controller.said

        job.wait_for_step(35)
        job.nodes["spare0"].kill()  # as whose heirs the node counts again
        permit(tmp_path, 1000)
        assert_ended_well(job, undisturbed, incidents=2)
        maps = [set(generation["ranks"]) for generation in job.ledger("generation")]
    assert set(old) <= maps[0] and not any(set(old) & later for later in maps[1:])


def test_a_node_that_stays_cut_off_ends_its_workers_and_is_welcome_when_it_comes_back(
    references: Path, tmp_path: Path
) -> None:
    """The node of rank 0 and the store; it is alone for longer than the time that it may be alone."""
    undisturbed = reference(references, TRAINED, 4)
    with (
        network() as wires,
        cluster(
            tmp_path,
            TRAINED,
            spares=2,
            permitted=6,
            network=wires,
            environment=EVERY_STEP,
            agent_options=("--isolation-timeout", "5"),
        ) as job,
    ):
        job.wait_for_spares(["hot", "hot"])
        node = job.nodes["node0"]
        assert set(node.workers()) == {0, 1} and node.agent is not None
        permit(tmp_path, 40)
        job.wait_for_step(10)
        wires.cut("node0")
        await_recovery(job)
        assert node.agent.process.wait(60) == 75, node.agent.said
        assert "the controller was gone for 5 s" in node.agent.said
        assert not node.workers()
        assert_nothing_committed_after(job, node)

        wires.heal("node0")
        node.start()
        job.wait_for_spares(["hot", "hot"])
        assert not {0, 1} & set(node.workers())
        job.wait_for_step(35)
        job.nodes["node1"].kill()
        permit(tmp_path, 1000)
        assert_ended_well(job, undisturbed, incidents=2)
        assert {places(job)[number] for number in job.ledger("generation")[-1]["ranks"]} == {
            "node0",
            "spare0",
        }

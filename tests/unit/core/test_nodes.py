"""Whole nodes: given up by two independent signs and never by one, and replaced where failures share no cause."""

from __future__ import annotations

import time
from collections import Counter

from keepstep.core import placement
from keepstep.core.actions import Announce, DropAgent, KillWorker, Persist, Probe, StartWorker
from keepstep.core.events import (
    AgentDisconnected,
    AgentHeard,
    AgentJoined,
    AgentLost,
    AgentSilent,
    Complained,
    FingerprintTaken,
    NodeProgressed,
    ProbeAnswered,
    Progressed,
    Ticked,
    WorkerParked,
)
from keepstep.core.job import JobConfig, JobMachine
from keepstep.core.node_facts import natural
from tests.unit.core.jobs import Job, of

RACKS = {"a": "r1", "b": "r2", "c": "r1", "d": "r2"}


def cluster(
    nodes: dict[str, int],
    *,
    world_size: int,
    racks: dict[str, str] | None = None,
    shards: str = "",
    **config: object,
) -> Job:
    """Nodes with their slots, all joined; as many workers as there are slots; setup is over."""
    spares = sum(nodes.values()) - world_size
    job = Job(JobMachine(JobConfig(world_size=world_size, spares=spares, nodes=len(nodes), **config)))  # type: ignore[arg-type]
    for name, slots in nodes.items():
        labels = {"rack": racks[name]} if racks else {}
        job.tell(AgentJoined(node=name, slots=slots, labels=labels, peer=f"{name}:7"))
    for order in of(StartWorker, job.past):
        job.tell(WorkerParked(worker=order.worker, readiness="warm"))
    job.tell(Progressed(worker=job.generation.ranks[0], generation=0, step=5, published=5))
    for rank, shard in enumerate(shards):
        worker = job.generation.ranks[rank]
        job.tell(FingerprintTaken(worker=worker, rank=rank, step=2, shard=shard, digest="d"))
    for spare in job.machine.state.spares():
        job.tell(WorkerParked(worker=spare.number, readiness="hot"))
    return job


def two_and_a_spare_node(**config: object) -> Job:
    return cluster({"a": 2, "b": 2, "c": 2}, world_size=4, shards="xxxx", **config)


def place(job: Job, rank: int) -> str:
    return job.machine.state.node_of_rank(rank)


def answer(job: Job, outcome: str) -> None:
    for probe in of(Probe, job.past):
        job.tell(ProbeAnswered(node=probe.node, by=probe.by, outcome=outcome))


def complain(job: Job, rank: int, generation: int = 0) -> None:
    job.tell(Complained(worker=job.generation.ranks[rank], generation=generation, reason="connection reset"))


# ---- lost, and not lost -----------------------------------------------------------------------------


def test_a_node_whose_agent_and_connections_break_together_is_lost_in_half_a_second() -> None:
    job = two_and_a_spare_node()
    job.tell(AgentDisconnected(node="b", reason="reset"))
    complain(job, 0)
    job.let_time_pass(0.5)
    assert job.generation.number == 1
    assert [place(job, rank) for rank in range(4)] == ["a", "a", "c", "c"]
    (incident,) = job.persisted("incident")
    assert incident["cause"] == "node" and len(job.machine.state.incident.victims) == 2
    assert "node b is lost: its agent's connection broke, and rank 0: worker" in job.said()


def test_an_agent_that_is_restarted_costs_nothing() -> None:
    job = two_and_a_spare_node()
    workers = tuple(w.number for w in job.machine.state.members.of_node("b"))
    job.tell(AgentDisconnected(node="b", reason="reset"))
    answer(job, "refused")
    job.let_time_pass(20.0)
    job.tell(AgentJoined(node="b", slots=2, workers=workers, peer="b:8"))
    job.let_time_pass(100.0)
    assert job.generation.number == 0 and not job.persisted("incident")
    assert of(Announce, job.past)[-1].peers["b"] == "b:8"


def test_an_agent_that_never_comes_back_takes_its_node_along() -> None:
    job = two_and_a_spare_node(agent_wait_s=30.0)
    job.tell(AgentDisconnected(node="b", reason="reset"))
    answer(job, "refused")
    job.let_time_pass(29.9)
    assert job.generation.number == 0
    job.let_time_pass(0.2)
    assert job.generation.number == 1 and "did not come back within 30 s" in job.said()


def test_a_silent_node_that_nobody_reaches_is_lost() -> None:
    job = two_and_a_spare_node()
    job.tell(AgentSilent(node="b", silent_s=1.0))
    probes = of(Probe, job.last)
    assert {(probe.by, probe.node, probe.peer) for probe in probes} == {("a", "b", "b:7"), ("c", "b", "b:7")}
    answer(job, "silent")
    job.let_time_pass(0.1)
    assert job.generation.number == 1 and "a, c cannot reach it either" in job.said()


def test_a_silent_node_that_one_node_reaches_is_only_busy() -> None:
    job = two_and_a_spare_node()
    for silent_s in range(1, 30):
        job.tell(AgentSilent(node="b", silent_s=float(silent_s)))
        job.tell(ProbeAnswered(node="b", by="a", outcome="silent"))
        job.tell(ProbeAnswered(node="b", by="c", outcome="reached"))
        job.let_time_pass(1.0)
    job.tell(AgentHeard(node="b"))
    assert job.generation.number == 0 and not job.persisted("incident")
    assert not job.machine.state.suspected


def test_probes_that_nobody_answers_prove_nothing() -> None:
    job = two_and_a_spare_node()
    job.tell(AgentSilent(node="b", silent_s=1.0))
    job.let_time_pass(60.0)
    assert job.generation.number == 0


def test_a_silent_node_whose_ranks_train_on_is_not_lost() -> None:
    job = two_and_a_spare_node()
    job.tell(AgentSilent(node="b", silent_s=1.0))
    worker = job.generation.ranks[0]
    job.tell(NodeProgressed(node="a", generation=0, published=9, steps={worker: 10}))
    answer(job, "silent")
    job.let_time_pass(5.0)
    assert job.generation.number == 0


def test_a_complaint_waits_for_the_case_of_a_suspect_node_but_not_for_long() -> None:
    job = two_and_a_spare_node(suspect_hold_s=0.8)
    job.tell(AgentSilent(node="b", silent_s=1.0))
    complain(job, 0)
    job.let_time_pass(0.4)
    assert job.generation.number == 0
    answer(job, "refused")
    job.let_time_pass(0.1)
    assert job.generation.number == 1 and job.generation.ranks == (0, 1, 2, 3)  # same map: nobody died


def test_workers_of_a_lost_node_that_comes_back_are_ended_and_never_play_again() -> None:
    job = two_and_a_spare_node()
    old = tuple(w.number for w in job.machine.state.members.of_node("b"))
    job.tell(AgentSilent(node="b", silent_s=1.0))
    answer(job, "silent")
    job.let_time_pass(0.1)
    job.tell(AgentJoined(node="b", slots=2, workers=old, peer="b:7"))
    assert {kill.worker for kill in of(KillWorker, job.last)} >= set(old)
    for worker in old:
        job.die(worker)
    job.resume_all(8)
    job.let_time_pass(10.0)
    fresh = [order for order in of(StartWorker, job.past) if order.node == "b" and order.worker not in old]
    assert fresh and not set(old) & set(job.generation.members)


def test_a_node_that_is_heard_after_it_was_given_up_has_to_join_anew() -> None:
    job = two_and_a_spare_node()
    job.tell(AgentSilent(node="b", silent_s=1.0))
    answer(job, "silent")
    job.let_time_pass(0.1)
    job.tell(AgentHeard(node="b"))
    assert [drop.node for drop in of(DropAgent, job.last)] == ["b"]
    job.tell(AgentHeard(node="a"))
    assert not of(DropAgent, job.last)


def test_a_node_that_joins_late_gets_the_spares_that_are_missing() -> None:
    job = two_and_a_spare_node()
    job.tell(AgentLost(node="b", reason="gone"))
    job.let_time_pass(0.1)
    job.resume_all(8)
    job.let_time_pass(60.0)  # no slot is free
    told = of(Announce, job.tell(AgentJoined(node="d", slots=3, peer="d:7")))
    assert told[-1].peers["d"] == "d:7" and told[-1].peers["a"] == "a:7", (
        "a spare there asks others for its rank's past"
    )
    job.let_time_pass(10.0)
    assert [order.node for order in of(StartWorker, job.past)].count("d") == 2


def test_a_controller_that_stood_still_gives_nobody_up_for_it() -> None:
    job = two_and_a_spare_node()
    job.tell(AgentDisconnected(node="b", reason="reset"))
    answer(job, "reached")
    job.tell(Ticked(), after_s=60.0)
    workers = tuple(w.number for w in job.machine.state.members.of_node("b"))
    job.tell(AgentJoined(node="b", slots=2, workers=workers, peer="b:7"))
    job.let_time_pass(5.0)
    assert job.generation.number == 0 and not job.persisted("incident")


def test_a_node_that_trains_on_without_its_agent_is_not_given_up() -> None:
    job = two_and_a_spare_node(agent_wait_s=30.0)
    job.tell(AgentDisconnected(node="b", reason="reset"))
    for step in range(10, 60):
        answer(job, "refused")
        worker = job.generation.ranks[0]
        job.tell(NodeProgressed(node="a", generation=0, published=step, steps={worker: step}))
        job.let_time_pass(1.0)
    assert job.generation.number == 0


def test_a_machine_that_is_cut_after_its_agent_died_is_noticed() -> None:
    job = two_and_a_spare_node()
    job.tell(AgentDisconnected(node="b", reason="reset"))
    answer(job, "refused")
    job.let_time_pass(3.0)
    asked = len(of(Probe, job.past))
    assert asked >= 6  # two nodes are asked every second
    answer(job, "silent")
    job.let_time_pass(0.5)
    assert job.generation.number == 1


def test_the_only_living_state_is_never_given_up_for_silence() -> None:
    job = cluster({"a": 2, "c": 2}, world_size=2, shards="xy")
    job.tell(AgentSilent(node="a", silent_s=1.0))
    answer(job, "silent")
    job.let_time_pass(20.0)
    assert job.generation.number == 0


def test_a_worker_that_comes_back_before_its_heir_goes_on() -> None:
    job = cluster({"a": 1, "b": 2}, world_size=3, shards="xyz", max_restarts=0)
    old = tuple(w.number for w in job.machine.state.members.of_node("b"))
    job.tell(AgentLost(node="b", reason="gone"))
    job.let_time_pass(1.0)
    job.tell(AgentJoined(node="b", slots=2, workers=old, peer="b:7"))
    job.let_time_pass(1.0)
    assert not {kill.worker for kill in of(KillWorker, job.past)} & set(old)
    assert job.generation.number == 1 and set(old) <= set(job.generation.ranks)


def test_observe_mode_only_says_that_a_node_would_be_given_up() -> None:
    job = two_and_a_spare_node(observe=True)
    job.tell(AgentSilent(node="b", silent_s=1.0))
    answer(job, "silent")
    job.let_time_pass(2.0)
    assert "would give up node b" in job.said() and job.machine.state.over is None
    assert sum(note.get("about") == "would" for note in job.persisted("note")) == 1


def test_spares_on_a_silent_node_are_not_chosen() -> None:
    job = cluster({"a": 1, "b": 1, "c": 1, "d": 1}, world_size=2, shards="xx")
    job.tell(AgentSilent(node="c", silent_s=1.0))
    job.die(job.generation.ranks[0])
    job.let_time_pass(0.1)
    assert place(job, 0) == "d"


def test_keepers_of_two_thousand_nodes_are_chosen_in_a_moment() -> None:
    nodes = {f"node{number}": 1 for number in range(2048)}
    racks = {name: f"rack{number // 16}" for number, name in enumerate(nodes)}
    job = cluster(nodes, world_size=2040, racks=racks)
    began_s = time.process_time()
    found = placement.keepers(job.machine.state)
    assert time.process_time() - began_s < 1.0
    loads = Counter(found.values())
    assert len(found) == 2040 and max(loads.values()) <= 3
    assert all(racks[node] != racks[keeper] for node, keeper in found.items())


# ---- who goes where -----------------------------------------------------------------------------------


def test_ranks_follow_the_names_of_nodes_and_spare_nodes_come_last() -> None:
    job = Job(JobMachine(JobConfig(world_size=2, spares=1, nodes=2)))
    job.tell(AgentJoined(node="node10", slots=1, peer="x:1"))
    job.tell(AgentJoined(node="node1", slots=1, labels={"keepstep": "spare"}, peer="x:2"))
    assert not of(StartWorker, job.past)
    assert "1 of 2 nodes to join" in job.machine.snapshot()["waiting"]["for"]
    job.tell(AgentJoined(node="node9", slots=1, peer="x:3"))
    for order in of(StartWorker, job.past):
        job.tell(WorkerParked(worker=order.worker, readiness="warm"))
    assert [place(job, rank) for rank in range(2)] == ["node9", "node10"]
    assert natural("node9") < natural("node10")


def test_a_spare_in_another_rack_comes_first_when_a_node_is_lost() -> None:
    job = cluster({"a": 1, "b": 1, "c": 1, "d": 1}, world_size=2, racks=RACKS, shards="xx")
    job.tell(AgentDisconnected(node="a", reason="reset"))
    complain(job, 1)
    job.let_time_pass(0.5)
    assert place(job, 0) == "d"  # c shares the rack of a, the node that was lost


def test_twins_on_one_node_are_told() -> None:
    job = cluster({"a": 1, "b": 2}, world_size=2, shards="xx")
    job.die(job.generation.ranks[0])
    job.let_time_pass(0.1)
    assert "hold the same state and all live on b" in job.said()


def test_records_are_kept_in_another_rack_and_evenly() -> None:
    job = cluster({"a": 1, "b": 1, "c": 1, "d": 1}, world_size=4, racks=RACKS)
    announce = of(Announce, job.past)[-1]
    assert all(RACKS[node] != RACKS[keeper] for node, keeper in announce.keepers.items())
    assert sorted(announce.keepers.values()) == ["a", "b", "c", "d"]
    assert announce.peers == {name: f"{name}:7" for name in "abcd"}


def test_the_store_is_never_on_a_node_that_is_not_connected() -> None:
    job = two_and_a_spare_node()
    assert job.generation.store == "a"
    job.tell(AgentDisconnected(node="a", reason="reset"))
    answer(job, "refused")
    job.die(job.generation.ranks[2])
    job.let_time_pass(0.1)
    assert job.generation.number == 1 and job.generation.store != "a"


def test_a_recovery_does_not_wait_for_ranks_whose_agent_is_gone() -> None:
    job = two_and_a_spare_node(node_stalled_s=3.0)
    job.die(job.generation.ranks[0])
    job.let_time_pass(0.1)
    assert job.generation.number == 1
    job.tell(AgentDisconnected(node="b", reason="reset"))
    answer(job, "refused")
    job.let_time_pass(4.0)
    assert (
        job.generation.number == 1
    )  # one spare is left, and two ranks live there: their agent is waited for
    job = cluster({"a": 2, "b": 1, "c": 2}, world_size=3, shards="xxx")
    job.die(job.generation.ranks[0])
    job.let_time_pass(0.1)
    job.tell(AgentDisconnected(node="b", reason="reset"))
    job.let_time_pass(4.0)
    assert job.generation.number == 2 and place(job, 2) == "c"


def test_a_whole_node_moves_together() -> None:
    job = two_and_a_spare_node(replace_unit="node")
    victim, comrade = job.generation.ranks[2:]
    job.die(victim)
    job.let_time_pass(0.1)
    assert [place(job, rank) for rank in range(4)] == ["a", "a", "c", "c"]
    kinds = [type(action) for action in job.last]
    assert KillWorker in kinds and kinds.index(Announce) < kinds.index(KillWorker)
    assert comrade in {kill.worker for kill in of(KillWorker, job.past)}
    assert "moves with its node" in job.said()


def test_a_node_does_not_move_whole_when_a_copy_would_be_lost_with_it() -> None:
    job = cluster({"a": 2, "b": 2, "c": 2}, world_size=4, shards="xxxy", replace_unit="node")
    job.die(job.generation.ranks[2])
    job.let_time_pass(0.1)
    assert place(job, 3) == "b" and "hold the state of ranks 3" in job.said()


def test_a_node_does_not_move_whole_when_spares_are_too_few() -> None:
    job = cluster({"a": 2, "b": 2, "c": 1}, world_size=4, shards="xxxx", replace_unit="node")
    job.die(job.generation.ranks[2])
    job.let_time_pass(0.1)
    assert place(job, 3) == "b" and "takes 2 spares, 1 are there" in job.said()


def test_a_later_controller_knows_the_nodes() -> None:
    job = two_and_a_spare_node()
    entries = [action for action in job.past if isinstance(action, Persist)]
    later = JobMachine.resume(job.machine.config, entries)
    assert {node["node"] for node in later.snapshot()["nodes"]} == {"a", "b", "c"}

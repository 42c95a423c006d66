"""The policy over health signals: what each signal does to a job, and that nothing is done too often."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.actions import Announce, KillWorker, Lend, Persist, Prepare, StartWorker
from keepstep.core.events import AgentJoined, Progressed, WorkerParked
from keepstep.core.health_events import SignalSeen
from keepstep.core.job import JobConfig, JobMachine
from keepstep.core.move_events import LendReady, MoveReady, UndrainRequested
from keepstep.core.policy import HOUR_S, PolicyBook, Whereabouts
from keepstep.core.policy_rules import DEFAULT_RULES, Act, Policy, Rule
from tests.unit.core.jobs import Job, of


def cluster(nodes: int = 3, ranks: int = 2, spares: int = 2, slots: int = 2, **config) -> Job:
    """Ranks 0 and 1 on n0, spares on n1, and so on; training."""
    job = Job(JobMachine(JobConfig(world_size=ranks, spares=spares, nodes=nodes, **config)))
    for index in range(nodes):
        job.tell(AgentJoined(node=f"n{index}", slots=slots, peer=f"n{index}:1"))
    for worker in range(ranks + spares):
        job.tell(WorkerParked(worker=worker, readiness="warm"))
    for spare in range(ranks, ranks + spares):
        job.tell(WorkerParked(worker=spare, readiness="hot"))
    assert of(Announce, job.past)
    job.tell(Progressed(worker=0, generation=0, step=5, published=5))
    return job


def xid(code: int, node: str = "n0", slot: int | None = 0, **more) -> SignalSeen:
    return SignalSeen(
        node=node, source="kernel", kind="xid", severity="critical", slot=slot, code=code, **more
    )


def reading(
    source: str, kind: str, value: float, limit: float | None = None, slot: int = 0, node: str = "n0"
):
    return SignalSeen(
        node=node, source=source, kind=kind, severity="warn", slot=slot, value=value, limit=limit
    )


def decisions(job: Job) -> list[dict]:
    return [note for note in job.persisted("note") if note["about"] == "policy"]


def place(job: Job, rank: int) -> tuple[str, int]:
    worker = job.machine.state.members.workers[job.generation.ranks[rank]]
    return worker.node, worker.slot


def finish_move(job: Job) -> None:
    """Source and target answer, all switch."""
    lend = of(Lend, job.past)[-1]
    [told] = of(Prepare, job.tell(LendReady(worker=lend.worker, target=lend.target, address="x:1")))
    job.tell(MoveReady(worker=told.worker, rank=told.rank, bytes=10, seconds=0.1))
    job.resume_all(7)
    job.die(lend.worker, 0)


def test_xid_79_rebuilds_the_rank_elsewhere_and_empties_its_node() -> None:
    job = cluster()
    assert place(job, 0) == ("n0", 0)
    job.tell(xid(79, detail="GPU has fallen off the bus"))
    job.let_time_pass(0.1)
    assert place(job, 0)[0] != "n0"
    assert [kill.worker for kill in of(KillWorker, job.past)] == [0]
    job.die(0)
    job.resume_all(6)
    finish_move(job)
    assert {place(job, rank)[0] for rank in (0, 1)}.isdisjoint({"n0"})
    assert not [start for start in of(StartWorker, job.let_time_pass(100)) if start.node == "n0"]
    [decision] = decisions(job)
    assert (decision["did"], decision["ranks"], decision["rule"]) == ("rebuild", [0, 1], "xid-lost")
    assert "xid 79" in decision["reason"] and "fallen off the bus" in decision["reason"]
    assert [body["cause"] for body in job.persisted("incident_closed")] == ["hardware", "migration"]


def test_xid_13_does_nothing_until_it_comes_again_and_again() -> None:
    job = cluster()
    job.tell(xid(13))
    assert [note["did"] for note in decisions(job)] == ["ignore"]
    for _ in range(4):
        job.tell(xid(13), 60.0)
    assert [note["did"] for note in decisions(job)] == ["ignore", "alert"]
    assert (
        job.generation.number == 0
        and not job.machine.state.moves.by_rank
        and job.machine.state.incident is None
    )


def test_xid_94_rebuilds_the_rank_from_a_replica_and_leaves_its_neighbour_alone() -> None:
    job = cluster()
    job.tell(xid(94, slot=1))
    job.let_time_pass(0.1)
    assert place(job, 0) == ("n0", 0) and place(job, 1)[0] == "n1"
    job.die(1)
    job.resume_all(6)
    job.let_time_pass(100)
    assert ("n0", 1) in job.machine.state.members.quarantined
    assert not [
        start for start in of(StartWorker, job.past) if (start.node, start.slot, start.worker) == ("n0", 1, 4)
    ]
    [closed] = job.persisted("incident_closed")
    assert closed["cause"] == "hardware" and "xid 94" in closed["reason"]


def test_a_rank_without_a_replica_is_not_given_up() -> None:
    job = cluster()
    job.machine.state.shards.update({0: "a", 1: "b"})
    job.tell(xid(94))
    [decision] = decisions(job)
    assert decision["did"] == "alert" and "no live replica" in decision["refused"]
    assert not of(KillWorker, job.past) and not job.machine.state.members.quarantined


def test_a_rank_is_not_given_up_where_it_has_nowhere_to_go() -> None:
    job = cluster(nodes=1, spares=0)
    job.tell(xid(94))
    [decision] = decisions(job)
    assert decision["did"] == "alert" and "neither a spare nor a free slot" in decision["refused"]
    assert not of(KillWorker, job.past) and job.machine.state.incident is None


def test_a_temperature_over_its_limit_for_two_windows_is_one_planned_migration() -> None:
    job = cluster()
    hot = reading("nvml", "temperature", 93.0, 90.0)
    job.tell(hot)
    cool = replace(reading("nvml", "temperature", 80.0, 90.0), severity="info")
    job.tell(cool, 6.0)  # fine again: the count begins anew
    job.tell(hot, 6.0)
    job.tell(hot, 6.0)
    assert not decisions(job)
    job.tell(hot, 6.0)
    for _ in range(5):
        job.tell(hot, 6.0)
    finish_move(job)
    for _ in range(5):
        job.tell(hot, 6.0)  # whoever may be hot there: nobody is
    [decision] = decisions(job)
    assert (decision["did"], decision["ranks"]) == ("migrate", [0])
    assert "temperature 93 (limit 90)" in decision["reason"]
    assert [body["cause"] for body in job.persisted("incident_closed")] == ["migration"]
    job.let_time_pass(100)
    assert ("n0", 0) not in job.machine.state.free_slots()
    job.tell(UndrainRequested(node="n0"))
    assert ("n0", 0) not in job.machine.state.members.quarantined


def test_one_slow_rank_is_moved_once() -> None:
    job = cluster()
    for _ in range(4):
        job.tell(reading("straggler", "slow_rank", 1.15), 6.0)
    finish_move(job)
    assert [(note["did"], note["ranks"]) for note in decisions(job)] == [("migrate", [0])]


def test_a_rank_that_is_slow_because_of_its_data_is_moved_once_at_most() -> None:
    job = cluster(nodes=4, spares=4)
    for _ in range(4):
        job.tell(reading("straggler", "slow_rank", 1.15), 6.0)
    finish_move(job)
    for _ in range(400):  # more than an hour
        node, slot = place(job, 0)
        job.tell(reading("straggler", "slow_rank", 1.15, slot=slot, node=node), 15.0)
    first, *others = decisions(job)
    assert first["did"] == "migrate" and others
    assert {(note["did"], note["uncured"]) for note in others} == {("alert", 0)}
    assert "follows the rank's data" in job.said() and job.generation.number == 1
    assert ("n0", 0) not in job.machine.state.members.quarantined, "the machine was not to blame"


def test_signals_before_the_end_of_setup_are_judged_then() -> None:
    job = Job(JobMachine(JobConfig(world_size=1, spares=1)))
    job.tell(AgentJoined(node="n0", slots=2))
    job.tell(xid(92))
    for worker in (0, 1):
        job.tell(WorkerParked(worker=worker, readiness="warm"))
    assert not decisions(job)
    job.tell(Progressed(worker=0, generation=0, step=5, published=5))
    assert [note["did"] for note in decisions(job)] == ["migrate"]


@pytest.mark.parametrize("how", [{"policy": Policy(dry_run=True)}, {"observe": True}])
def test_a_dry_run_writes_what_it_would_do_and_does_nothing(how: dict) -> None:
    job = cluster(**how)
    for signal in (xid(79), xid(94, slot=1), xid(92)):
        job.tell(signal)
    job.let_time_pass(10)
    assert [(note["did"], note["dry_run"]) for note in decisions(job)][:2] == [("rebuild", True)] * 2
    assert "would rebuild" in job.said() and "would migrate" in job.said()
    state = job.machine.state
    assert not state.moves.by_rank and not state.moves.draining and not state.members.quarantined
    assert job.generation.number == 0 and not of(KillWorker, job.past)


def test_the_budget_of_spares_and_the_moves_of_a_rank_are_bounds() -> None:
    rule = Rule(name="hot", kind="temperature", action=Act.MIGRATE, cooldown_s=0.0)
    book = PolicyBook(Policy(rules=(rule,), spares_per_hour=3, moves_per_rank_per_hour=2))
    did = []
    for at_s, rank in ((0, 0), (10, 0), (20, 0), (30, 1), (40, 2), (HOUR_S + 1, 0), (HOUR_S + 2, 2)):
        where = Whereabouts(ranks=(rank,), node_ranks=(rank,))
        decision = book.judge(reading("nvml", "temperature", 1.0), where, float(at_s))
        assert decision is not None
        did.append((decision.did.value, decision.refused[:6]))
    yes = ("migrate", "")
    assert did == [yes, yes, ("alert", "rank 0"), yes, ("alert", "3 of 3"), yes, ("alert", "3 of 3")]


def test_a_rule_is_silent_during_its_cooldown() -> None:
    job = cluster()
    for _ in range(5):
        job.tell(SignalSeen(node="n0", source="report", kind="my-check", severity="warn", detail="odd"))
    assert [note["did"] for note in decisions(job)] == ["alert"]
    job.tell(SignalSeen(node="n0", source="report", kind="my-check", severity="warn"), 601.0)
    assert len(decisions(job)) == 2


def test_a_restarted_controller_remembers_what_was_decided() -> None:
    job = cluster(nodes=4, spares=4)
    for _ in range(4):
        job.tell(reading("straggler", "slow_rank", 1.15), 6.0)
    job.tell(xid(94, slot=1))
    entries = [action for action in job.past if isinstance(action, Persist)]
    machine = JobMachine.resume(job.machine.config, entries)
    assert machine.state.members.quarantined == {("n0", 0), ("n0", 1)} == machine.state.policy_barred
    machine.state.policy.recall(1.0)  # its clock has begun anew
    assert [rank for _, rank in machine.state.policy.spent] == [0, 1]
    rule = next(rule for rule in DEFAULT_RULES if rule.name == "slow-rank")
    assert machine.state.policy.quiet_until_s[(rule.name, 0)] == pytest.approx(1.0 + rule.cooldown_s)


SIGNALS = st.one_of(
    st.builds(
        xid,
        code=st.sampled_from((13, 63, 74, 79, 92, 94, 154)),
        node=st.sampled_from(("n0", "n1", "n2")),
        slot=st.sampled_from((None, 0, 1)),
    ),
    st.builds(
        reading,
        source=st.sampled_from(("nvml", "straggler", "host")),
        kind=st.sampled_from(("temperature", "slow_rank", "row_remap_failed")),
        value=st.sampled_from((0.5, 1.2, 95.0)),
        limit=st.sampled_from((None, 90.0)),
        slot=st.sampled_from((0, 1)),
        node=st.sampled_from(("n0", "n1", "n2")),
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    story=st.lists(st.tuples(SIGNALS, st.sampled_from((0.1, 11.0, 700.0))), max_size=60),
    budget=st.integers(0, 6),
    per_rank=st.integers(0, 3),
)
def test_no_rank_is_moved_more_often_than_the_policy_allows(
    story: list[tuple[SignalSeen, float]], budget: int, per_rank: int
) -> None:
    """Each move is made at once, to wherever nobody plays: the worst that a job could do."""
    eager = tuple(replace(rule, cooldown_s=min(rule.cooldown_s, 20.0)) for rule in DEFAULT_RULES)
    book = PolicyBook(Policy(rules=eager, spares_per_hour=budget, moves_per_rank_per_hour=per_rank))
    places = {0: ("n0", 0), 1: ("n0", 1), 2: ("n1", 0)}
    free = [("n1", 1), ("n2", 0), ("n2", 1)]
    moves: list[tuple[float, int]] = []
    now_s = 0.0
    for signal, after_s in story:
        now_s += after_s
        on_node = tuple(rank for rank, (node, _) in places.items() if node == signal.node)
        here = tuple(rank for rank in on_node if signal.slot in (None, places[rank][1]))
        decision = book.judge(signal, Whereabouts(ranks=here, node_ranks=on_node), now_s)
        if decision is None or decision.refused:
            continue
        assert decision.reason
        for rank in decision.ranks:
            free.append(places[rank])
            places[rank] = free.pop(0)
            moves.append((now_s, rank))
    for at_s, _ in moves:
        hour = [rank for when, rank in moves if at_s - HOUR_S < when <= at_s]
        assert len(hour) <= budget
        assert all(hour.count(rank) <= per_rank for rank in hour)

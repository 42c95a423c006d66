"""What a node's workers say at one moment is told as one event, and means the same."""

from __future__ import annotations

from keepstep.core.events import NodeResumed, NodeVerdict, Resumed, VerdictReached
from keepstep.core.membership import Membership, Standing
from keepstep.core.together import alike, each_verdict, joined
from keepstep.core.types import Lineage, Vote
from keepstep.core.verdict import verdict
from keepstep.wire.codec import decode, encode
from tests.unit.core.jobs import training


def reached(worker: int, course: str = "keep") -> VerdictReached:
    return VerdictReached(
        worker=worker,
        generation=1,
        target=9,
        course=course,
        reason="r",
        connect_s=0.1 * worker,
        vote_s=0.2,
        recomputed=1,
        bit_exact=False,
    )


def test_verdicts_told_together_are_the_same_verdicts() -> None:
    events = [reached(3), reached(5)]
    together = joined("a", events)
    assert isinstance(together, NodeVerdict)
    assert each_verdict(decode(encode(together))) == events


def test_only_events_that_differ_in_nothing_but_their_worker_are_alike() -> None:
    assert alike(reached(3)) == alike(reached(4)) != alike(reached(3, "receive"))
    assert alike(Resumed(worker=1, generation=1, step=3)) == alike(Resumed(worker=2, generation=1, step=4))
    assert alike(Resumed(worker=1, generation=1, step=3)) != alike(Resumed(worker=2, generation=2, step=3))
    assert joined("a", [reached(3)]) == reached(3)


def test_of_a_thousand_ranks_the_verdict_names_the_runs() -> None:
    lineage = Lineage(digest="x", step=4)
    votes = [
        Vote(
            worker=rank,
            rank=rank,
            shard="a",
            held_shard="a" if rank != 500 else None,
            step=4 if rank != 500 else None,
            lineage=lineage if rank != 500 else None,
        )
        for rank in range(1000)
    ]
    reason = verdict(votes).reason
    assert "ranks 0-499, 501-999 start step 4 again" in reason
    assert "rank 500 receive state" in reason


def test_the_return_of_a_node_closes_an_incident_as_the_return_of_each_member_does() -> None:
    job = training()
    job.die(1)
    job.let_time_pass(0.1)
    number = job.generation.number
    job.tell(joined("here", [reached(worker) for worker in job.generation.ranks if worker != 3]))
    assert job.machine.state.incident is not None and job.machine.state.incident.connect_s > 0
    steps = dict.fromkeys(job.generation.ranks[:2], 6)
    job.tell(NodeResumed(node="here", generation=number, steps={**steps, 99: 6}))  # 99 is nobody
    assert job.machine.state.incident is not None
    job.tell(NodeResumed(node="here", generation=number, steps={job.generation.ranks[2]: 6}))
    (body,) = job.persisted("incident_closed")
    assert body["resolution"] == "rebuilt"
    assert {member["worker"] for member in body["members"]} == set(job.generation.ranks)


def test_a_slot_is_free_again_when_its_worker_has_ended_and_not_before() -> None:
    members = Membership()
    members.offer("a", 2)
    first, second = members.start("a", 0), members.start("a", 1)
    assert members.free_slots() == []
    first.standing = Standing.ENDING
    assert members.free_slots() == []
    first.standing = Standing.EXITED
    assert members.free_slots() == [("a", 0)]
    first.standing = Standing.PLAYING  # given up with its node, and alive after all
    assert members.of_node("a") == [first, second] and members.free_slots() == []
    second.standing = Standing.EXITED
    members.offer("a", 1)  # back with fewer slots
    assert members.free_slots() == []
    first.standing = Standing.EXITED
    assert members.free_slots() == [("a", 0)] and members.of_node("a") == []

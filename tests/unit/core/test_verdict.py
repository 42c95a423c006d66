"""Promises of the verdict, each on votes small enough to read."""

from __future__ import annotations

import itertools

import pytest

from keepstep.core.types import Attempt, Checkpoint, Course, Lineage, Vote
from keepstep.core.verdict import sources_for, targets_for, verdict


def lineage(*generations: int) -> Lineage:
    result = Lineage()
    for step, generation in enumerate(generations):
        result = result.extend(Attempt(generation, step))
    return result


def vote(
    worker: int, applied: tuple[int, ...] | None, *, shard: str = "a", held: str | None = None, **more
) -> Vote:
    state = None if applied is None else lineage(*applied)
    return Vote(
        worker=worker,
        rank=more.pop("rank", worker),
        shard=shard,
        held_shard=(held or shard) if state else None,
        step=state.step if state else None,
        lineage=state,
        **more,
    )


def test_nobody_passed_the_gate_so_everybody_starts_the_step_again() -> None:
    result = verdict([vote(0, (0, 0), attempt=Attempt(0, 2)), vote(1, (0, 0)), vote(9, None, rank=2)])
    assert result.target == 2
    assert result.courses == {0: Course.KEEP, 1: Course.KEEP, 9: Course.RECEIVE}
    assert "rank 2 receive state" in result.reason


def test_somebody_passed_the_gate_so_the_others_roll_forward() -> None:
    result = verdict([vote(0, (0, 0, 0)), vote(1, (0, 0), attempt=Attempt(0, 2)), vote(9, None, rank=2)])
    assert result.target == 3
    assert result.courses == {0: Course.KEEP, 1: Course.ROLL, 9: Course.RECEIVE}
    assert result.lineage == lineage(0, 0, 0)


def test_the_target_is_the_newest_step_that_every_shard_reaches_not_the_maximum() -> None:
    votes = [
        vote(0, (0, 0), shard="a"),
        vote(1, (0,), shard="b"),  # its gradients of step 1 are not complete
        vote(2, (0,), shard="a", attempt=Attempt(0, 1)),
    ]
    result = verdict(votes)
    assert result.target == 1
    assert result.courses == {0: Course.RECEIVE, 1: Course.KEEP, 2: Course.KEEP}
    assert "step 2 was voted for" in result.reason


def test_gradients_of_another_attempt_do_not_roll() -> None:
    result = verdict([vote(0, (0, 1)), vote(1, (0,), attempt=Attempt(0, 1))])
    assert result.courses[1] is Course.RECEIVE


def test_state_of_another_lineage_does_not_count() -> None:
    result = verdict([vote(0, (0, 2)), vote(1, (0, 1))])
    assert result.lineage == lineage(0, 2)
    assert result.courses == {0: Course.KEEP, 1: Course.RECEIVE}


def test_state_of_another_shard_does_not_count() -> None:
    result = verdict([vote(0, (0,), shard="a"), vote(1, (0,), shard="b", held="a")])
    assert result.target is None
    assert set(result.courses.values()) == {Course.ROLLBACK}


def test_no_live_copy_of_a_shard_rolls_back_to_the_newest_checkpoint_that_a_vote_names() -> None:
    old, new = Checkpoint(step=2, lineage="x"), Checkpoint(step=4, lineage="y")
    result = verdict(
        [vote(0, (0,), shard="a", checkpoint=old), vote(9, None, rank=1, shard="b", checkpoint=new)]
    )
    assert (result.target, result.checkpoint) == (None, new)
    assert "rank 1" in result.reason and "checkpoint of step 4" in result.reason


def test_without_any_checkpoint_the_rollback_says_that_the_script_starts_again() -> None:
    result = verdict([vote(9, None, shard="a")])
    assert result.checkpoint is None and "script's start" in result.reason


def test_the_order_of_the_votes_does_not_matter() -> None:
    votes = [vote(0, (0, 0)), vote(1, (0,), attempt=Attempt(0, 1)), vote(2, (0, 0)), vote(3, None)]
    results = [verdict(order) for order in itertools.permutations(votes)]
    assert all(result == results[0] for result in results)


def test_only_same_shard_members_at_the_target_serve() -> None:
    votes = [
        vote(0, (0, 0)),
        vote(1, (0, 0), shard="b"),
        vote(2, (0,), attempt=Attempt(0, 1)),
        vote(9, None, rank=3),
    ]
    courses = verdict(votes).courses
    assert sources_for(votes, courses, 9) == (0, 2)
    assert targets_for(votes, courses, 0) == (9,)
    assert targets_for(votes, courses, 1) == ()


def test_no_vote_and_two_votes_of_one_worker_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        verdict([])
    with pytest.raises(ValueError, match="voted twice"):
        verdict([vote(1, (0,)), vote(1, (0,))])

"""The verdict: what the votes of a generation mean. A pure function, the same at every member.

It knows nothing of processes, time or the network; it sees only what each member holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from keepstep.core.replica_words import numbers
from keepstep.core.types import Checkpoint, Course, Lineage, Verdict, Vote


def verdict(votes: Sequence[Vote]) -> Verdict:
    """The newest step that every shard can reach, and what each member does to get there.

    `votes`: exactly one per member of the generation, in any order. Raises ValueError when there
    is none, or two of one worker.
    """
    if not votes:
        raise ValueError("a verdict needs at least one vote")
    if len({vote.worker for vote in votes}) != len(votes):
        raise ValueError(f"a worker voted twice: {sorted(vote.worker for vote in votes)}")
    for step in sorted(
        {vote.step for vote in votes if _counts(vote) and vote.step is not None}, reverse=True
    ):
        reference = newest_lineage(votes, step)
        courses = {vote.worker: course_towards(vote, step, reference) for vote in votes}
        if _every_shard_is_held(votes, courses):
            return Verdict(
                target=step,
                lineage=reference,
                courses=courses,
                checkpoint=None,
                reason=_explain_target(votes, step, courses),
            )
    checkpoint = _newest_checkpoint(votes)
    return Verdict(
        target=None,
        lineage=None,
        courses={vote.worker: Course.ROLLBACK for vote in votes},
        checkpoint=checkpoint,
        reason=_explain_rollback(votes, checkpoint),
    )


def newest_lineage(votes: Sequence[Vote], step: int) -> Lineage:
    """The lineage that counts among those voted for `step`: the later newest attempt wins."""
    candidates = [vote.lineage for vote in votes if _counts(vote) and vote.step == step and vote.lineage]
    # The digest only breaks ties, so that every member chooses the same one.
    return max(candidates, key=lambda lineage: (lineage.newness(), lineage.digest))


def course_towards(vote: Vote, step: int, reference: Lineage) -> Course:
    """What one member does to hold `reference` at `step`."""
    if not _counts(vote) or vote.lineage is None:
        return Course.RECEIVE
    if vote.step == step and vote.lineage.digest == reference.digest:
        return Course.KEEP
    reaches = (
        vote.step == step - 1
        and vote.attempt is not None
        and vote.attempt.step == vote.step
        and vote.lineage.extend(vote.attempt).digest == reference.digest
    )
    return Course.ROLL if reaches else Course.RECEIVE


def sources_for(votes: Sequence[Vote], courses: Mapping[int, Course], worker: int) -> tuple[int, ...]:
    """The members that hold, or will hold, at the target what `worker` must receive; sorted."""
    shard = next(vote.shard for vote in votes if vote.worker == worker)
    return tuple(sorted(v.worker for v in votes if v.shard == shard and courses[v.worker] in _HOLDING))


def targets_for(votes: Sequence[Vote], courses: Mapping[int, Course], worker: int) -> tuple[int, ...]:
    """The members that may copy the state of `worker`, sorted; donors receive nothing."""
    shard = next(vote.shard for vote in votes if vote.worker == worker)
    return tuple(sorted(v.worker for v in votes if v.shard == shard and courses[v.worker] is Course.RECEIVE))


_HOLDING = (Course.KEEP, Course.ROLL)


def _counts(vote: Vote) -> bool:
    """Whether the voter has state, and of the shard that its rank must hold."""
    return vote.step is not None and vote.lineage is not None and vote.held_shard == vote.shard


def _every_shard_is_held(votes: Sequence[Vote], courses: Mapping[int, Course]) -> bool:
    held = {vote.shard for vote in votes if courses[vote.worker] in _HOLDING}
    return held == {vote.shard for vote in votes}


def _newest_checkpoint(votes: Sequence[Vote]) -> Checkpoint | None:
    seen = [vote.checkpoint for vote in votes if vote.checkpoint is not None]
    return max(seen, key=lambda checkpoint: (checkpoint.step, checkpoint.lineage), default=None)


def _explain_target(votes: Sequence[Vote], step: int, courses: Mapping[int, Course]) -> str:
    words = {
        Course.KEEP: "start step {step} again",
        Course.ROLL: "apply their own gradients of step {before}",
        Course.RECEIVE: "receive state",
    }
    parts = []
    for course, text in words.items():
        ranks = sorted(vote.rank for vote in votes if courses[vote.worker] is course)
        if ranks:
            parts.append(f"{_ranks(ranks)} {text.format(step=step, before=step - 1)}")
    newest = max(vote.step for vote in votes if _counts(vote) and vote.step is not None)
    below = "" if newest == step else f" (step {newest} was voted for, but not every shard can reach it)"
    return f"all shards reach {step} committed steps{below}: {'; '.join(parts)}"


def _explain_rollback(votes: Sequence[Vote], checkpoint: Checkpoint | None) -> str:
    held = {vote.shard for vote in votes if _counts(vote)}
    lost = [vote for vote in votes if vote.shard not in held]
    if lost:
        ranks = _ranks(sorted({vote.rank for vote in lost}))
        why = f"no live copy of the state of {ranks} (shard {lost[0].shard or 'unnamed'})"
    else:
        why = "no step of which every shard has a live copy of one lineage"
    where = "the script's start" if checkpoint is None else f"the checkpoint of step {checkpoint.step}"
    return f"{why}: roll back to {where}"


MOST_NAMED = 16  # every member sends this text on: of thousands only the runs are named


def _ranks(ranks: Sequence[int]) -> str:
    """`ranks` ascending."""
    if len(ranks) <= MOST_NAMED:
        return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    return f"ranks {numbers(ranks, MOST_NAMED, 'others')}"

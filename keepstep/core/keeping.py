"""Whose records lie nowhere but on their own node: said once per stretch, shown while it lasts.

Nothing is decided from it: training goes on. It does not know how records travel.
"""

from __future__ import annotations

from keepstep.core.events import KeeperMissed, KeeperRegained
from keepstep.core.job_state import JobState


def keeper_missed(state: JobState, event: KeeperMissed) -> None:
    """A rank went on without the word of another node that its record lies there."""
    if not state.is_member(event.worker) or event.worker in state.unkept:
        return
    begins = not unkept_ranks(state)
    state.unkept[event.worker] = event.reason
    if begins:
        state.say(
            f"the record of {state.name(event.worker)} is not held elsewhere ({event.reason}): training goes on; "
            "a rank whose node is lost now is not continued bit for bit",
            "warning",
        )


def keeper_regained(state: JobState, event: KeeperRegained) -> None:
    """Its records are acknowledged again."""
    if state.unkept.pop(event.worker, None) is not None and not unkept_ranks(state):
        state.say("the records of all ranks are held elsewhere again")


def unkept_ranks(state: JobState) -> list[int]:
    """The ranks whose newest records no other node has acknowledged."""
    newest = state.newest
    if newest is None:
        return []
    return [rank for rank, worker in enumerate(newest.ranks) if worker in state.unkept]

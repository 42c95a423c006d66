"""Where a worker can stand in the protocol, and what that means for an interrupt."""

from __future__ import annotations

import enum


class WorkerPhase(enum.StrEnum):
    """Where a worker stands in the protocol."""

    PARKED = "parked"  # a spare: no generation yet
    RUN = "run"  # between steps, forward or backward
    GATE = "gate"  # contributed to the gate, no answer yet
    UPDATE = "update"  # MASK: the gate passed, until the block has ended
    ROLL = "roll"  # MASK: applies its own gradients because the verdict says so
    TURN = "turn"  # poisoned; the user's thread is on its way to a safe point
    WAIT = "wait"  # stands at a safe point until a newer generation is announced
    CONNECT = "connect"  # waits for all members of its generation
    VOTE = "vote"  # has voted, waits for the others' votes
    RECEIVE = "receive"  # copies state
    LOAD = "load"  # loads the checkpoint that the verdict names
    DONOR = "donor"  # computes nothing, serves copies
    LEFT = "left"  # fenced or unneeded: out for good


MASKED = frozenset({WorkerPhase.UPDATE, WorkerPhase.ROLL})
# The user's thread stands in Keepstep's own code here, so an interrupt can turn it round at once.
STANDING = frozenset(
    {
        WorkerPhase.PARKED,
        WorkerPhase.WAIT,
        WorkerPhase.CONNECT,
        WorkerPhase.VOTE,
        WorkerPhase.RECEIVE,
        WorkerPhase.LOAD,
        WorkerPhase.DONOR,
    }
)

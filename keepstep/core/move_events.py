"""What the job's controller is told about planned moves: what people ask for, what source and target report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRequested:
    """Somebody wants a rank moved to another worker, live. `to`: its node ("": wherever is best)."""

    rank: int
    to: str = ""
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """Somebody wants every rank of a node moved away, and nothing new there."""

    node: str
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class UndrainRequested:
    """A drained node may be used again."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LendReady:
    """A source can be copied from at `address`, by worker `target` (answer to `Lend`)."""

    worker: int
    target: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReady:
    """A target is built as its rank (answer to `Prepare`). It copied the source's state of some step once.

    `fits`: the copy was complete before that step ended; else the state is copied when all have switched.
    """

    worker: int
    rank: int
    bytes: int = 0
    seconds: float = 0.0
    fits: bool = True

"""The nouns of the protocol: generation, attempt, lineage, vote, verdict.

Values only. Nothing here decides, waits or talks; every other module of Keepstep may use these
types, and the wire writes them as they are.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

TAIL_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Attempt:
    """The gradients of `step` (0-based index), completed under `generation`."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which attempts were applied, in order: a chained hash, and the newest generations in clear.

    Two states with the same digest hold the same updates. `tail` (newest last, at most
    TAIL_LENGTH) serves only to say which of two lineages at the same step is the newer.
    """

    digest: str = ""
    step: int = 0
    tail: tuple[int, ...] = ()

    def extend(self, attempt: Attempt) -> Lineage:
        """The lineage after applying `attempt`. Raises ValueError when the step does not follow."""
        if attempt.step != self.step:
            raise ValueError(f"attempt {attempt} does not follow a lineage at step {self.step}")
        digest = _digest_after(self.digest, attempt.generation, attempt.step)
        return Lineage(digest, self.step + 1, (*self.tail, attempt.generation)[-TAIL_LENGTH:])

    def newness(self) -> tuple[int, ...]:
        """Sorts lineages of one step: the later generation of the newest attempt wins."""
        return tuple(reversed(self.tail))


@functools.lru_cache(maxsize=4)  # a step asks twice: for its record before the gate, and at its commit
def _digest_after(digest: str, generation: int, step: int) -> str:
    text = f"{digest}/{generation}/{step}".encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The numbered map rank -> worker, and who else must take part.

    `fresh`: the world starts from the script's first line (first start, or a death in setup).
    `donors`: worker -> rank whose state it holds; a voting source that computes nothing.
    `planned`: announced ahead by `pending` in the gate (a migration), not by an interrupt.
    `store`: node whose agent holds this generation's store.
    """

    number: int
    ranks: tuple[int, ...]
    donors: Mapping[int, int] = field(default_factory=dict)
    planned: bool = False
    fresh: bool = False
    store: str = ""

    @property
    def members(self) -> tuple[int, ...]:
        return (*self.ranks, *self.donors)

    def rank_of(self, worker: int) -> int | None:
        """The rank that `worker` plays or, as a donor, holds; None when it is no member."""
        if worker in self.ranks:
            return self.ranks.index(worker)
        return self.donors.get(worker)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The newest complete checkpoint that a voter can see: `step` and the lineage it was saved with."""

    step: int
    lineage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """What one member holds when it enters a generation.

    `shard`: identity of the bytes that the member's *rank* must hold (same for replicas).
    `held_shard`: shard of the state it really has. `step` is None when it has no state.
    `attempt`: its own complete, unapplied gradients.
    """

    worker: int
    rank: int
    shard: str
    held_shard: str | None
    step: int | None
    lineage: Lineage | None
    attempt: Attempt | None = None
    checkpoint: Checkpoint | None = None


class Course(enum.StrEnum):
    """What the verdict tells one member to do."""

    KEEP = "keep"  # redo: start the step again from its own record
    ROLL = "roll"  # apply its own complete gradients, then go on
    RECEIVE = "receive"  # take state from members of its replica set
    ROLLBACK = "rollback"  # no consistent live copy: load the named checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The same at every member: `target` committed steps, then training resumes.

    `target` is None exactly when every course is ROLLBACK; `checkpoint` then says to what
    (None: to the script's start).
    """

    target: int | None
    lineage: Lineage | None
    courses: Mapping[int, Course]
    checkpoint: Checkpoint | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """One part of a rank's state: "parameters", "optimizer state", "buffers", "values", "per rank".

    `identity` is equal at ranks that must hold the same bytes. `dtypes`: bytes by type; `largest`: bytes of
    the largest tensors by name, a bounded list.
    """

    part: str
    identity: str
    tensors: int
    bytes: int
    dtypes: Mapping[str, int] = field(default_factory=dict)
    largest: Mapping[str, int] = field(default_factory=dict)

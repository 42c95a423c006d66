"""Two runs held against each other, bit for bit: the first thing that differs, and what usually makes it so.

It knows what runs reported, and nothing of how they were started.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from keepstep.cli.prove_record import Prints, RunRecord

What = Literal["value", "tensor", "missing", "exit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first thing in which two runs differ. `step` is 0-based; None is the state after the last step."""

    what: What
    name: str
    rank: int | None = None
    step: int | None = None
    expected: float | str | None = None
    found: float | str | None = None

    def __str__(self) -> str:
        where = "at the end" if self.step is None else f"in step {self.step}"
        where += "" if self.rank is None else f" on rank {self.rank}"
        match self.what:
            case "value":
                return f"the reported value {self.name!r} {where}: {self.expected!r} and {self.found!r}"
            case "tensor":
                after = "after the last step" if self.step is None else f"after step {self.step}"
                return f"the tensor {self.name} {after} on rank {self.rank}"
            case "missing":
                lacking = "the second" if self.found is None else "the first"
                return f"{self.name} {where}: {lacking} of the two runs has none"
            case "exit":
                return f"the exit code: {self.expected} and {self.found}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Death:
    """A worker that died (or was fenced) while it played `rank`, after `step` committed steps."""

    rank: int
    step: int

    def excuses(self, rank: int, step: int | None, steps: int) -> bool:
        """Whether this rank's digests may lack after this step (None: the last).

        They are written after the commit: who dies between the two leaves none, and the step is not repeated.
        """
        if rank != self.rank:
            return False
        return self.step >= steps if step is None else step in (self.step - 1, self.step)


def first_difference(
    expected: RunRecord, found: RunRecord, deaths: Collection[Death] = ()
) -> Difference | None:
    """The first difference by step, then values before tensors, then rank. None: bit for bit the same.

    `deaths`: in the found run. Raises ValueError when the expected run left nothing to compare.
    """
    if not expected.finals:
        raise ValueError("the undisturbed run left no digest of its state")
    ranks = sorted({*expected.ranks, *found.ranks})
    for step in sorted({*expected.noted_steps, *found.noted_steps}):
        for rank in ranks:
            difference = _values(expected, found, rank, step)
            if difference is not None:
                return difference
        for rank in ranks:
            ours, theirs = (run.prints.get(rank, {}).get(step) for run in (expected, found))
            difference = _tensors(ours, theirs, rank, step, expected.steps, deaths)
            if difference is not None:
                return difference
    for rank in ranks:
        ours, theirs = expected.finals.get(rank), found.finals.get(rank)
        difference = _tensors(ours, theirs, rank, None, expected.steps, deaths)
        if difference is not None:
            return difference
    return None


def _values(expected: RunRecord, found: RunRecord, rank: int, step: int) -> Difference | None:
    ours: Mapping[str, float] = expected.values.get(rank, {}).get(step, {})
    theirs: Mapping[str, float] = found.values.get(rank, {}).get(step, {})
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            what: What = "missing"
            name = f"the reported value {name!r}"
        elif _bits(one) != _bits(other):
            what = "value"
        else:
            continue
        return Difference(what=what, name=name, rank=rank, step=step, expected=one, found=other)
    return None


def _tensors(
    ours: Prints | None,
    theirs: Prints | None,
    rank: int,
    step: int | None,
    steps: int,
    deaths: Collection[Death],
) -> Difference | None:
    if ours is None or theirs is None:
        if ours is theirs or (theirs is None and any(death.excuses(rank, step, steps) for death in deaths)):
            return None
        held = ["digests" if prints is not None else None for prints in (ours, theirs)]
        return Difference(
            what="missing", name="the state's digests", rank=rank, step=step, expected=held[0], found=held[1]
        )
    if ours.digest == theirs.digest:
        return None
    one, other = ours.tensors(), theirs.tensors()
    for name in [*one, *(name for name in other if name not in one)]:
        if one.get(name) != other.get(name):
            return Difference(
                what="tensor",
                name=name,
                rank=rank,
                step=step,
                expected=one.get(name),
                found=other.get(name),
            )
    raise ValueError("digests that differ in sum and agree one by one")


def same_state(one: RunRecord, other: RunRecord) -> bool:
    """Whether every rank ends with the same tensors, whatever was reported."""
    return one.finals.keys() == other.finals.keys() and all(
        one.finals[rank].digest == other.finals[rank].digest for rank in one.finals
    )


def usual_cause(difference: Difference, *, state_agrees: bool) -> str:
    """What usually makes two undisturbed runs of one script differ in this way."""
    if difference.what == "missing":
        return "how long the runs were, or what they report, depends on time or on what an earlier run left on disk"
    if difference.what == "value" and state_agrees:
        return (
            "the trained state agrees, only what is reported does not: a time or a speed, mostly; "
            f"leave it out with --ignore {difference.name}"
        )
    if difference.what == "value" and difference.step == 0:
        return (
            "before the first update already: an unseeded generator (torch.manual_seed, random.seed, numpy) for "
            "the weights, the order of the data or dropout, or a checkpoint that an earlier run left on disk"
        )
    return (
        "an unseeded generator (dropout, augmentation, the order of the data), nondeterministic kernels "
        "(see torch.use_deterministic_algorithms), or something that depends on time"
    )


def _bits(value: float) -> bytes:
    """A NaN equals itself here, and 0.0 is not -0.0."""
    return struct.pack("<d", value)

"""What a soak does to a job, all of it drawn from a seed: who is harmed, when, where, and how.

Nothing here starts or kills anything.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from keepstep.core.faults import Fault

BURST_STEPS = 12
LAST_STEPS = 6  # permitted only when the last blow has been struck, so that none can come after the last step
EARLIEST, LATEST = 3, 9  # the step of a burst in which the harm is done
PLACES = ("random", "forward", "backward", "gate", "after_gate", "update", "block_end", "between", "aside")
IN_THE_STEP = ("forward", "backward", "gate")  # nobody has passed the gate: the step is served again
RANKS = {"ddp": 3, "hsdp": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One burst's harm: ordered faults, or a signal from outside ("KILL" or "STOP", to a rank or a spare)."""

    step: int
    rank: int
    signal: str = ""  # from outside
    fraction: float = 0.0  # how far into the step
    at_spare: bool = False
    faults: tuple[Fault, ...] = ()
    awaits_spares: bool = True

    @property
    def kills(self) -> int:
        return max(1, len(self.faults))

    def __str__(self) -> str:
        if self.faults:
            return " and ".join(f"{fault.kind} {fault}" for fault in self.faults)
        whom = "a spare" if self.at_spare else f"rank {self.rank}"
        return f"SIG{self.signal} to {whom} after step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """One job and its blows, one for each burst but the first."""

    name: str
    parallel: str
    symmetric: bool
    spares: int
    blows: tuple[Blow, ...]

    @property
    def ranks(self) -> int:
        return RANKS[self.parallel]

    @property
    def steps(self) -> int:
        return BURST_STEPS * (len(self.blows) + 1) + LAST_STEPS

    def __str__(self) -> str:
        readiness = "hot" if self.symmetric else "warm"
        return f"{self.name}: {self.parallel}, {self.ranks} ranks, {self.spares} {readiness} spares"


def plans(seed: int, blows_per_job: int) -> Iterator[JobPlan]:
    """Jobs without end, DDP and HSDP in turn; job n is the same whatever was drawn before it."""
    number = 0
    while True:
        yield draw(seed, number, blows_per_job)
        number += 1


def draw(seed: int, number: int, blows_per_job: int) -> JobPlan:
    """Job `number` of a seed."""
    choice = random.Random(f"{seed}/{number}/{blows_per_job}")
    parallel = ("ddp", "hsdp")[number % 2]
    spares = choice.choice((1, 1, 2))
    blows = []
    for burst in range(1, blows_per_job + 1):
        step = burst * BURST_STEPS + choice.randrange(EARLIEST, LATEST)
        blows.append(_blow(choice, parallel, step))
    return JobPlan(
        name=f"job-{number}",
        parallel=parallel,
        symmetric=choice.random() < 0.7,
        spares=spares,
        blows=tuple(blows),
    )


def _blow(choice: random.Random, parallel: str, step: int) -> Blow:
    rank = choice.randrange(RANKS[parallel])
    awaits_spares = choice.random() < 0.75
    kind = choice.random()
    signal = "STOP" if choice.random() < 0.25 else "KILL"
    if kind < 0.08:
        return Blow(step=step, rank=rank, signal="KILL", at_spare=True)
    if kind < 0.45:
        fraction = choice.random()
        return Blow(step=step, rank=rank, signal=signal, fraction=fraction, awaits_spares=awaits_spares)
    if kind < 0.85:
        fault = Fault(rank=rank, step=step, at=choice.choice(PLACES), kind=signal.lower())
        return Blow(step=step, rank=rank, faults=(fault,), awaits_spares=awaits_spares)
    return Blow(step=step, rank=rank, faults=_two(choice, parallel, rank, step), awaits_spares=awaits_spares)


def _two(choice: random.Random, parallel: str, rank: int, step: int) -> tuple[Fault, Fault]:
    """Two faults in one step that leave a twin of each alive, so that no committed step may be lost."""
    first = Fault(rank=rank, step=step, at=choice.choice(IN_THE_STEP))
    others = [other for other in range(RANKS[parallel]) if other != rank]
    if parallel == "hsdp":
        others.remove((rank + 2) % 4)  # its only twin: ranks r and r + 2 hold the same shard
    other = choice.choice(others)
    second = choice.choice(
        (
            Fault(rank=other, step=step, at=choice.choice(IN_THE_STEP)),
            Fault(rank=rank, step=step, at="transfer_target"),
            *((Fault(rank=other, step=step, at="transfer_source"),) if parallel == "ddp" else ()),
        )
    )
    return first, second

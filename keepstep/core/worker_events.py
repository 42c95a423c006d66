"""What a worker's machine is told, and what it answers. See `keepstep.core.worker`.

The trainer (real processes) and the simulator (virtual ones) make these events.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.core.types import Generation, Lineage, Verdict, Vote

# ---- events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStarted:
    """The block of the next step begins (its record is written)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsCompleted:
    """All own collectives of the step succeeded; the worker is about to enter the gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatePassed:
    """The gate's all-reduce succeeded. `pending`: the largest planned generation (0: none)."""

    pending: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFailed:
    """A collective, the gate, a connection or a vote failed."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEnded:
    """The step's block ended: optimizer, scheduler, RNG, cursor, zero_grad are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """The controller announced `generation`; may arrive late, twice or in a masked phase."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnnounced:
    """A planned generation is pending. Its sources put it into the gate's value once it is due."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDue:
    """Told to a source: the targets of planned generation `number` hold the state of step `step`.

    None: they never will in time, so the switch is due whatever they hold.
    """

    number: int
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateAdopted:
    """Told to a target before its generation: it holds the whole state of `step`, with this lineage."""

    step: int
    lineage: Lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class SafePointReached:
    """The user's thread stands where it can be turned round: in the gate, at the block's end, in an
    aside, in the loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """All members of the generation are there, the inner groups are connected."""

    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VotesCounted:
    """Every member's vote of `generation` is known."""

    generation: int
    votes: tuple[Vote, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyStarted:
    """The first byte is about to arrive: own state no longer counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCompleted:
    """The last byte is verified: the worker holds the target's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLoaded:
    """The checkpoint that the verdict named is loaded."""


WorkerEvent = (
    StepStarted
    | GradientsCompleted
    | GatePassed
    | CollectiveFailed
    | BlockEnded
    | Interrupted
    | PlanAnnounced
    | PlanDue
    | StateAdopted
    | SafePointReached
    | Connected
    | VotesCounted
    | CopyStarted
    | CopyCompleted
    | CheckpointLoaded
)

# ---- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterGate:
    """Contribute to the gate's all-reduce (MAX) with this value."""

    pending: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Complain:
    """Tell the controller that something failed in `generation`."""

    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CutGroups:
    """Poison: cut the connections of the old groups at once, so that blocked collectives return."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Drain, drop and rebuild the inner groups under this generation."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class CastVote:
    """Publish this vote and collect everybody's."""

    vote: Vote


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyUpdate:
    """Let optimizer.step() run with the gradients held (after a passed gate, or to roll forward)."""

    roll: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RedoStep:
    """Restore the record of the step's start and serve the same batches again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveState:
    """Copy state from these workers (same shard, at the target), then say CopyCompleted."""

    sources: tuple[int, ...]
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeState:
    """Serve copies to these workers from the step's boundary on."""

    targets: tuple[int, ...]
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCheckpoint:
    """No consistent live copy: load what the verdict names."""

    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Every rank is known to hold this many committed steps."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Exit; this worker's id is never used again."""

    reason: str


WorkerAction = (
    EnterGate
    | Complain
    | CutGroups
    | Connect
    | CastVote
    | ApplyUpdate
    | RedoStep
    | ReceiveState
    | ServeState
    | LoadCheckpoint
    | Publish
    | Leave
)

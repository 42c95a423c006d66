"""What the job's controller is told: past-tense facts, each stamped by the caller's clock.

`JobMachine.step(event, now_s)` takes exactly these. The shells and the simulator make them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keepstep.core.health_events import SignalSeen
from keepstep.core.move_events import (
    DrainRequested,
    LendReady,
    MoveReady,
    MoveRequested,
    UndrainRequested,
)
from keepstep.core.types import StatePart


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentJoined:
    """A node's agent connected (again). `workers`: those of its workers that are still alive.

    `exited`: status of those that ended, as far as the agent remembers; `finished`: those whose page
    says that they passed the last gate. Parked workers are reported again by `WorkerParked`.
    `labels`: what placement goes by; `peer`: where other nodes reach this agent, text to be passed on.
    """

    node: str
    slots: int
    workers: tuple[int, ...] = ()
    exited: Mapping[int, int] = field(default_factory=dict)
    finished: tuple[int, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    peer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """A node's agent is gone for good, and every worker of that node with it."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDisconnected:
    """An agent's connection ended. Its workers may live on, and it may come back (`AgentJoined`)."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSilent:
    """No word from a connected agent for `silent_s` seconds, more than its heartbeats explain."""

    node: str
    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHeard:
    """An agent that was silent spoke again, on the same connection."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswered:
    """What the agent of node `by` found when it tried to reach that of `node` (answer to `Probe`).

    `outcome`: "reached" (its listener accepted), "refused" (the machine answers, no agent listens),
    "silent" (no answer within the time given).
    """

    node: str
    by: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParked:
    """A worker waits for a rank. `readiness`: "warm" (in init()) or "hot" (built and rehearsed)."""

    worker: int
    readiness: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareChecked:
    """What a worker without a rank found of itself: before it parks, and when asked (`CheckSpare`).

    `ok`: its device computes what is known; else `detail` says what was wrong. `free_bytes`: memory that it
    could still take (of its device, or of the host); 0 when it does not know.
    """

    worker: int
    ok: bool
    detail: str = ""
    free_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasured:
    """How fast `node` sent to `to` (answer to `MeasureLink`); `detail`: why it could not."""

    node: str
    to: str
    bytes_per_s: int = 0
    latency_s: float = 0.0
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """A worker's process ended. `status` < 0 is a signal, as in subprocess; None: nobody knows (adopted).

    `step`/`published`: read from its page after its death; `published` is the newest step that
    all ranks are known to hold, over every page of that node; `phase`: where its main thread was, by
    the page's name for it. `first_evidence_s`: when the first trace of the failure was seen (caller's clock).
    """

    worker: int
    status: int | None
    step: int = 0
    phase: str = ""
    published: int = 0
    first_evidence_s: float | None = None
    oom_killed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSuspected:
    """A living worker makes no progress while others wait (stopped, or hung), with the evidence."""

    worker: int
    reason: str
    published: int = 0
    evidence: Mapping[str, Any] = field(default_factory=dict)
    first_evidence_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Complained:
    """A worker saw a collective, a connection or a copy fail in `generation`."""

    worker: int
    generation: int
    reason: str
    step: int = 0
    published: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """From time to time: how far a worker is. `published`: steps that all ranks hold."""

    worker: int
    generation: int
    step: int
    published: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperMissed:
    """A worker passed a gate without another node's word that it keeps the record; once per stretch."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperRegained:
    """The records of a worker are acknowledged by another node again."""

    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProgressed:
    """From time to time, for all workers of a node that got further: worker -> committed steps.

    `published`: steps that all ranks hold, over every page of that node.
    """

    node: str
    generation: int
    published: int
    steps: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictReached:
    """A member learned the verdict of `generation`.

    `course` is the member's own (`Course`). `recomputed`: steps it will compute again; None: one
    when it keeps its state, none otherwise.
    """

    worker: int
    generation: int
    target: int | None
    course: str
    reason: str
    connect_s: float
    vote_s: float
    bit_exact: bool = True
    recomputed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReceived:
    """A target holds verified state. `sources`: workers it came from. Not `bit_exact`: no record of
    the rank fitted, so its random state and data position are a twin's."""

    worker: int
    generation: int
    transfer_s: float
    bytes: int
    sources: tuple[int, ...]
    bit_exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A member committed its first new step in `generation`."""

    worker: int
    generation: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """`VerdictReached` of several members on one node that differ in nothing but their times (worker -> seconds)."""

    node: str
    generation: int
    target: int | None
    course: str
    reason: str
    connected_s: Mapping[int, float]
    voted_s: Mapping[int, float]
    bit_exact: bool = True
    recomputed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResumed:
    """`Resumed` of several members on one node: worker -> its committed steps."""

    node: str
    generation: int
    steps: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FingerprintTaken:
    """Digest of a rank's replicated state after `step` commits: twins must agree. `parts`: by `StatePart`."""

    worker: int
    rank: int
    step: int
    shard: str
    digest: str
    parts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDescribed:
    """What a rank's state consists of, told once by each of its players, after two updates.

    `shard`: identity of the bytes that decides who can be copied from; `place`: the same for people.
    """

    worker: int
    rank: int
    step: int
    shard: str
    place: str
    parts: tuple[StatePart, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheckFailed:
    """A worker found that its rank could not be continued exactly: `check` names what ("record", ...)."""

    worker: int
    check: str
    reason: str
    step: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfCheckPassed:
    """A check of a worker that had failed holds again."""

    worker: int
    check: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFailed:
    """The user's code raised in a healthy step. `hardware` is True when the table of exceptions
    sends it to the machine (CUDA, NCCL, I/O) and not to the script."""

    worker: int
    summary: str
    traceback: str
    hardware: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRefused:
    """The library refused what the script does (KeepstepUsageError): the script's fault, one line."""

    worker: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFinished:
    """A worker passed the last gate, and its script came to its end: every rank has finished all steps.

    `generation`: in which it passed that gate, None where it is not known: its other members passed it too.
    """

    worker: int
    step: int
    generation: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistFailed:
    """The ledger could not be written (full disk). Training goes on; bookkeeping is lost, said aloud."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The user or a scheduler wants the job to end. `signal`: its name; `hard`: at once."""

    signal: str
    hard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time went by: deadlines are looked at."""


Event = (
    AgentJoined
    | AgentLost
    | AgentDisconnected
    | AgentSilent
    | AgentHeard
    | ProbeAnswered
    | WorkerParked
    | SpareChecked
    | LinkMeasured
    | WorkerExited
    | WorkerSuspected
    | Complained
    | Progressed
    | NodeProgressed
    | KeeperMissed
    | KeeperRegained
    | VerdictReached
    | NodeVerdict
    | StateReceived
    | Resumed
    | NodeResumed
    | FingerprintTaken
    | StateDescribed
    | SelfCheckFailed
    | SelfCheckPassed
    | ScriptFailed
    | UsageRefused
    | WorkerFinished
    | MoveRequested
    | DrainRequested
    | UndrainRequested
    | LendReady
    | MoveReady
    | SignalSeen
    | PersistFailed
    | StopRequested
    | Ticked
)

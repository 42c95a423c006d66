"""What the job's controller wants done: imperatives, carried out by the shell in order.

Whatever can take time or fail comes back as an event. `Persist` stands before what depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keepstep.core.types import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Append one entry to the ledger, durably, before the next action.

    `kind`: "job", "generation", "incident", "incident_phase", "incident_closed", "note", "end".
    """

    kind: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Start a new process on a slot. Every worker starts as a spare; a generation gives it a rank."""

    worker: int
    node: str
    slot: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StandBy:
    """Tell a parked worker that it is a spare: with init(symmetric=True) it builds as `rehearse_rank`."""

    worker: int
    rehearse_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSpare:
    """Ask a parked worker to prove itself again; it answers with `SpareChecked`, unless it gets a rank."""

    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lend:
    """Tell a rank's player to let worker `target` copy its state, step by step; it answers with `LendReady`."""

    worker: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Tell a parked worker to build as `rank`, in its sandbox, and to copy the state of worker `source`.

    `address`: where that is offered. It answers with `MoveReady`.
    """

    worker: int
    rank: int
    source: int
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureLink:
    """Measure how fast `node` reaches `to`; nothing waits for the answer (`LinkMeasured`)."""

    node: str
    to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce:
    """Tell every member of this generation (and the fenced) the new map. Each answers by voting.

    `peers`: node -> where its agent listens for other nodes. `keepers`: node -> the node whose agent keeps
    the records of its members; a node without one has none (the only node of a job). `ahead`: nobody enters
    it before the gate says so (a planned switch).
    """

    generation: Generation
    reason: str
    peers: Mapping[str, str] = field(default_factory=dict)
    keepers: Mapping[str, str] = field(default_factory=dict)
    ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Ask the agent of node `by` whether it reaches that of `node` at `peer`, within `timeout_s`."""

    node: str
    peer: str
    by: str
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DropAgent:
    """End the connection of a node's agent. It has to join again, and to say what lives there."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Tell workers that all ranks have finished: leave the loop, do not wait for anybody."""

    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """End a worker's whole process group (evidence first when `with_evidence`), by SIGKILL after
    `grace_s` seconds of SIGTERM (0: at once)."""

    worker: int
    reason: str
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """One line for the human at the console and the log. `level`: info, warning, error."""

    text: str
    level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob:
    """The job is over: stop what is left, end with `exit_code`."""

    exit_code: int
    reason: str


Action = (
    Persist
    | StartWorker
    | StandBy
    | CheckSpare
    | Lend
    | Prepare
    | MeasureLink
    | Announce
    | Probe
    | DropAgent
    | Release
    | KillWorker
    | Say
    | EndJob
)

# Its agent only passes these on.
FOR_ONE_WORKER = (CheckSpare, Lend, Prepare)

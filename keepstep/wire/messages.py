"""What workers, agents and the controller say to each other beyond the core's events and actions.

Values only: who says what, and when. How a message becomes bytes is `keepstep.wire.codec`'s affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from keepstep.core import events, move_events

PROTOCOL_VERSION = 3

# Of what a worker says, the newest of each of these kinds is told again when a connection was lost: worker to
# agent, and agent to controller. Whether the one before had arrived cannot be known, so all may be heard twice.
TOLD_AGAIN = (
    events.Complained,
    events.FingerprintTaken,
    move_events.LendReady,
    move_events.MoveReady,
    events.Resumed,
    events.ScriptFailed,
    events.SelfCheckFailed,
    events.SelfCheckPassed,
    events.SpareChecked,
    events.StateDescribed,
    events.StateReceived,
    events.UsageRefused,
    events.VerdictReached,
    events.WorkerFinished,
    events.WorkerParked,
)

# ---- a worker's connection to its agent -----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A worker's first message on each of its connections. `role`: one control, any number of stores."""

    version: int
    token: str
    worker: int
    pid: int
    role: Literal["control", "store"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The agent's answer to a control Hello. `advertise`: the address that this node's groups bind to.

    `record_ack_s`: how long a gate waits for another node to say that it keeps the record.
    `mode` "observe": a failure of a collective is the script's to see, as without Keepstep.
    """

    job: str
    world_size: int
    record_bytes: int
    orphan_timeout_s: float
    advertise: str
    record_ack_s: float = 0.2
    mode: Literal["run", "observe"] = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """Not welcome (any more): leave, and do not come back under this id."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalKept:
    """What a rank heard from its peers during setup, kept by the agent for whoever takes the rank."""

    worker: int
    rank: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """A worker asks for a rank's record (the one that fits `lineage`) or for its setup journal."""

    request: int
    what: Literal["record", "journal"]
    rank: int
    lineage: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """The answer to Fetch. `data` is None when there is none; `detail` then says why."""

    request: int
    data: bytes | None
    detail: str = ""


# ---- a generation's store, spoken on a worker's second connection ---------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest:
    """One operation on the store. `get` and `wait` are answered when the keys exist, or at the timeout."""

    request: int
    op: Literal["set", "get", "wait", "check", "add", "compare_set", "delete", "num_keys"]
    keys: tuple[str, ...] = ()
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReply:
    """The answer to StoreRequest. Not `ok`: `detail` is "timeout" or says what was wrong."""

    request: int
    ok: bool
    values: tuple[bytes, ...] = ()
    number: int = 0
    detail: str = ""


# ---- connections to the agent of another node ------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHello:
    """Who connects to another node's agent, and for what; it travels inside `keepstep.wire.handshake`.

    `role`: "store" (a worker's generation store), "keep" (a worker's records), "agent" (questions between
    agents). `worker`: -1 for an agent. `to`: the listener's address as the caller was told it: a listener
    that is called by another address is being spoken for by a stranger.
    """

    version: int
    node: str
    to: str
    role: Literal["store", "keep", "agent"]
    worker: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerWelcome:
    """The listener's answer to a PeerHello that may stay; `Fenced` is the answer to one that may not."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFetch:
    """An agent asks another for the best record (or the journal) of a rank that lies there.

    `fresh_since`: the generation with which this world began; what is older belongs to another world.
    """

    what: Literal["record", "journal"]
    rank: int
    lineage: str = ""
    fresh_since: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFetched:
    """The answer to PeerFetch; `data` is None when nothing fits, `steps` are then those that lie there.

    `kind`, `step`, `worker`: which record, and whose. `played`: the newest generation in which that worker
    is known to have played the rank. `final`: no better record of that worker can lie anywhere.
    """

    data: bytes | None
    kind: str = ""
    step: int = 0
    worker: int = -1
    played: int = -1
    final: bool = False
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJournal:
    """An agent hands a rank's setup journal to the agent that keeps its records."""

    rank: int
    fresh_since: int
    data: bytes


# ---- an agent's connection to the controller ------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHello:
    """An agent's first message. `workers`: those of its workers that are still alive (reconnection).

    `exited`: status of those that ended while the controller was away; `finished`: those whose page says
    that they passed the last gate. `labels`: what placement goes by ("rack", "zone", ...). `peer`: where
    this agent listens for the workers and agents of other nodes, "HOST:PORT" ("[HOST]:PORT" for IPv6).
    """

    version: int
    token: str
    node: str
    slots: int
    pid: int
    advertise: str
    workers: tuple[int, ...] = ()
    exited: Mapping[int, int] = field(default_factory=dict)
    finished: tuple[int, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    peer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """All that an agent needs to start workers of the job.

    `launch`: "script" (a Python file), "module" (python -m) or "program" (run as it is).
    `tee`, `redirects`: torchrun's `-t` and `-r` values ("0".."3", or "0:1,1:3" per slot).
    `env`: set in each worker on top of the agent's own environment.
    """

    job: str
    script: str
    args: tuple[str, ...]
    world_size: int
    spares: int = 0
    launch: Literal["script", "module", "program"] = "script"
    mode: Literal["run", "observe"] = "run"
    record_bytes: int = 4 << 20
    orphan_timeout_s: float = 600.0
    record_ack_s: float = 0.2
    tee: str = "0"
    redirects: str = "0"
    working_dir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWelcome:
    """The controller's answer to AgentHello. `heartbeat_s`: how often the agent says that it is there."""

    job: str
    world_size: int
    spec: JobSpec
    heartbeat_s: float = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceChange:
    """An Announce, seen from generation `base`. `ranks`: rank -> worker, where it is another one.

    `peers`, `keepers`: what is new or different; `*_gone`: the nodes that are named no more.
    """

    base: int
    number: int
    ranks: Mapping[int, int]
    donors: Mapping[int, int]
    planned: bool
    store: str
    reason: str
    ahead: bool = False
    peers: Mapping[str, str] = field(default_factory=dict)
    peers_gone: tuple[str, ...] = ()
    keepers: Mapping[str, str] = field(default_factory=dict)
    keepers_gone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The agent is there. `sent_ns`: its CLOCK_REALTIME when it said so."""

    node: str
    sent_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The controller asks an agent for something that people want to see; nothing depends on it.

    `what` names one of the agent's questions (`keepstep.agent.questions`), `about` its arguments.
    """

    request: int
    what: str
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The agent's answer to Ask. Not `ok`: `detail` says why in one line."""

    request: int
    ok: bool
    data: bytes = b""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End every worker of the node and leave. `hard`: by SIGKILL, without asking first.

    `exit_code` and `reason`: how the job has ended, for whoever started the agent.
    """

    hard: bool
    exit_code: int = 0
    reason: str = ""

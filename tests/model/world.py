"""One state of the explored world: shipped WorkerMachines, the ledger, what is durable, budgets.

States are copied on write: a successor shares what it does not change.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from keepstep.core.types import Attempt, Generation, Lineage, Vote
from keepstep.core.worker import WorkerMachine
from keepstep.core.worker_phase import WorkerPhase

LEARNT = (WorkerPhase.RUN, WorkerPhase.GATE, WorkerPhase.DONOR)
GONE_ON = (*LEARNT, WorkerPhase.UPDATE)
Content = tuple[int, ...]  # generations whose gradients were applied, one per step


@dataclass(frozen=True, kw_only=True)
class World:
    """Bounds: ranks with their shards, spares, steps, and how many faults of each kind.

    `checkpoint`: the step at which every worker saves its shard (0: never).

    `fine`: every phase of a step is a move of its own. Otherwise those moves are fused that nobody
    else can tell apart because interrupts are masked there.
    """

    shards: str
    spares: int
    steps: int
    crash: int = 0
    zombie: int = 0
    flaky: int = 0
    controller: int = 0
    plan: int = 0
    checkpoint: int = 0
    fine: bool = False


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules outside of the machine and the verdict (protocol.md); a hole switches one off."""

    complaint: bool = True
    retell: bool = True
    durable: bool = True
    fence: bool = True
    donor: bool = True
    pending: bool = True
    announce: bool = True
    cktag: bool = True
    cknamed: bool = True


@dataclass
class Process:
    """A worker: its machine, and the truth about what it holds."""

    machine: WorkerMachine
    alive: bool = True
    fenced: bool = False
    content: Content | None = None
    shard: str = ""
    torn: bool = False
    gradients: int = -1  # generation of the complete gradients that it really holds
    stage: str = ""  # within RUN: "compute" or "sent"; within UPDATE and ROLL: "passed", "applied"
    late: int = -1  # generation of the gradients of an update that goes on behind its machine's back
    destroyed: bool = False  # the protocol itself, not a fault, destroyed its state

    def copy(self) -> Process:
        machine = object.__new__(type(self.machine))
        machine.__dict__.update(self.machine.__dict__)
        machine._history = deque(maxlen=1)
        other = object.__new__(Process)
        other.__dict__.update(self.__dict__)
        other.machine = machine
        return other

    def key(self) -> tuple:
        if not self.alive:
            return (self.fenced, self.destroyed)
        m = self.machine
        return (
            m.phase.value,
            -1 if m.generation is None else m.generation.number,
            -1 if m._plan is None else m._plan.number,
            m._due,
            m._awaited_plan,
            m._gate_value,
            m.has_state,
            m.step_count,
            m.lineage.digest,
            -1 if m.attempt is None else m.attempt.generation,
            getattr(m, "extra", None),
            self.fenced,
            self.content,
            self.shard,
            self.torn,
            self.gradients,
            self.stage,
            self.late,
            self.destroyed,
        )


@dataclass
class Entry:
    """One generation of the ledger, and what its members share."""

    generation: Generation
    told: bool = True
    retired: bool = False
    position: dict[int, int] = field(default_factory=dict)  # worker -> 2 * step + (1 sent, 2 gate)
    gates: dict[int, int] = field(default_factory=dict)  # step -> largest pending value
    votes: dict[int, Vote] = field(default_factory=dict)

    def copy(self) -> Entry:
        return Entry(
            self.generation,
            self.told,
            self.retired,
            dict(self.position),
            dict(self.gates),
            dict(self.votes),
        )

    def key(self, over: bool) -> tuple:
        g = self.generation
        head = (g.number, g.ranks, tuple(sorted(g.donors.items())), g.planned, self.told, self.retired)
        if over:  # nobody can look at what its members shared any more
            return head
        votes = tuple(
            (
                w,
                v.step,
                v.lineage.digest if v.lineage else "",
                v.attempt.generation if v.attempt else -1,
                v.held_shard,
                v.checkpoint,
            )
            for w, v in sorted(self.votes.items())
        )
        return (*head, tuple(sorted(self.position.items())), tuple(sorted(self.gates.items())), votes)


class State:
    """A node of the search; `bad` tells of a broken promise."""

    def __init__(self) -> None:
        self.processes: list[Process] = []
        self.ledger: list[Entry] = []
        self.known = 0  # index of the newest generation that the controller knows
        self.up = True
        self.budget: dict[str, int] = {}
        self.published = 0
        self.saved: frozenset[tuple[str, Content]] = frozenset()  # shards on the disk
        self.bad = ""
        self._own: set[tuple[str, int]] = set()

    def copy(self) -> State:
        other = object.__new__(State)
        other.__dict__.update(self.__dict__)
        other.processes, other.ledger = list(self.processes), list(self.ledger)
        other.budget, other._own = dict(self.budget), set()
        return other

    def process(self, x: int) -> Process:
        """Process x, for changing it."""
        if ("p", x) not in self._own:
            self._own.add(("p", x))
            self.processes[x] = self.processes[x].copy()
        return self.processes[x]

    def entry(self, i: int) -> Entry:
        """Generation i, for changing what belongs to it."""
        if ("e", i) not in self._own:
            self._own.add(("e", i))
            self.ledger[i] = self.ledger[i].copy()
        return self.ledger[i]

    def inside(self, i: int) -> bool:
        """Whether a living member has not gone beyond generation i yet."""
        for x in self.ledger[i].generation.members:
            process = self.processes[x]
            if process.alive and (
                process.machine.generation is None or process.machine.generation.number <= i
            ):
                return True
        return False

    def key(self) -> int:
        entries = tuple(
            entry.key(over=i < self.known and not self.inside(i)) for i, entry in enumerate(self.ledger)
        )
        return hash(
            (
                tuple(process.key() for process in self.processes),
                entries,
                self.known,
                self.up,
                tuple(self.budget.values()),
                self.published,
                self.saved,
            )
        )


Move = tuple[str, State, bool]  # (label, successor, whether it is a fault)
_LINEAGES: dict[Content, Lineage] = {(): Lineage()}


def lineage_of(content: Content) -> Lineage:
    """The lineage that a state of this content must claim."""
    if content not in _LINEAGES:
        before = lineage_of(content[:-1])
        _LINEAGES[content] = before.extend(Attempt(content[-1], len(content) - 1))
    return _LINEAGES[content]

"""One worker's session: the shell around its protocol machine.

Two threads meet here. The listening thread (link) brings announcements and carries out at once what
must not wait: cutting the old groups. The user's thread does everything that blocks, when it
stands at a safe point (`keepstep.trainer.recovery`). One lock guards the machine.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NoReturn

from keepstep.core.actions import Announce, CheckSpare, Lend, Prepare, Release, StandBy
from keepstep.core.events import Complained
from keepstep.core.types import Attempt, Generation, Lineage
from keepstep.core.worker import WorkerMachine, WorkerPhase
from keepstep.core.worker_events import (
    ApplyUpdate,
    CollectiveFailed,
    Complain,
    Connect,
    CutGroups,
    EnterGate,
    Interrupted,
    Leave,
    PlanAnnounced,
    Publish,
    ServeState,
    WorkerAction,
    WorkerEvent,
)
from keepstep.trainer.adapters.protected import Protected
from keepstep.trainer.adapters.shard import shard_identity
from keepstep.trainer.checks import Checks
from keepstep.trainer.elastic import Groups, Place
from keepstep.trainer.faults import Faults, read_check_faults
from keepstep.trainer.gloo import GlooFabric
from keepstep.trainer.keeper import Keeper
from keepstep.trainer.lending import Lender
from keepstep.trainer.link import Identity, Link
from keepstep.trainer.node_gate import NodeGate
from keepstep.trainer.peer import Directory
from keepstep.trainer.spare_check import SpareCheck
from keepstep.trainer.store import AgentStore
from keepstep.wire.messages import Fenced, JournalKept
from keepstep.wire.page import Page, Phase
from keepstep.wire.ring import Ring, ring_path
from keepstep.wire.tls import TlsFiles

if TYPE_CHECKING:
    from keepstep.trainer.ends import Ends

EXIT_FENCED = 73
EXIT_ORPHANED = 74
EXIT_STRANDED = 76
STRANDED_TIMEOUT_S = 600.0
COMPLAINT_REPEAT_S = 5.0
AWAITING = frozenset({WorkerPhase.WAIT, WorkerPhase.LOAD})


def _make_ring(identity: Identity) -> Ring | None:
    """The ring of collectives beside the page; a full shared memory must not stop training for its sake."""
    try:
        return Ring.create(ring_path(identity.page_path), identity.worker)
    except OSError:
        return None


class Released(BaseException):
    """All ranks have finished: nobody waits for this one any more."""


class Session:
    """What the parts of the trainer share: machine, groups, page, link, and the word of the controller."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.lock = threading.Condition(threading.RLock())
        self.machine = WorkerMachine(identity.worker)
        self.todo: deque[WorkerAction] = deque()
        self.serving: ServeState | None = None
        self.announced: Generation | None = None
        self.joined = False
        self.standby: StandBy | None = None
        self.prepare: Prepare | None = None  # a planned move: be built as its rank, and follow its source
        self.plan: Generation | None = None  # announced ahead, and names this spare
        self.lender = Lender(self)
        self.released = False
        self.rehearsing = False
        self.device_type = "cpu"
        self.ends: Ends | None = None
        self.fabric: GlooFabric | None = None
        self.store: AgentStore | None = None
        self.node_gate: NodeGate | None = None  # where all ranks share this node
        self.retired_stores: list[AgentStore] = []
        self.copying = threading.Event()  # set: whoever copies state stops
        self.protected = Protected()
        self.page = Page.open(identity.page_path)
        tls = TlsFiles.from_environment()
        self.directory = Directory(identity, None if tls is None else tls.client())
        self.link = Link(identity, self._on_message, self._orphaned)
        self.keeper = Keeper(
            self,
            self.page,
            self.link.welcome.record_ack_s,
            lambda route, own: self.directory.dial(route, "keep", own),
            self.link.send,
        )
        self.groups = Groups(self.link.welcome.world_size)
        self.groups.on_failure = self._on_collective_failure
        self.groups.on_stranded = self.strand
        self.groups.page = self.page
        self.groups.ring = _make_ring(identity)
        self.groups.observing = self.link.welcome.mode == "observe"
        self.checks = Checks(identity.worker, self.link.send, self.say)
        self.faults = Faults.from_environment(self)
        self.spare_check = SpareCheck(self, read_check_faults(os.environ.get("KEEPSTEP_FAULTS", "")))
        self.resumption_due = False
        self.final_step = 0
        self.closed_gates = 0  # passed after the last step: the loop's end, finish()
        self.link.start()

    # ---- what others ask ------------------------------------------------------------------------

    @property
    def worker(self) -> int:
        return self.identity.worker

    @property
    def world_size(self) -> int:
        return self.link.welcome.world_size

    @property
    def generation_number(self) -> int:
        generation = self.machine.generation
        return -1 if generation is None else generation.number

    @property
    def rank(self) -> int | None:
        """The rank that this worker plays in the generation it has entered; None for a spare."""
        generation = self.machine.generation
        return None if generation is None else generation.rank_of(self.worker)

    @property
    def live(self) -> bool:
        """Whether this process plays a rank: False while it rehearses."""
        return self.joined and not self.rehearsing

    @property
    def steps_done(self) -> int:
        """Committed steps of the script: without the gates after its last one."""
        return self.machine.step_count - self.closed_gates

    @property
    def next_lineage(self) -> Lineage:
        """The lineage once the attempt that is about to enter the gate, or has passed it, is applied."""
        return self.machine.lineage.extend(Attempt(self.generation_number, self.machine.step_count))

    @property
    def interrupted(self) -> bool:
        """Whether the gate that this worker stands at is over: its groups have failed, or are cut."""
        return self.groups.poisoned

    @property
    def must_turn(self) -> bool:
        """Whether the user's thread must go through recovery before it does anything else."""
        return self.groups.poisoned or bool(self.todo)

    def describe(self) -> str:
        """Who speaks: for log lines and errors."""
        return (
            f"job {self.identity.job}, rank {self.rank}, worker {self.worker}, "
            f"generation {self.generation_number}, step {self.machine.step_count}"
        )

    def say(self, text: str) -> None:
        """One line to this worker's log."""
        sys.stderr.write(f"keepstep [{self.describe()}]: {text}\n")
        sys.stderr.flush()

    # ---- the machine ----------------------------------------------------------------------------

    def tell(self, event: WorkerEvent) -> list[WorkerAction]:
        """Give the machine one event; do at once what must not wait, queue what the user's thread does."""
        with self.lock:
            actions = self.machine.step(event)
            for action in actions:
                self._carry_out(action)
            self.lock.notify_all()
        return actions

    def _carry_out(self, action: WorkerAction) -> None:
        match action:
            case EnterGate() | ApplyUpdate(roll=False):
                pass  # the gate reads these from the answer
            case Publish(step=step):
                self.page.published = step
            case CutGroups():
                self.cut(f"generation {self._newest_number()} was announced")
            case Complain(generation=generation, reason=reason):
                self._complain(generation, reason)
            case Leave(reason=reason):
                self.leave(reason)
            case ServeState() if self.machine.phase is WorkerPhase.DONOR:
                self.todo.append(action)  # it stands still: offered at once
            case ServeState():
                self.serving = action  # offered at the next boundary of a step
            case Connect():
                self.serving = None
                self.todo.clear()  # whatever was under way belongs to an older generation
                self.todo.append(action)
            case _:
                self.todo.append(action)

    def _complain(self, generation: int, reason: str) -> None:
        self.link.send(
            Complained(
                worker=self.worker,
                generation=generation,
                reason=reason,
                step=self.machine.step_count,
                published=self.page.published,
            )
        )

    def _on_collective_failure(self, reason: str) -> None:
        if self.groups.observing:
            self._complain(self.generation_number, reason)  # and no wait for a generation that will not come
        else:
            self.tell(CollectiveFailed(reason=reason))

    def _newest_number(self) -> int:
        newest = self.machine.next_generation or self.machine.generation
        return -1 if newest is None else newest.number

    def cut(self, reason: str) -> None:
        """Poison, and free whoever is blocked: in a collective, in the gate, in the store, in a copy."""
        self.groups.poison(reason, complain=False)
        self.copying.set()
        if self.fabric is not None:
            self.fabric.cut()
        if self.store is not None:
            self.store.cut()
        if self.node_gate is not None:
            self.node_gate.wake()
        self.keeper.interrupt()

    def next_action(self) -> WorkerAction:
        """Wait for what to do next. Raises Released. The link's orphan timeout bounds the wait."""
        repeat_s = time.monotonic() + COMPLAINT_REPEAT_S
        with self.lock:
            while True:
                if self.released:
                    raise Released
                if self.todo:
                    return self.todo.popleft()
                self.lock.wait(1.0)
                if time.monotonic() > repeat_s and self.machine.phase in AWAITING:
                    # A complaint may have died with a controller: a waiting worker says it again.
                    repeat_s = time.monotonic() + COMPLAINT_REPEAT_S
                    self.tell(CollectiveFailed(reason="still waits for a generation"))

    def is_current(self, generation: Generation) -> bool:
        """Whether `generation` is still the one to work for (call with the lock held to act on it)."""
        return self.generation_number == generation.number and self.machine.next_generation is None

    # ---- the controller's word ------------------------------------------------------------------

    def _on_message(self, message: Any) -> None:
        match message:
            case Announce(generation=generation, ahead=ahead):
                self.directory.note(message)
                self.keeper.turn(self.directory.keeper)
                self._hear_ahead(generation) if ahead else self._hear(generation)
            case Lend(target=target):
                self.lender.begin(target)
            case Prepare():
                with self.lock:
                    self.prepare = message
                    self.lock.notify_all()
            case StandBy():
                with self.lock:
                    self.standby = message
                    self.lock.notify_all()
            case CheckSpare():
                if not self.joined:
                    self.spare_check.again()
            case Release():
                with self.lock:
                    self.released = True
                    self.cut("every rank has finished")
                    self.lock.notify_all()
            case Fenced(reason=reason):
                self.leave(reason)
            case _:
                self.say(f"ignores a message that is not for a worker: {type(message).__name__}")

    def _hear(self, generation: Generation) -> None:
        with self.lock:
            if self.joined:
                self.tell(Interrupted(generation=generation))
                return
            older = self.announced
            if older is not None and generation.number <= older.number:
                return
            if self.worker in generation.members:
                self.announced = generation
                self.copying.set()  # what it copies ahead is of no use any more
                self.lock.notify_all()
            elif older is not None:
                self.leave(f"generation {generation.number} goes on without this spare")

    def _hear_ahead(self, generation: Generation) -> None:
        with self.lock:
            if self.joined:
                self.tell(PlanAnnounced(generation=generation))
            elif self.worker in generation.members:
                self.plan = generation
                self.lock.notify_all()

    def await_rank(self, *, symmetric: bool) -> Generation | None:
        """Park until a generation names this worker. None: rehearse meanwhile, because of init(symmetric=True)
        or as the rank that it is to take over."""
        with self.lock:
            while (
                self.announced is None
                and self.prepare is None
                and not (symmetric and self.standby is not None)
            ):
                if self.released:
                    self.leave("the job has finished", status=0)
                self.lock.wait(1.0)
            return self.announced

    def join(self) -> None:
        """From now on the announced generation, and every later one, is this worker's business."""
        with self.lock:
            assert self.announced is not None
            self.joined = True
            self.tell(Interrupted(generation=self.announced))

    # ---- setup ----------------------------------------------------------------------------------

    def learn_shard(self) -> None:
        """Which bytes this rank must hold, from the structure of what it protects."""
        shard = shard_identity(self.protected.parameters())
        with self.lock:
            self.machine.shard = shard
            if self.machine.has_state:
                self.machine.held_shard = shard

    def end_setup(self) -> None:
        """The script has built everything: hand its setup journal over, refuse stray collectives."""
        journal, self.groups.journal = self.groups.journal, None
        if journal is not None and self.rank is not None:
            journal.groups = [group.key for group in self.groups]
            self.link.send(JournalKept(worker=self.worker, rank=self.rank, data=journal.to_bytes()))
        self.groups.settle(place=Place.OUTSIDE)

    # ---- ends -----------------------------------------------------------------------------------

    def leave(self, reason: str, *, status: int = EXIT_FENCED) -> NoReturn:
        """End this process at once: its id is never used again."""
        try:
            self.say(f"leaves: {reason}")
            sys.stdout.flush()
        finally:
            self.end_now(status)

    def end_now(self, status: int) -> NoReturn:
        """End without another word; the page keeps the status for an agent that is not there to see it."""
        self.page.exit_status = status
        os._exit(status)

    def _orphaned(self, alone_s: float) -> None:
        reason = f"job {self.identity.job} has had no agent on this node for {alone_s:.0f} s"
        self.leave(reason, status=EXIT_ORPHANED)

    def strand(self) -> None:
        """A failure in setup: every rank starts again, so wait to be ended. Observing: an error like any other."""
        if self.groups.observing:
            raise ConnectionError(f"a peer failed during setup: {self.groups.failed}")
        self.page.enter(Phase.WAITING)
        self.say("a peer failed during setup: every rank starts again")
        threading.Event().wait(STRANDED_TIMEOUT_S)
        self.leave(f"nobody restarted the job in {STRANDED_TIMEOUT_S:.0f} s", status=EXIT_STRANDED)

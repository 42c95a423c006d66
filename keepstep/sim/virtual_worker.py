"""A worker without tensors: it drives the shipped WorkerMachine as the trainer does.

What it really holds (`content`, `gradients`, `torn`) is kept apart from what the machine says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from keepstep.core.events import (
    Complained,
    Progressed,
    Resumed,
    StateReceived,
    VerdictReached,
    WorkerFinished,
    WorkerParked,
)
from keepstep.core.types import Generation
from keepstep.core.worker import WorkerMachine
from keepstep.core.worker_events import (
    ApplyUpdate,
    BlockEnded,
    CastVote,
    CollectiveFailed,
    Complain,
    Connect,
    Connected,
    CopyCompleted,
    CopyStarted,
    CutGroups,
    EnterGate,
    GatePassed,
    GradientsCompleted,
    Interrupted,
    Leave,
    LoadCheckpoint,
    Publish,
    ReceiveState,
    RedoStep,
    SafePointReached,
    ServeState,
    StepStarted,
    VotesCounted,
    WorkerEvent,
)
from keepstep.core.worker_phase import WorkerPhase
from keepstep.sim.agenda import Channel
from keepstep.sim.invariants import Content
from keepstep.sim.room import Room

if TYPE_CHECKING:
    from keepstep.sim.cluster import Cluster


REPEAT_S = 5.0


class VirtualWorker:
    """One virtual process on a slot of a node."""

    def __init__(self, cluster: Cluster, machine: WorkerMachine, node: str, slot: int) -> None:
        self.cluster = cluster
        self.machine = machine
        self.number = machine.worker
        self.node = node
        self.slot = slot
        self.alive = True
        self.stopped = False
        self.backlog: list[Callable[[], None]] = []
        self.token = 0  # grows whenever the user's thread takes another way: older errands are void
        self.readiness = ""
        self.shard = ""
        self.content: Content | None = None
        self.torn = False
        self.gradients: tuple[int, Content] | None = None
        self.room: Room | None = None
        self.published = 0
        self.resumed_in = -1
        self.finished = False
        self.status: int | None = None
        self.channel = Channel(cluster.agenda)

    # ---- a spare's life -------------------------------------------------------------------------

    def reach_init(self) -> None:
        self._park("warm")

    def stand_by(self) -> None:
        self.cluster.later(self, self.cluster.delay(1.0), lambda: self._park("hot"))

    def _park(self, readiness: str) -> None:
        if self.machine.phase is WorkerPhase.PARKED:
            self.readiness = readiness
            self.cluster.tell(f"w{self.number} is parked, {readiness}")
            self.cluster.report(self, WorkerParked(worker=self.number, readiness=readiness))

    # ---- driving the machine --------------------------------------------------------------------

    def take(self, event: WorkerEvent) -> None:
        """Give the machine an event and carry out what it answers."""
        for action in self.machine.step(event):
            match action:
                case EnterGate():
                    assert self.room is not None
                    self.room.contribute(self, "gate", self.machine.step_count, action.pending)
                case Complain():
                    self._complain(action)
                case CutGroups():
                    self._cut()
                case Connect():
                    self._connect(action.generation)
                case CastVote():
                    assert self.room is not None
                    self.room.vote(self, action.vote)
                case ApplyUpdate():
                    self._apply()
                case RedoStep():
                    self.gradients = None
                    self._next_step()
                case ReceiveState():
                    assert self.room is not None
                    self.room.receive(self, action.sources)
                case ServeState():
                    assert self.room is not None
                    self.room.serve(self)
                case LoadCheckpoint():
                    # Without a live copy the controller starts the world again; no wait is endless.
                    self._after(REPEAT_S, lambda: self.take(CollectiveFailed(reason="nobody answers")))
                case Publish():
                    self.published = max(self.published, action.step)
                    assert self.machine.generation is not None
                    self.cluster.invariants.step_published(self.machine.generation.number, action.step)
                case Leave():
                    self.cluster.tell(f"w{self.number} leaves: {action.reason}")
                    self.cluster.exit(self, 0)
        if self.alive:
            self.cluster.invariants.check(self)

    def interrupt(self, generation: Generation) -> None:
        self.take(Interrupted(generation=generation))

    def release(self) -> None:
        """All ranks have finished: leave, wherever the thread stands."""
        self.cluster.exit(self, 0)

    def _complain(self, action: Complain) -> None:
        self.cluster.tell(f"w{self.number} complains about generation {action.generation}: {action.reason}")
        self.cluster.report(
            self,
            Complained(
                worker=self.number,
                generation=action.generation,
                reason=action.reason,
                step=self.machine.step_count,
                published=self.cluster.page_published(self),
            ),
        )
        if self.machine.phase is WorkerPhase.TURN:
            self._run_on_with_rubbish()
        self._after(REPEAT_S, self._repeat)

    def _repeat(self) -> None:
        """Nobody has answered: say it again, whoever may have forgotten it."""
        if self.machine.phase is WorkerPhase.WAIT:
            self.take(CollectiveFailed(reason="nobody answers"))
        elif self.machine.phase in (WorkerPhase.TURN, WorkerPhase.UPDATE, WorkerPhase.ROLL):
            self._after(REPEAT_S, self._repeat)

    def _cut(self) -> None:
        if self.room is not None:
            self.room.leave(self)
        if self.machine.phase is WorkerPhase.TURN:
            self._run_on_with_rubbish()

    def _run_on_with_rubbish(self) -> None:
        self._turn()
        self._errand(0.05, lambda: self.take(SafePointReached()))

    def _turn(self) -> None:
        self.token += 1

    def _errand(self, within_s: float, errand: Callable[[], None]) -> None:
        """Something that the user's thread does next, unless it is turned round before."""
        self._after(self.cluster.delay(within_s), errand)

    def _after(self, delay_s: float, errand: Callable[[], None]) -> None:
        token = self.token

        def run() -> None:
            if self.token == token:
                errand()

        self.cluster.later(self, delay_s, run)

    def _connect(self, generation: Generation) -> None:
        if self.room is not None:
            self.room.leave(self)
        self._turn()
        rank = generation.rank_of(self.number)
        assert rank is not None
        self.machine.shard = self.cluster.story.shards[rank]
        self.room = self.cluster.room(generation)
        self.cluster.tell(f"w{self.number} connects as rank {rank} of generation {generation.number}")
        self.room.arrive(self)

    def connected(self, room: Room) -> None:
        self._turn()
        if room.generation.fresh:
            self.content, self.torn, self.shard = (), False, self.machine.shard
        self.take(Connected(generation=room.generation.number))
        if self.machine.phase is WorkerPhase.RUN:
            self._next_step()

    def connect_timed_out(self, room: Room) -> None:
        if self.room is room and self.machine.phase is WorkerPhase.CONNECT:
            room.waiting.pop(self.number, None)
            self._turn()
            self.take(CollectiveFailed(reason="not all members connected in time"))

    def votes_counted(self, room: Room) -> None:
        self._turn()
        number = room.generation.number
        self.take(VotesCounted(generation=number, votes=tuple(room.votes.values())))
        verdict = self.machine.verdict
        if not self.alive or verdict is None:
            return
        course = verdict.courses[self.number]
        self.cluster.tell(
            f"w{self.number} learns the verdict of generation {number}: {course}, {verdict.reason}"
        )
        self.cluster.invariants.verdict_learnt(self, number, verdict)
        self.cluster.report(
            self,
            VerdictReached(
                worker=self.number,
                generation=number,
                target=verdict.target,
                course=course.value,
                reason=verdict.reason,
                connect_s=0.0,
                vote_s=0.0,
            ),
        )

    def saw_failure(self, room: Room, token: int) -> None:
        if self.token != token or self.room is not room:
            return
        room.waiting.pop(self.number, None)
        masked = self.machine.masked
        if not masked:
            self._turn()
        self.take(CollectiveFailed(reason="a connection was closed"))

    # ---- a step ---------------------------------------------------------------------------------

    def _next_step(self) -> None:
        self._errand(0.02, self._start_step)

    def _start_step(self) -> None:
        self.take(StepStarted())
        if self.machine.step_count >= self.cluster.story.steps:
            self._errand(0.01, self._complete)  # the end of the loop: a last, empty gate
        else:
            self._errand(0.05, self._contribute)

    def _contribute(self) -> None:
        assert self.room is not None
        self.room.contribute(self, "gradients", self.machine.step_count)

    def gradients_completed(self, room: Room) -> None:
        self._complete()

    def _complete(self) -> None:
        assert self.machine.generation is not None
        assert self.content is not None
        if self.machine.step_count < self.cluster.story.steps:
            self.gradients = (self.machine.generation.number, self.content)
        self._turn()
        self.take(GradientsCompleted())

    def gate_passed(self, pending: int) -> None:
        step = self.machine.step_count
        self._turn()
        self.cluster.tell(f"w{self.number} passes the gate of step {step}")
        if step >= self.cluster.story.steps:
            self.finished = True
            self.take(GatePassed(pending=pending))
            assert self.machine.generation is not None
            generation = self.machine.generation.number
            self.cluster.report(self, WorkerFinished(worker=self.number, step=step, generation=generation))
            self._errand(0.05, lambda: self.cluster.exit(self, 0))
            return
        self.take(GatePassed(pending=pending))

    def _apply(self) -> None:
        if self.machine.step_count >= self.cluster.story.steps:
            return
        if self.room is not None and self.room.broken and self.cluster.chance(0.2):
            room, token = self.room, self.token
            self.cluster.later(self, 0.0, lambda: self.saw_failure(room, token))
        self._errand(0.02, self._update)

    def _update(self) -> None:
        """The optimizer has begun: from here to the end of the block the state is half old, half new."""
        assert self.content is not None
        assert self.gradients is not None
        number, base = self.gradients
        self.cluster.invariants.update_applied(self, self.content, base)
        self.content, self.gradients, self.torn = (*self.content, number), None, True
        self._errand(0.02, self._end_block)

    def _end_block(self) -> None:
        self.torn = False
        rolled = self.machine.phase is WorkerPhase.ROLL
        generation = self.machine.generation
        assert generation is not None
        self.take(BlockEnded())
        step = self.machine.step_count
        self.cluster.tell(
            f"w{self.number} has committed {step} steps{' by rolling forward' if rolled else ''}"
        )
        if not rolled and self.resumed_in != generation.number:
            self.resumed_in = generation.number
            self.cluster.report(self, Resumed(worker=self.number, generation=generation.number, step=step))
        if self.cluster.chance(0.5):
            published = self.cluster.page_published(self)
            self.cluster.report(
                self,
                Progressed(worker=self.number, generation=generation.number, step=step, published=published),
            )
        if self.machine.phase is WorkerPhase.RUN:
            self._turn()
            self._next_step()

    # ---- receiving ------------------------------------------------------------------------------

    def copy_started(self) -> None:
        self.cluster.tell(f"w{self.number} receives the first byte")
        self.content, self.gradients, self.torn = None, None, True
        self.take(CopyStarted())

    def copy_completed(self, source: VirtualWorker) -> None:
        self._turn()
        self.content, self.torn, self.shard = source.content, source.torn, source.shard
        self.cluster.tell(f"w{self.number} holds verified state from w{source.number}")
        self.take(CopyCompleted())
        generation = self.machine.generation
        assert generation is not None
        self.cluster.report(
            self,
            StateReceived(
                worker=self.number,
                generation=generation.number,
                transfer_s=0.0,
                bytes=0,
                sources=(source.number,),
            ),
        )
        if self.machine.phase is WorkerPhase.RUN:
            self._next_step()

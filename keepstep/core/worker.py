"""The worker's machine: the protocol's table for one process, row by row, and nothing else.

The trainer (or a virtual worker of the simulator) tells it events and carries out the actions
that come back, in order. It holds no tensors, no sockets and no clock: only what the worker may
say about its own state, which is what the vote rests on.

How to drive it
---------------
* Calls must not overlap: the caller holds one lock around `step`. Events come from two threads,
  the user's (steps, gate, safe points) and the one that listens (`Interrupted`, `PlanAnnounced`).
  An action that blocks (`Connect`, `CastVote`, `ReceiveState` ...) belongs to the user's thread,
  whichever thread got it; `CutGroups` and `Leave` are carried out at once by whoever got them.
* A step: `StepStarted`, forward and backward, `GradientsCompleted` -> EnterGate, `GatePassed` ->
  Publish + ApplyUpdate(roll=False); then `BlockEnded` once scheduler, RNG and cursor are done.
  The end of the loop is a last gate of an empty step: `GradientsCompleted`, `GatePassed`, leave.
* A failure: `CollectiveFailed` -> Complain. The groups are poisoned from then on, the user's code
  runs on with rubbish, and the user's thread says `SafePointReached` where it can be turned round.
  While nothing comes (WAIT, LOAD) it repeats `CollectiveFailed` every few seconds: a controller
  that crashed may have heard the complaint and forgotten it.
* `Interrupted` cuts at once; `Connect` comes when the thread stands at a safe point: with that
  very call when it already does, else with `SafePointReached` or, masked, with `BlockEnded`.
  After an interrupt `GradientsCompleted` and `GatePassed` count as safe points only, since
  poisoned collectives return rubbish.
* `Connect` -> `Connected` -> CastVote -> `VotesCounted` -> RedoStep | ApplyUpdate(roll=True), then
  `BlockEnded` | ReceiveState, then `CopyStarted` and `CopyCompleted` | LoadCheckpoint, then
  `CheckpointLoaded`. After the last two the worker runs from the start of step `step_count`, with
  the record of that step. ServeState stands beside them where this worker holds what others need; after
  a roll it comes with `BlockEnded`, since only then is the state at the target.
* The first generation is fresh: `Connect`, `Connected`, and the worker runs, without a vote.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from keepstep.core.types import Attempt, Checkpoint, Course, Generation, Lineage, Verdict, Vote
from keepstep.core.verdict import sources_for, targets_for, verdict
from keepstep.core.worker_events import (
    ApplyUpdate,
    BlockEnded,
    CastVote,
    CheckpointLoaded,
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
    PlanAnnounced,
    PlanDue,
    Publish,
    ReceiveState,
    RedoStep,
    SafePointReached,
    ServeState,
    StateAdopted,
    StepStarted,
    VotesCounted,
    WorkerAction,
    WorkerEvent,
)
from keepstep.core.worker_phase import MASKED, STANDING, WorkerPhase
from keepstep.core.worker_plan import PlannedSwitch
from keepstep.errors import InvariantError

HISTORY_LENGTH = 32
__all__ = ["WorkerMachine", "WorkerPhase"]


class WorkerMachine(PlannedSwitch):
    """One worker's part of the protocol: `step(event)` answers with the actions to carry out.

    `shard`: identity of the bytes that the worker's rank must hold; `held_shard`: of those it
    holds; `checkpoint`: the newest complete one it can see. The owner sets these three when it
    learns them, at the latest before `Connected`, and only reads the others. `step_count`: committed
    steps, so k while step k is computed; `attempt`: complete gradients, not applied yet.
    """

    def __init__(self, worker: int) -> None:
        super().__init__()
        self.worker = worker
        self.shard: str = ""
        self.held_shard: str | None = None
        self.checkpoint: Checkpoint | None = None
        self.phase = WorkerPhase.PARKED
        self.generation: Generation | None = None
        self.next_generation: Generation | None = None  # announced, not entered yet
        self._awaited_plan = 0  # the gate said so, but the map is not known here yet
        self._gate_value = 0  # what the passed gate said about a planned generation
        self._failed_masked = False
        self.has_state = False
        self.step_count = 0
        self.lineage = Lineage()
        self.attempt: Attempt | None = None
        self.verdict: Verdict | None = None
        self._votes: tuple[Vote, ...] = ()
        self._history: deque[tuple[WorkerPhase, WorkerEvent]] = deque(maxlen=HISTORY_LENGTH)

    @property
    def masked(self) -> bool:
        """Whether interrupts are deferred: the update is being applied."""
        return self.phase in MASKED

    # ---- the machine ----------------------------------------------------------------------------

    def step(self, event: WorkerEvent) -> list[WorkerAction]:
        """Take one event. Raises InvariantError for an event that cannot happen in this phase."""
        self._history.append((self.phase, event))
        if self.phase is WorkerPhase.LEFT:
            return []
        row = TABLE.get((self.phase, type(event)), TABLE.get((None, type(event))))
        if row is None:
            raise self._broken(event, "no row of the table fits")
        return row(self, event)

    def _broken(self, event: object, what: str) -> InvariantError:
        story = "\n  ".join(f"{phase}: {past}" for phase, past in self._history)
        return InvariantError(
            f"worker {self.worker} in phase {self.phase} (generation "
            f"{self.generation.number if self.generation else None}, step {self.step_count}) "
            f"got {event}: {what}. Last events:\n  {story}"
        )

    # ---- rows: training -------------------------------------------------------------------------

    def _complete_gradients(self, event: GradientsCompleted) -> list[WorkerAction]:
        assert self.generation is not None
        self.attempt = Attempt(self.generation.number, self.step_count)
        self.phase = WorkerPhase.GATE
        return [EnterGate(pending=self._pending())]

    def _pass_gate(self, event: GatePassed) -> list[WorkerAction]:
        self.phase = WorkerPhase.UPDATE
        self._gate_value = event.pending
        # Every rank contributed to this gate, so every rank holds the steps before it.
        return [Publish(step=self.step_count), ApplyUpdate(roll=False)]

    def _end_update(self, event: BlockEnded) -> list[WorkerAction]:
        self._commit()
        pending, self._gate_value = self._gate_value, 0
        failed, self._failed_masked = self._failed_masked, False
        if self.next_generation is not None:
            return self._enter_next()
        if pending and self.generation is not None and pending > self.generation.number:
            if self._plan is not None and self._plan.number == pending:
                return self._switch_to(self._plan)
            self._awaited_plan = pending
            self.phase = WorkerPhase.WAIT
            return []
        self.phase = WorkerPhase.WAIT if failed else WorkerPhase.RUN
        return []

    def _end_roll(self, event: BlockEnded) -> list[WorkerAction]:
        self._commit()
        failed, self._failed_masked = self._failed_masked, False
        if self.next_generation is not None:
            return self._enter_next()
        self.phase = WorkerPhase.WAIT if failed else self._training_phase()
        return [] if failed else self._serve()

    def _commit(self) -> None:
        """Gradients become state; `step_count` is written last."""
        if self.attempt is None:
            raise self._broken("a commit", "there are no complete gradients to apply")
        attempt, self.attempt = self.attempt, None
        self.lineage = self.lineage.extend(attempt)
        self.step_count += 1

    # ---- rows: failures and interrupts ----------------------------------------------------------

    def _fail_in_flight(self, event: CollectiveFailed) -> list[WorkerAction]:
        """State and gradients stay: this worker may be the only holder of its shard's gradients."""
        self.phase = WorkerPhase.TURN
        return [self._complaint(event)]

    def _fail_standing(self, event: CollectiveFailed) -> list[WorkerAction]:
        self.phase = WorkerPhase.WAIT
        return [self._complaint(event)]

    def _fail_masked(self, event: CollectiveFailed) -> list[WorkerAction]:
        """The update is local and goes on; the complaint need not wait for it."""
        first, self._failed_masked = not self._failed_masked, True
        return [self._complaint(event)] if first else []

    def _ignore(self, event: WorkerEvent) -> list[WorkerAction]:
        return []

    def _interrupt(self, event: Interrupted) -> list[WorkerAction]:
        new = event.generation
        known = self.next_generation or self.generation
        if known is not None and new.number <= known.number:
            return []
        if known is None and self.worker not in new.members:
            return []  # a spare that this generation does not need
        if self.worker not in new.members:
            return self._leave(f"generation {new.number} goes on without worker {self.worker}: it is fenced")
        if known is not None and new.fresh:
            return self._leave(f"generation {new.number} starts afresh: worker {self.worker} is older")
        if known is None:
            self.next_generation = new
            return self._enter_next()
        self.next_generation = new
        if self.phase in STANDING:
            return [CutGroups(), *self._enter_next()]
        if self.phase not in MASKED:
            self.phase = WorkerPhase.TURN
        return [CutGroups()]

    def _stand(self, event: WorkerEvent) -> list[WorkerAction]:
        """The user's thread can be turned round now."""
        if self.next_generation is not None:
            return self._enter_next()
        self.phase = WorkerPhase.WAIT
        return []

    def _enter_next(self) -> list[WorkerAction]:
        new, self.next_generation = self.next_generation, None
        assert new is not None
        self.generation, self._plan, self._due, self._awaited_plan = new, None, None, 0
        self.verdict, self._votes, self._gate_value, self._failed_masked = None, (), 0, False
        self.phase = WorkerPhase.CONNECT
        return [Connect(generation=new)]

    def _complaint(self, event: CollectiveFailed) -> Complain:
        assert self.generation is not None
        return Complain(generation=self.generation.number, reason=event.reason)

    def _leave(self, reason: str) -> list[WorkerAction]:
        self.phase = WorkerPhase.LEFT
        return [Leave(reason=reason)]

    # ---- rows: vote and verdict -----------------------------------------------------------------

    def _connect(self, event: Connected) -> list[WorkerAction]:
        generation = self.generation
        if generation is None or event.generation != generation.number:
            return []
        if generation.fresh:
            self.has_state, self.step_count, self.lineage, self.attempt = True, 0, Lineage(), None
            self.held_shard = self.shard
            self.phase = WorkerPhase.RUN
            return []
        self.phase = WorkerPhase.VOTE
        return [CastVote(vote=self._vote(generation))]

    def _vote(self, generation: Generation) -> Vote:
        rank = generation.rank_of(self.worker)
        assert rank is not None
        return Vote(
            worker=self.worker,
            rank=rank,
            shard=self.shard,
            held_shard=self.held_shard if self.has_state else None,
            step=self.step_count if self.has_state else None,
            lineage=self.lineage if self.has_state else None,
            attempt=self.attempt if self.has_state else None,
            checkpoint=self.checkpoint,
        )

    def _count_votes(self, event: VotesCounted) -> list[WorkerAction]:
        assert self.generation is not None
        if event.generation != self.generation.number:
            return []
        if sorted(vote.worker for vote in event.votes) != sorted(self.generation.members):
            raise self._broken(event, "the votes are not exactly those of the generation's members")
        self._votes, self.verdict = event.votes, verdict(event.votes)
        match self.verdict.courses[self.worker]:
            case Course.KEEP:
                self.attempt = None
                self.phase = self._training_phase()
                return [*self._serve(), *([RedoStep()] if self.phase is WorkerPhase.RUN else [])]
            case Course.ROLL:
                self.phase = WorkerPhase.ROLL
                return [ApplyUpdate(roll=True)]
            case Course.RECEIVE if self._is_donor():
                # It lags behind and nobody needs what it has; it computes nothing, so it copies nothing.
                self.has_state, self.attempt, self.phase = False, None, WorkerPhase.DONOR
                return []
            case Course.RECEIVE:
                self.phase = WorkerPhase.RECEIVE
                sources = sources_for(self._votes, self.verdict.courses, self.worker)
                return [ReceiveState(sources=sources, verdict=self.verdict)]
            case Course.ROLLBACK:
                self.phase = WorkerPhase.LOAD
                return [LoadCheckpoint(verdict=self.verdict)]

    def _start_copy(self, event: CopyStarted) -> list[WorkerAction]:
        self.has_state, self.attempt = False, None
        return []

    def _complete_copy(self, event: CopyCompleted) -> list[WorkerAction]:
        assert self.verdict is not None
        if self.has_state or self.verdict.target is None or self.verdict.lineage is None:
            raise self._broken(event, "the copy was never started")
        self.step_count, self.lineage = self.verdict.target, self.verdict.lineage
        return self._hold()

    def _load_checkpoint(self, event: CheckpointLoaded) -> list[WorkerAction]:
        assert self.verdict is not None
        named = self.verdict.checkpoint
        self.step_count = named.step if named else 0
        self.lineage = Lineage(named.lineage, named.step) if named else Lineage()
        return self._hold()

    def _hold(self) -> list[WorkerAction]:
        self.has_state, self.held_shard, self.attempt = True, self.shard, None
        self.phase = self._training_phase()
        return []

    def _serve(self) -> list[WorkerAction]:
        assert self.verdict is not None
        assert self.generation is not None
        targets = targets_for(self._votes, self.verdict.courses, self.worker)
        playing = tuple(target for target in targets if target in self.generation.ranks)
        return [ServeState(targets=playing, verdict=self.verdict)] if playing else []

    def _is_donor(self) -> bool:
        return self.generation is not None and self.worker in self.generation.donors

    def _training_phase(self) -> WorkerPhase:
        return WorkerPhase.DONOR if self._is_donor() else WorkerPhase.RUN


_P = WorkerPhase
_M = WorkerMachine
Row = Callable[[WorkerMachine, Any], list[WorkerAction]]

# The one table: (phase, event) -> row. A phase of None stands for every phase without a row of its
# own; what is not here cannot happen.
TABLE: dict[tuple[WorkerPhase | None, type], Row] = {
    (_P.RUN, StepStarted): _M._ignore,
    (_P.RUN, BlockEnded): _M._ignore,  # a block without an update: a micro-batch
    (_P.RUN, GradientsCompleted): _M._complete_gradients,
    (_P.GATE, GatePassed): _M._pass_gate,
    (_P.UPDATE, BlockEnded): _M._end_update,
    (_P.ROLL, BlockEnded): _M._end_roll,
    # failures
    (_P.RUN, CollectiveFailed): _M._fail_in_flight,
    (_P.GATE, CollectiveFailed): _M._fail_in_flight,
    (_P.UPDATE, CollectiveFailed): _M._fail_masked,
    (_P.ROLL, CollectiveFailed): _M._fail_masked,
    (_P.CONNECT, CollectiveFailed): _M._fail_standing,
    (_P.VOTE, CollectiveFailed): _M._fail_standing,
    (_P.RECEIVE, CollectiveFailed): _M._fail_standing,
    (_P.LOAD, CollectiveFailed): _M._fail_standing,
    (_P.DONOR, CollectiveFailed): _M._fail_standing,
    (_P.WAIT, CollectiveFailed): _M._fail_standing,  # nobody answered in time: complain again
    (None, CollectiveFailed): _M._ignore,  # it has complained already, or plays nothing
    # interrupts
    (None, Interrupted): _M._interrupt,
    (None, PlanAnnounced): _M._hear_plan,
    (None, PlanDue): _M._hear_due,
    (_P.PARKED, StateAdopted): _M._adopt_state,
    (_P.PARKED, CopyStarted): _M._drop_adopted,
    (None, StateAdopted): _M._ignore,  # a generation was announced meanwhile: it says what state is worth
    # turning round: whatever a poisoned step says, it only means that the thread got there
    (_P.TURN, SafePointReached): _M._stand,
    (_P.TURN, StepStarted): _M._stand,
    (_P.TURN, GradientsCompleted): _M._stand,
    (_P.TURN, GatePassed): _M._stand,
    (_P.TURN, BlockEnded): _M._stand,
    (None, SafePointReached): _M._ignore,
    # vote and verdict; an answer that comes after its generation is over says nothing
    (_P.CONNECT, Connected): _M._connect,
    (_P.VOTE, VotesCounted): _M._count_votes,
    (_P.RECEIVE, CopyStarted): _M._start_copy,
    (_P.RECEIVE, CopyCompleted): _M._complete_copy,
    (_P.LOAD, CheckpointLoaded): _M._load_checkpoint,
    **{(None, late): _M._ignore for late in (Connected, VotesCounted, CopyStarted, CopyCompleted)},
    (None, CheckpointLoaded): _M._ignore,
}

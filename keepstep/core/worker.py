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

import enum
from collections import deque
from collections.abc import Callable

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
    Publish,
    ReceiveState,
    RedoStep,
    SafePointReached,
    ServeState,
    StepStarted,
    VotesCounted,
    WorkerAction,
    WorkerEvent,
)
from keepstep.errors import InvariantError

HISTORY_LENGTH = 32


class WorkerPhase(enum.StrEnum):
    """Where a worker stands in the protocol."""

    PARKED = "parked"  # a spare: no generation yet
    RUN = "run"  # between steps, forward or backward
    GATE = "gate"  # contributed to the gate, no answer yet
    UPDATE = "update"  # MASK: the gate passed, until the block has ended
    ROLL = "roll"  # MASK: applies its own gradients because the verdict says so
    TURN = "turn"  # poisoned; the user's thread is on its way to a safe point
    WAIT = "wait"  # stands at a safe point until a newer generation is announced
    CONNECT = "connect"  # waits for all members of its generation
    VOTE = "vote"  # has voted, waits for the others' votes
    RECEIVE = "receive"  # copies state
    LOAD = "load"  # loads the checkpoint that the verdict names
    DONOR = "donor"  # computes nothing, serves copies
    LEFT = "left"  # fenced or unneeded: out for good


MASKED = frozenset({WorkerPhase.UPDATE, WorkerPhase.ROLL})
# The user's thread stands in Keepstep's own code here, so an interrupt can turn it round at once.
STANDING = frozenset(
    {
        WorkerPhase.PARKED,
        WorkerPhase.WAIT,
        WorkerPhase.CONNECT,
        WorkerPhase.VOTE,
        WorkerPhase.RECEIVE,
        WorkerPhase.LOAD,
        WorkerPhase.DONOR,
    }
)


class WorkerMachine:
    """One worker's part of the protocol: `step(event)` answers with the actions to carry out.

    `shard`: identity of the bytes that the worker's rank must hold; `held_shard`: of those it
    holds; `checkpoint`: the newest complete one it can see. The owner sets all three when it
    learns them, at the latest before `Connected`.
    """

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.shard: str = ""
        self.held_shard: str | None = None
        self.checkpoint: Checkpoint | None = None
        self._phase = WorkerPhase.PARKED
        self._generation: Generation | None = None
        self._next: Generation | None = None  # announced, not entered yet
        self._plan: Generation | None = None  # announced ahead: goes into the gate
        self._awaited_plan = 0  # the gate said so, but the map is not known here yet
        self._gate_value = 0  # what the passed gate said about a planned generation
        self._failed_masked = False
        self._has_state = False
        self._step_count = 0
        self._lineage = Lineage()
        self._attempt: Attempt | None = None
        self._verdict: Verdict | None = None
        self._votes: tuple[Vote, ...] = ()
        self._history: deque[tuple[WorkerPhase, WorkerEvent]] = deque(maxlen=HISTORY_LENGTH)

    # ---- what others may read -------------------------------------------------------------------

    @property
    def phase(self) -> WorkerPhase:
        return self._phase

    @property
    def generation(self) -> Generation | None:
        """The generation this worker has entered (its groups are, or are being, connected for)."""
        return self._generation

    @property
    def next_generation(self) -> Generation | None:
        """Announced, but not entered: the user's thread has not reached a safe point."""
        return self._next

    @property
    def rank(self) -> int | None:
        return None if self._generation is None else self._generation.rank_of(self.worker)

    @property
    def step_count(self) -> int:
        """Committed steps; while step k is computed this is k."""
        return self._step_count

    @property
    def lineage(self) -> Lineage:
        return self._lineage

    @property
    def attempt(self) -> Attempt | None:
        """The complete, unapplied gradients that this worker holds."""
        return self._attempt

    @property
    def has_state(self) -> bool:
        return self._has_state

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of the newest vote that was counted here."""
        return self._verdict

    @property
    def masked(self) -> bool:
        """Whether interrupts are deferred: the update is being applied."""
        return self._phase in MASKED

    # ---- the machine ----------------------------------------------------------------------------

    def step(self, event: WorkerEvent) -> list[WorkerAction]:
        """Take one event. Raises InvariantError for an event that cannot happen in this phase."""
        self._history.append((self._phase, event))
        if self._phase is WorkerPhase.LEFT:
            return []
        row = TABLE.get((self._phase, type(event)), TABLE.get((None, type(event))))
        if row is None:
            raise self._broken(event, "no row of the table fits")
        return row(self, event)

    def _broken(self, event: object, what: str) -> InvariantError:
        story = "\n  ".join(f"{phase}: {past}" for phase, past in self._history)
        return InvariantError(
            f"worker {self.worker} in phase {self._phase} (generation "
            f"{self._generation.number if self._generation else None}, step {self._step_count}) "
            f"got {event}: {what}. Last events:\n  {story}"
        )

    # ---- rows: training -------------------------------------------------------------------------

    def _start_step(self, event: StepStarted) -> list[WorkerAction]:
        return []

    def _complete_gradients(self, event: GradientsCompleted) -> list[WorkerAction]:
        assert self._generation is not None
        self._attempt = Attempt(self._generation.number, self._step_count)
        self._phase = WorkerPhase.GATE
        return [EnterGate(pending=self._pending())]

    def _pass_gate(self, event: GatePassed) -> list[WorkerAction]:
        self._phase = WorkerPhase.UPDATE
        self._gate_value = event.pending
        # Every rank contributed to this gate, so every rank holds the steps before it.
        return [Publish(step=self._step_count), ApplyUpdate(roll=False)]

    def _end_update(self, event: BlockEnded) -> list[WorkerAction]:
        self._commit()
        pending, self._gate_value = self._gate_value, 0
        failed, self._failed_masked = self._failed_masked, False
        if self._next is not None:
            return self._enter_next()
        if pending and self._generation is not None and pending > self._generation.number:
            if self._plan is not None and self._plan.number == pending:
                return self._switch_to(self._plan)
            self._awaited_plan = pending
            self._phase = WorkerPhase.WAIT
            return []
        self._phase = WorkerPhase.WAIT if failed else WorkerPhase.RUN
        return []

    def _end_roll(self, event: BlockEnded) -> list[WorkerAction]:
        self._commit()
        failed, self._failed_masked = self._failed_masked, False
        if self._next is not None:
            return self._enter_next()
        self._phase = WorkerPhase.WAIT if failed else self._training_phase()
        return [] if failed else self._serve()

    def _commit(self) -> None:
        """Gradients become state; `step_count` is written last."""
        if self._attempt is None:
            raise self._broken("a commit", "there are no complete gradients to apply")
        attempt, self._attempt = self._attempt, None
        self._lineage = self._lineage.extend(attempt)
        self._step_count += 1

    # ---- rows: failures and interrupts ----------------------------------------------------------

    def _fail_in_flight(self, event: CollectiveFailed) -> list[WorkerAction]:
        """State and gradients stay: this worker may be the only holder of its shard's gradients."""
        self._phase = WorkerPhase.TURN
        return [self._complaint(event)]

    def _fail_standing(self, event: CollectiveFailed) -> list[WorkerAction]:
        self._phase = WorkerPhase.WAIT
        return [self._complaint(event)]

    def _fail_masked(self, event: CollectiveFailed) -> list[WorkerAction]:
        """The update is local and goes on; the complaint need not wait for it."""
        first, self._failed_masked = not self._failed_masked, True
        return [self._complaint(event)] if first else []

    def _ignore(self, event: WorkerEvent) -> list[WorkerAction]:
        return []

    def _interrupt(self, event: Interrupted) -> list[WorkerAction]:
        new = event.generation
        known = self._next or self._generation
        if known is not None and new.number <= known.number:
            return []
        if known is None and self.worker not in new.members:
            return []  # a spare that this generation does not need
        if self.worker not in new.members:
            return self._leave(f"generation {new.number} goes on without worker {self.worker}: it is fenced")
        if known is not None and new.fresh:
            return self._leave(
                f"generation {new.number} starts afresh: worker {self.worker} is of an older one"
            )
        if known is None:
            self._next = new
            return self._enter_next()
        self._next = new
        if self._phase in STANDING:
            return [CutGroups(), *self._enter_next()]
        if self._phase not in MASKED:
            self._phase = WorkerPhase.TURN
        return [CutGroups()]

    def _stand(self, event: WorkerEvent) -> list[WorkerAction]:
        """The user's thread can be turned round now."""
        if self._next is not None:
            return self._enter_next()
        self._phase = WorkerPhase.WAIT
        return []

    def _hear_plan(self, event: PlanAnnounced) -> list[WorkerAction]:
        plan = event.generation
        if self._generation is None and self._next is None:
            # The target of a planned switch connects ahead and waits for the others.
            if self.worker not in plan.members:
                return []
            self._next = plan
            return self._enter_next()
        if self._generation is not None and plan.number == self._generation.number + 1 and self._next is None:
            if self._awaited_plan == plan.number:
                return self._switch_to(plan)
            self._plan = plan
        return []

    def _pending(self) -> int:
        return 0 if self._plan is None else self._plan.number

    def _switch_to(self, plan: Generation) -> list[WorkerAction]:
        if self.worker not in plan.members:
            return self._leave(f"planned generation {plan.number} goes on without worker {self.worker}")
        self._next = plan
        return [CutGroups(), *self._enter_next()]

    def _enter_next(self) -> list[WorkerAction]:
        new, self._next = self._next, None
        assert new is not None
        self._generation, self._plan, self._awaited_plan = new, None, 0
        self._verdict, self._votes, self._gate_value, self._failed_masked = None, (), 0, False
        self._phase = WorkerPhase.CONNECT
        return [Connect(generation=new)]

    def _complaint(self, event: CollectiveFailed) -> Complain:
        assert self._generation is not None
        return Complain(generation=self._generation.number, reason=event.reason)

    def _leave(self, reason: str) -> list[WorkerAction]:
        self._phase = WorkerPhase.LEFT
        return [Leave(reason=reason)]

    # ---- rows: vote and verdict -----------------------------------------------------------------

    def _connect(self, event: Connected) -> list[WorkerAction]:
        generation = self._generation
        if generation is None or event.generation != generation.number:
            return []
        if generation.fresh:
            self._has_state, self._step_count, self._lineage, self._attempt = True, 0, Lineage(), None
            self.held_shard = self.shard
            self._phase = WorkerPhase.RUN
            return []
        self._phase = WorkerPhase.VOTE
        return [CastVote(vote=self._vote(generation))]

    def _vote(self, generation: Generation) -> Vote:
        rank = generation.rank_of(self.worker)
        assert rank is not None
        return Vote(
            worker=self.worker,
            rank=rank,
            shard=self.shard,
            held_shard=self.held_shard if self._has_state else None,
            step=self._step_count if self._has_state else None,
            lineage=self._lineage if self._has_state else None,
            attempt=self._attempt if self._has_state else None,
            checkpoint=self.checkpoint,
        )

    def _count_votes(self, event: VotesCounted) -> list[WorkerAction]:
        assert self._generation is not None
        if event.generation != self._generation.number:
            return []
        if sorted(vote.worker for vote in event.votes) != sorted(self._generation.members):
            raise self._broken(event, "the votes are not exactly those of the generation's members")
        self._votes, self._verdict = event.votes, verdict(event.votes)
        match self._verdict.courses[self.worker]:
            case Course.KEEP:
                self._attempt = None
                self._phase = self._training_phase()
                return [*self._serve(), *([RedoStep()] if self._phase is WorkerPhase.RUN else [])]
            case Course.ROLL:
                self._phase = WorkerPhase.ROLL
                return [ApplyUpdate(roll=True)]
            case Course.RECEIVE if self._is_donor():
                # It lags behind and nobody needs what it has; it computes nothing, so it copies nothing.
                self._has_state, self._attempt, self._phase = False, None, WorkerPhase.DONOR
                return []
            case Course.RECEIVE:
                self._phase = WorkerPhase.RECEIVE
                sources = sources_for(self._votes, self._verdict.courses, self.worker)
                return [ReceiveState(sources=sources, verdict=self._verdict)]
            case Course.ROLLBACK:
                self._phase = WorkerPhase.LOAD
                return [LoadCheckpoint(verdict=self._verdict)]

    def _start_copy(self, event: CopyStarted) -> list[WorkerAction]:
        self._has_state, self._attempt = False, None
        return []

    def _complete_copy(self, event: CopyCompleted) -> list[WorkerAction]:
        assert self._verdict is not None
        if self._has_state or self._verdict.target is None or self._verdict.lineage is None:
            raise self._broken(event, "the copy was never started")
        self._step_count, self._lineage = self._verdict.target, self._verdict.lineage
        return self._hold()

    def _load_checkpoint(self, event: CheckpointLoaded) -> list[WorkerAction]:
        assert self._verdict is not None
        named = self._verdict.checkpoint
        self._step_count = named.step if named else 0
        self._lineage = Lineage(named.lineage, named.step) if named else Lineage()
        return self._hold()

    def _hold(self) -> list[WorkerAction]:
        self._has_state, self.held_shard, self._attempt = True, self.shard, None
        self._phase = self._training_phase()
        return []

    def _serve(self) -> list[WorkerAction]:
        assert self._verdict is not None
        assert self._generation is not None
        targets = targets_for(self._votes, self._verdict.courses, self.worker)
        playing = tuple(target for target in targets if target in self._generation.ranks)
        return [ServeState(targets=playing, verdict=self._verdict)] if playing else []

    def _is_donor(self) -> bool:
        return self._generation is not None and self.worker in self._generation.donors

    def _training_phase(self) -> WorkerPhase:
        return WorkerPhase.DONOR if self._is_donor() else WorkerPhase.RUN


_P = WorkerPhase
_M = WorkerMachine
Row = Callable[[WorkerMachine, object], list[WorkerAction]]

# The one table: (phase, event) -> row. A phase of None stands for every phase without a row of its
# own; what is not here cannot happen.
_TABLE = {
    (None, Interrupted): _M._interrupt,
    (None, PlanAnnounced): _M._hear_plan,
    # training
    (_P.RUN, StepStarted): _M._start_step,
    (_P.RUN, SafePointReached): _M._ignore,
    (_P.RUN, BlockEnded): _M._ignore,  # a block without an update: a micro-batch
    (_P.RUN, GradientsCompleted): _M._complete_gradients,
    (_P.GATE, GatePassed): _M._pass_gate,
    (_P.GATE, SafePointReached): _M._ignore,
    (_P.UPDATE, BlockEnded): _M._end_update,
    (_P.UPDATE, SafePointReached): _M._ignore,
    (_P.ROLL, BlockEnded): _M._end_roll,
    (_P.ROLL, SafePointReached): _M._ignore,
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
    (_P.TURN, CollectiveFailed): _M._ignore,
    (_P.WAIT, CollectiveFailed): _M._ignore,
    (_P.PARKED, CollectiveFailed): _M._ignore,
    # turning round: whatever the poisoned step says, it only means that the thread got there
    (_P.TURN, SafePointReached): _M._stand,
    (_P.TURN, StepStarted): _M._stand,
    (_P.TURN, GradientsCompleted): _M._stand,
    (_P.TURN, GatePassed): _M._stand,
    (_P.TURN, BlockEnded): _M._stand,
    (_P.WAIT, SafePointReached): _M._ignore,
    (_P.CONNECT, SafePointReached): _M._ignore,
    (_P.VOTE, SafePointReached): _M._ignore,
    (_P.RECEIVE, SafePointReached): _M._ignore,
    (_P.LOAD, SafePointReached): _M._ignore,
    (_P.DONOR, SafePointReached): _M._ignore,
    (_P.PARKED, SafePointReached): _M._ignore,
    # vote and verdict; an answer that comes after its generation is over says nothing
    (_P.CONNECT, Connected): _M._connect,
    (None, Connected): _M._ignore,
    (_P.VOTE, VotesCounted): _M._count_votes,
    (None, VotesCounted): _M._ignore,
    (_P.RECEIVE, CopyStarted): _M._start_copy,
    (_P.RECEIVE, CopyCompleted): _M._complete_copy,
    (None, CopyStarted): _M._ignore,
    (None, CopyCompleted): _M._ignore,
    (_P.LOAD, CheckpointLoaded): _M._load_checkpoint,
    (None, CheckpointLoaded): _M._ignore,
}
TABLE: dict[tuple[WorkerPhase | None, type], Row] = _TABLE  # type: ignore[assignment]

"""The training loop of one rank: what is served, when it is served again, where steps begin and end.

`for step in run.steps(...)` walks through here. The order of one iteration: recover if something
failed; at a step's boundary hand state to those who wait for it and take the record; fetch the
batch; let the script run its asides and its block.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from keepstep.core.events import Resumed
from keepstep.core.worker_events import BlockEnded, ServeState
from keepstep.errors import StepInterrupted, UsageError
from keepstep.trainer import blame, rng
from keepstep.trainer.adapters.batches import clone, mutated, snapshot_versions
from keepstep.trainer.data import Cursor
from keepstep.trainer.description import FINGERPRINT_STEP, describe_state
from keepstep.trainer.elastic import Place
from keepstep.trainer.gate import Gate
from keepstep.trainer.proof import Proof
from keepstep.trainer.record import Recorder
from keepstep.trainer.recovery import Outcome, Recovery
from keepstep.trainer.rehearsal import Rehearsal
from keepstep.trainer.reports import Reports
from keepstep.trainer.session import Released, Session
from keepstep.trainer.state import StateExchange, drop_gradients
from keepstep.trainer.step import Step
from keepstep.wire.page import Phase

ALL_CLOSED = 1 << 30  # somebody passed every gate there is

LATE_CHANGE = (
    "this rank's own state changes between optimizer.step() and the next step: a rank that dies in that moment is "
    "continued from before the change. Draw random numbers and count inside the block, before optimizer.step()."
)


class Served:
    """One batch of the step under way, with the random state that its block starts from."""

    def __init__(self, batch: Any, state: dict[str, Any]) -> None:
        self.batch = batch
        self.rng = state
        self.versions = snapshot_versions(batch)


class Loop:
    """Serves steps to one script: a session has one loop in its life."""

    def __init__(
        self,
        session: Session,
        reports: Reports,
        *,
        cursor: Cursor | None,
        until: int | None,
        become_rank: Callable[[Cursor | None], bool],
        take_over: Callable[[], None],
    ) -> None:
        self.session = session
        self.reports = reports
        limit = session.link.welcome.record_bytes
        self.recorder = Recorder(session.page, session.protected, limit, session.checks)
        self.recorder.on_record = session.keeper.send
        self.exchange = StateExchange(session)
        self.recovery = Recovery(
            session, lambda action: self.exchange.receive(action, self), self._serve_standing
        )
        self.gate = Gate(session, self)
        self.rehearsal = Rehearsal(self, cursor, become_rank)
        self.proof = Proof(session, reports)
        self.in_block = False
        self._cursor = cursor
        self._until = until
        self._take_over = take_over
        self._took_over = False
        self._served: list[Served] = []  # since the last commit
        self._replay: deque[Served] = deque()
        self._start_cursor: dict[str, Any] | None = None
        self._rewind_due = False
        self._clones_batches = False
        self._micro = 0
        self._batches = 0
        self._committed_s = 0.0
        self._warned_late = False
        self._described = False
        if self._cursor is not None:
            for text in self._cursor.warnings(session.world_size):
                session.say(text)

    # ---- serving --------------------------------------------------------------------------------

    def next_step(self) -> Step:
        """The next iteration of the script's loop. Raises StopIteration when training is over."""
        session = self.session
        if self.in_block:
            raise UsageError("the loop goes on inside `with step:`: leave the block before the next step.")
        if session.rehearsing:
            rehearsed = self.rehearsal.next_step()
            if rehearsed is not None:
                return rehearsed
            self._micro = 0
            self._took_over = True
        while True:
            session.page.enter(Phase.BETWEEN)
            self._turn()
            if self._took_over:  # it is the rank now, state and all, and has not served a step yet
                self._took_over = False
                self._take_over()
            if session.closed_gates:  # this worker took over a rank that had finished
                session.final_step = session.steps_done
                self.proof.at_end(session.final_step)
                raise StopIteration
            step = self._serve()
            if step is not None:
                return step
            if self.pass_empty_gate():
                raise StopIteration

    def _turn(self) -> None:
        """Recover if something failed since the last block, and rewind to the step's start."""
        session = self.session
        while session.must_turn:
            if self.recover() is Outcome.REDO:
                self._rewind_due = True
        if self._rewind_due:
            self._rewind_due = False
            self.recorder.put_back(session.machine.step_count)
            self.gate.forget_unscaled()
            self._replay = deque(self._served)
            self._micro = 0
        if self._replay:
            self._offer(self._start_cursor)

    def _serve(self) -> Step | None:
        """The next batch as a step; None at the end of the loop."""
        if self._replay:
            served = self._replay.popleft()
            rng.restore(served.rng)
            return self._make_step(served.batch)
        if not self._served:
            self._boundary()
        if self._until is not None and self.session.machine.step_count >= self._until:
            return None
        if self._cursor is None:
            fetched = self.recorder.start_rng if not self._served else rng.capture()
            self._served.append(Served(None, fetched))
            return self._make_step(None)
        try:
            batch = self._cursor.next_batch()
        except StopIteration:
            return None
        self._served.append(Served(batch, rng.capture()))
        return self._make_step(batch)

    def _make_step(self, batch: Any) -> Step:
        number, micro = self.session.machine.step_count, self._micro
        self._micro += 1
        served = clone(batch) if self._clones_batches else batch
        return Step(self, number=number, micro=micro, index=self._batches + micro, batch=served)

    def _boundary(self) -> None:
        """Between two steps: state may be copied from here on, and the record is taken."""
        session, machine = self.session, self.session.machine
        cursor = self._start_cursor = self._cursor.state() if self._cursor is not None else None
        self._offer(cursor)
        if session.lender.active:
            session.lender.lend(cursor, session.closed_gates)
        session.faults.at("between")
        self.recorder.write_start(machine.step_count, machine.lineage.digest, cursor, session.closed_gates)
        if machine.step_count >= FINGERPRINT_STEP and not self._described:
            self._described = True
            describe_state(session, self.recorder)
        if self.recorder.late_changes and not self._warned_late and machine.step_count > FINGERPRINT_STEP:
            self._warned_late = True
            session.say(LATE_CHANGE)
        self.recorder.remember(machine.step_count)

    def _serve_standing(self, action: ServeState) -> None:
        """A donor computes nothing: whoever needs its state copies it at once."""
        cursor = self._cursor.state() if self._cursor is not None else None
        self.exchange.offer(action, cursor, self.session.closed_gates)

    def _offer(self, cursor: dict[str, Any] | None) -> None:
        session = self.session
        if session.serving is not None:
            action, session.serving = session.serving, None
            self.exchange.offer(action, cursor, session.closed_gates)

    def stand_at(self, cursor: dict[str, Any] | None, closed_gates: int, *, own: bool) -> None:
        """Take over where a record stands: the data cursor and the gates passed after the loop."""
        self.session.closed_gates = closed_gates
        self._served.clear()
        self._replay.clear()
        self._rewind_due = False
        self._micro = 0
        if self._cursor is not None and cursor is not None:
            self._cursor.restore(cursor, verify=own)
            self._batches = self._cursor.batches_served
        drop_gradients(self.session)
        self.gate.forget_unscaled()

    # ---- the block ------------------------------------------------------------------------------

    def enter_block(self) -> None:
        """`with step:` begins."""
        if self.in_block:
            raise UsageError("`with step:` inside another one: one block is one step.")
        self.in_block = True
        self.gate.passed = False
        session = self.session
        if not session.rehearsing:
            session.page.enter(Phase.STEP)
            session.groups.settle(place=Place.STEP)
            session.faults.begin_block()

    def leave_block(self, error: BaseException | None) -> bool:
        """`with step:` ends. True: the exception is swallowed, the step is served again."""
        self.in_block = False
        session = self.session
        session.faults.end_block()
        if session.rehearsing:
            if error is None and self.gate.passed:
                self.rehearsal.committed()
            return isinstance(error, StepInterrupted)
        if error is not None:
            return self._unwound(error)
        if self.gate.passed:
            self._commit()
        elif session.groups.poisoned:
            self._rewind_due = True
        session.groups.settle(place=Place.OUTSIDE)
        self._note_batch_mutation()
        return False

    def _unwound(self, error: BaseException) -> bool:
        session = self.session
        groups = session.groups
        groups.settle(place=Place.OUTSIDE)
        self.reports.drop()
        if isinstance(error, StepInterrupted):
            return True  # the gate has recovered; _rewind_due says how
        if isinstance(error, SystemExit) and session.ends is not None:
            session.ends.exited_by_script(error.code)
        if not isinstance(error, Exception) or isinstance(error, UsageError) or self.gate.passed:
            return False
        failure = groups.find_failure() or blame.lost_peer(error)
        if failure is not None:
            groups.poison(failure)
        if groups.poisoned:
            self._rewind_due = True
            return True
        return False

    def before_gate(self, closed_gates: int) -> None:
        """All own collectives succeeded: the record leaves the process, then the rank contributes."""
        session = self.session
        after = session.next_lineage
        if self.in_block:
            self.recorder.check_before_gate()
        cursor = self._cursor.state() if self._cursor is not None else None
        self.recorder.write_gate(after.step, after.digest, cursor, closed_gates)
        assert session.rank is not None
        self.reports.flush(session.rank, after.step - 1, session.generation_number)
        session.keeper.await_kept()
        session.faults.at("gate")

    def recover(self) -> Outcome:
        """From a safe point of the user's thread to a new generation."""
        self.reports.drop()
        self.recovery.in_step = bool(self._served)
        return self.recovery.run()

    def interrupt(self, outcome: Outcome) -> None:
        """The gate recovered without a commit: unwind the block. Raises StepInterrupted."""
        self._rewind_due = outcome is Outcome.REDO
        raise StepInterrupted(f"step {self.session.machine.step_count} is served again ({outcome.value})")

    def _commit(self) -> None:
        """The block ended after a passed gate: bookkeeping is done, the step counts."""
        session = self.session
        session.page.enter(Phase.BLOCK_END)
        session.faults.at("block_end")
        session.tell(BlockEnded())
        session.groups.failed = ""
        session.page.step = session.machine.step_count
        self._batches += len(self._served)
        self._served.clear()
        self._replay.clear()
        self._micro = 0
        now_s = time.monotonic()
        session.faults.note_step_time(now_s - self._committed_s if self._committed_s else 0.01)
        if self._committed_s:
            session.page.count_step(int((now_s - self._committed_s) * 1e9))
        self._committed_s = now_s
        if session.resumption_due and not session.must_turn:
            session.resumption_due = False
            self._send_resumed()
        self.proof.after_commit()

    def _note_batch_mutation(self) -> None:
        """A script that changes its batches in place is served copies from then on."""
        if (
            not self._clones_batches
            and self._served
            and mutated(self._served[-1].batch, self._served[-1].versions)
        ):
            self._clones_batches = True
            self.session.say("the script changes its batches in place: it is served copies from now on")

    # ---- the end --------------------------------------------------------------------------------

    def pass_empty_gate(self) -> bool:
        """A gate after the last step, without an update: nobody leaves before all are there.

        False when it was interrupted and something else may have to be served first.
        """
        session = self.session
        session.groups.settle(place=Place.CLOSING)
        self._served.clear()
        self._replay.clear()
        self.gate.passed = False
        self._offer(self._cursor.state() if self._cursor is not None else None)
        steps = session.steps_done
        first = session.closed_gates == 0
        try:
            self.gate.reach(closed_gates=session.closed_gates + 1)
            session.closed_gates += 1
            session.tell(BlockEnded())
            session.page.step = session.machine.step_count
            session.groups.settle(place=Place.CLOSING)
            self._serve_to_the_last()
        except StepInterrupted:
            session.groups.settle(place=Place.OUTSIDE)
            self._rewind_due = False
            return False
        except Released:
            session.closed_gates = ALL_CLOSED
        if first:
            session.final_step = steps
            self.proof.at_end(steps)
        session.page.enter(Phase.DONE)
        return True

    def _serve_to_the_last(self) -> None:
        """A rank that has finished stays a source until those who copy from it are done."""
        session = self.session
        while session.must_turn or session.serving is not None:
            if session.must_turn:
                self.recover()
            elif session.serving is not None:
                targets = session.serving.targets
                self._offer(self._cursor.state() if self._cursor is not None else None)
                self.exchange.await_copies(targets)

    def _send_resumed(self) -> None:
        """The first committed step of a generation: told to the controller, and stamped in the reports."""
        session = self.session
        assert session.rank is not None
        line = {
            "resumed": True,
            "step": session.machine.step_count - 1,
            "generation": session.generation_number,
        }
        self.reports.write(session.rank, line)
        session.link.send(
            Resumed(
                worker=session.worker, generation=session.generation_number, step=session.machine.step_count
            )
        )

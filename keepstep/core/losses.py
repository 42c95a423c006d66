"""A process is gone or given up: what that means depends on what it was. It decides no successor."""

from __future__ import annotations

from keepstep.core.incident import Victim
from keepstep.core.job_state import Complaint, JobState
from keepstep.core.membership import Standing, Worker
from keepstep.core.observing import UNWOUND_EXIT_CODE
from keepstep.core.process_status import exit_code_of
from keepstep.core.waiting import refill_later

USAGE_EXIT_CODE = 2


def process_lost(
    state: JobState,
    worker: Worker,
    status: int | None,
    text: str,
    now_s: float,
    cause: str,
    first_evidence_s: float | None = None,
) -> None:
    """A process is gone; what that means depends on what it was."""
    before = worker.standing
    worker.standing, worker.status = Standing.EXITED, status
    if state.stopping is not None or state.ending is not None or state.finishing:
        return
    if before in (Standing.ENDING, Standing.PLAYING) and not state.is_member(worker.number):
        if not state.restarting:
            refill_later(state, now_s)
    elif before is Standing.ENDING:
        pass  # a member that was given up: its rank is already looked after
    elif state.is_member(worker.number):
        if status == UNWOUND_EXIT_CODE and state.config.observe:
            _unwound(state, worker, now_s)
        elif status != 0:
            member_lost(state, worker, cause, text, now_s, first_evidence_s)
        elif not worker.finished:
            state.say(f"{state.name(worker.number)} ended by itself with status 0", "warning")
    else:
        _spare_lost(state, worker, before, status, text, now_s)


def _unwound(state: JobState, worker: Worker, now_s: float) -> None:
    """Its collectives failed and, as without Keepstep, it ended with them: some other worker is the cause."""
    state.say(f"{state.name(worker.number)} ended because its collectives failed", "warning")
    if state.complaint is None:
        until_s = now_s + state.config.complaint_grace_s
        reason = "its collectives failed, and it ended"
        state.complaint = Complaint(worker=worker.number, reason=reason, seen_s=now_s, until_s=until_s)


def _spare_lost(
    state: JobState, worker: Worker, before: Standing, status: int | None, text: str, now_s: float
) -> None:
    if before is Standing.STARTING:
        state.start_failures += 1
        code = exit_code_of(status)
        first = not state.generations
        who = f"worker {worker.number} (slot {worker.slot} of {worker.node})"
        if first and status == 0:
            reason = f"{who} ended without calling keepstep.init()"
            state.end(USAGE_EXIT_CODE, reason, now_s)
        elif first and status is not None and status > 0:
            state.end(code, f"{who} {text} before it reached keepstep.init(): see its log", now_s)
        elif state.restarting and state.start_failures >= state.config.start_failure_limit:
            reason = f"{who} {text} while starting, the {state.start_failures}th in a row"
            state.end(code or 1, reason, now_s)
    if state.over is None:
        what = "while starting" if before is Standing.STARTING else "while parked"
        state.say(f"spare worker {worker.number} {text} {what}; no rank is touched", "warning")
        refill_later(state, now_s)


def member_lost(
    state: JobState,
    worker: Worker,
    cause: str,
    text: str,
    now_s: float,
    first_evidence_s: float | None,
    kind: str | None = None,
) -> None:
    """A rank has lost its player: open (or widen) the incident; `recovery` finds the heir."""
    newest = state.newest
    assert newest is not None
    rank = newest.rank_of(worker.number)
    assert rank is not None
    reason = f"{state.name(worker.number)} {text} at step {worker.step} (generation {newest.number})"
    victim = Victim(
        worker=worker.number, rank=rank, node=worker.node, cause=cause, reason=reason, step=worker.step
    )
    if first_evidence_s is None and state.complaint is not None:
        first_evidence_s = state.complaint.seen_s
    state.say(reason, "error")
    state.open_incident(cause, reason, now_s, first_evidence_s, victim)
    state.last_exit_code = exit_code_of(worker.status) or 1
    if state.gather_until_s is None:
        state.gather_until_s = now_s + state.config.gather_s
    _note_repetition(state, rank, worker, kind or text, cause, reason, now_s)


def _note_repetition(
    state: JobState, rank: int, worker: Worker, kind: str, cause: str, reason: str, now_s: float
) -> None:
    """The same failure at the same step again and again is the script's own."""
    if cause not in ("death", "hardware"):
        return
    key = (rank, worker.step, kind)
    state.same_failures[key] += 1
    if state.same_failures[key] >= state.config.same_failure_limit:
        count = state.same_failures[key]
        state.end(
            state.last_exit_code,
            f"{reason}: the same failure at the same step for the {count}. time, so it is the script's own",
            now_s,
        )

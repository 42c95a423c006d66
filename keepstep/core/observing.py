"""Watching only: what protection would do is decided, said and written down, and nothing is touched."""

from __future__ import annotations

from keepstep.core.generations import vacant_ranks
from keepstep.core.job_state import JobState


def observe(state: JobState, now_s: float) -> None:
    """Decide, say and write down what would be done; an unprotected job ends with its first death."""
    newest = state.newest
    assert newest is not None
    if gone := [number for number in state.gone() if state.members.workers[number].status != 0]:
        vacant = vacant_ranks(newest, gone)
        spares = [worker.number for worker in state.spares()]
        heirs = ", ".join(f"rank {rank} to worker {new}" for rank, new in zip(vacant, spares, strict=False))
        would = f"would append generation {newest.number + 1} and give {heirs or 'nothing: no spare'}"
        why = state.incident.reason if state.incident else "a member is gone"
        state.persist("note", {"about": "would", "text": would, "reason": why})
        state.say(f"observe: {why}: {would}", "warning")
        state.end(state.last_exit_code or 1, f"{why}; protection only observes", now_s)
    elif state.complaint is not None and now_s >= state.complaint.until_s:
        would = f"would append generation {newest.number + 1} with the same map"
        state.persist("note", {"about": "would", "text": would, "reason": state.complaint.reason})
        state.say(f"observe: {state.complaint.reason}: {would}", "warning")
        state.complaint = None

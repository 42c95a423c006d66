"""Mode observe: everything is watched, decided and written down, and nothing is done.

Each failure becomes an incident that says what would have been done (`would`). The job itself behaves as it
would without Keepstep: the first death ends it with that worker's exit code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keepstep.core.events import WorkerSuspected
from keepstep.core.generations import vacant_ranks
from keepstep.core.incident import Incident, Victim
from keepstep.core.job_state import JobState
from keepstep.core.membership import Worker
from keepstep.core.placement import heirs
from keepstep.core.process_status import exit_code_of

UNWOUND_EXIT_CODE = 78  # a worker ended because its collectives failed: a consequence, not a cause


def observe(state: JobState, now_s: float) -> None:
    """What is due in a world that has started: end with the first death, let complaints pass."""
    gone = [number for number in state.gone() if state.members.workers[number].status != 0]
    causes = [number for number in gone if state.members.workers[number].status != UNWOUND_EXIT_CODE]
    if causes:
        if state.gather_until_s is not None and now_s < state.gather_until_s:
            return
        _end_with(state, causes, now_s)
    elif state.complaint is not None and now_s >= state.complaint.until_s:
        complaint, state.complaint = state.complaint, None
        assert state.newest is not None
        reason = f"{state.name(complaint.worker)} reports: {complaint.reason}; nobody died"
        incident = state.open_incident("complaint", reason, now_s, complaint.seen_s, None)
        _close(state, incident, _same_map(state), now_s)
        if gone:
            state.end(1, f"{reason}; protection only observes", now_s)


def observe_suspect(state: JobState, worker: Worker, event: WorkerSuspected, now_s: float) -> None:
    """A suspect is left alone. Told once for each step at which it stands still."""
    if state.observed.get(worker.number) == worker.step:
        return
    state.observed[worker.number] = worker.step
    name, newest = state.name(worker.number), state.newest
    if not state.is_member(worker.number) or newest is None:
        text = f"would end and replace {name}: {event.reason}; no rank is touched"
        state.persist("note", {"about": "would", "text": text, "reason": event.reason})
        state.say(f"observe: {text}", "warning")
        return
    rank = newest.rank_of(worker.number)
    assert rank is not None
    victim = Victim(
        worker=worker.number,
        rank=rank,
        node=worker.node,
        cause="suspicion",
        reason=f"{name} is suspected: {event.reason}",
        step=worker.step,
    )
    incident = state.open_incident("suspicion", victim.reason, now_s, event.first_evidence_s, victim)
    incident.evidence[str(worker.number)] = dict(event.evidence)
    _close(state, incident, _replacement(state, [worker.number], fence=True), now_s)


def observe_hardware(state: JobState, worker: Worker, summary: str, now_s: float) -> None:
    """A machine's error: the rank would have been replaced; the job ends as the script's own failure."""
    newest = state.newest
    assert newest is not None
    rank = newest.rank_of(worker.number)
    assert rank is not None
    reason = f"{state.name(worker.number)} failed with a machine's error ({summary})"
    victim = Victim(
        worker=worker.number, rank=rank, node=worker.node, cause="hardware", reason=reason, step=worker.step
    )
    incident = state.open_incident("hardware", reason, now_s, None, victim)
    _close(state, incident, _replacement(state, [worker.number]), now_s)


def _end_with(state: JobState, causes: Sequence[int], now_s: float) -> None:
    incident = state.incident
    why = incident.reason if incident is not None else "a member is gone"
    first = incident.victims[0].worker if incident is not None and incident.victims else causes[0]
    code = exit_code_of(state.members.workers[first].status) or 1
    if incident is not None:
        _close(state, incident, _replacement(state, causes), now_s)
    state.end(code, f"{why}; protection only observes", now_s)


def _close(state: JobState, incident: Incident, would: dict[str, Any], now_s: float) -> None:
    incident.would = would
    state.close_incident(now_s, "observed")
    state.say(f"observe: incident {incident.number}: {incident.reason}: {would['text']}", "warning")


def _same_map(state: JobState) -> dict[str, Any]:
    assert state.newest is not None
    number = state.newest.number + 1
    if not state.setup_over:
        return _restart("would start every rank again from the script's first line")
    text = f"would append generation {number} with the same map and compute the step under way again"
    return _would(text, generation=number, course="same_map", recomputed=1)


def _replacement(state: JobState, gone: Sequence[int], *, fence: bool = False) -> dict[str, Any]:
    newest = state.newest
    assert newest is not None
    begin = (
        f"would fence and kill {', '.join(f'worker {number}' for number in gone)}, then "
        if fence
        else "would "
    )
    if not state.setup_over:
        return _restart(f"{begin}start every rank again from the script's first line (setup)")
    vacant = vacant_ranks(newest, gone)
    if orphans := [rank for rank in vacant if not _has_twin(state, rank, vacant)]:
        ranks = ", ".join(map(str, orphans))
        text = f"{begin}start the script again from its own checkpoint: rank {ranks} has no live twin"
        return _would(text, course="rollback", lost=state.published)
    spares = [worker for worker in state.spares() if worker.number not in gone]
    served = vacant[: len(spares)]
    chosen = dict(zip(served, heirs(state, served, spares), strict=True))
    parts = [f"promote worker {worker} to rank {rank}" for rank, worker in chosen.items()]
    if missing := vacant[len(served) :]:
        ranks = ", ".join(map(str, missing))
        parts.append(f"start a worker for rank {ranks} on a free slot, or wait for one (no spare)")
    number = newest.number + 1
    steps = "0 committed steps lost, 1 computed again at most"
    text = f"{begin}append generation {number} and {' and '.join(parts)}; {steps}"
    return _would(text, generation=number, chosen=chosen, vacant=missing, course="rebuilt", recomputed=1)


def _has_twin(state: JobState, rank: int, vacant: Sequence[int]) -> bool:
    """Whether a living rank holds the same bytes; where that was never told, it is assumed."""
    shard = state.shards.get(rank)
    if shard is None:
        return True
    return any(other not in vacant and held == shard for other, held in state.shards.items())


def _restart(text: str) -> dict[str, Any]:
    return _would(text, course="restarted_in_setup")


def _would(
    text: str,
    *,
    course: str,
    generation: int | None = None,
    chosen: dict[int, int] | None = None,
    vacant: Sequence[int] = (),
    lost: int = 0,
    recomputed: int = 0,
) -> dict[str, Any]:
    return {
        "text": text,
        "course": course,
        "generation": generation,
        "replacements": {str(rank): worker for rank, worker in (chosen or {}).items()},
        "without_worker": list(vacant),
        "steps_lost": lost,
        "steps_recomputed": recomputed,
    }

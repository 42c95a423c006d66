"""How a job comes to its end: stopped, failed, or all ranks through their last gate."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.core.job_state import JobState, exit_code_of
from keepstep.core.membership import Worker


def pursue_end(state: JobState, now_s: float) -> None:
    if (stopping := state.stopping) is not None:
        if now_s >= stopping.until_s or not state.members.alive():
            state.end(stopping.exit_code, stopping.reason, now_s)
        return
    ending = state.ending
    assert ending is not None
    awaited = state.members.workers.get(ending.awaits) if ending.awaits is not None else None
    if awaited is not None and not awaited.alive:
        code = exit_code_of(awaited.status) or ending.exit_code
        state.end(code, ending.reason, now_s)
    elif now_s >= ending.until_s:
        state.end(ending.exit_code, ending.reason, now_s)


def _release_late(state: JobState, players: Sequence[Worker], now_s: float) -> None:
    """Whoever is still in the last gate may wait for those who have left: nobody has to."""
    late = [w for w in players if w.useful and not w.finished and not w.released]
    if not late:
        state.release_at_s = None
    elif state.release_at_s is None:
        state.release_at_s = now_s + state.config.finish_grace_s
    elif now_s >= state.release_at_s:
        state.release_at_s = None
        state.release(tuple(sorted(worker.number for worker in late)))


def everybody_left(state: JobState) -> bool:
    """Every member ended by itself with status 0, though none said that it had finished."""
    if state.restarting or state.newest is None:
        return False
    workers = state.members.workers
    return all(not workers[number].alive and workers[number].status == 0 for number in state.newest.ranks)


def pursue_finish(state: JobState, now_s: float) -> None:
    assert state.newest is not None
    players = [state.members.workers[number] for number in state.newest.ranks]
    if any(worker.alive for worker in players):
        _release_late(state, players, now_s)
        return
    state.release_at_s = None
    if any(worker.status is None for worker in players):
        # Its agent still has to say how it ended.
        if state.status_until_s is None:
            state.status_until_s = now_s + state.config.exit_wait_s
        if now_s < state.status_until_s:
            return
    # A rank that died between the others' last gate and its own had all steps too; only rank 0 has
    # still something to do then (`run.finish`).
    codes = [
        exit_code_of(worker.status) if worker.finished or rank == 0 else 0
        for rank, worker in enumerate(players)
    ]
    if any(codes):
        rank = next(rank for rank, code in enumerate(codes) if code)
        reason = f"all steps are finished, but rank {rank} ended with code {codes[rank]} after its last step"
        state.end(codes[rank], reason, now_s)
    else:
        state.end(0, "all ranks have finished", now_s)

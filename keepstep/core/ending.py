"""How a job comes to its end: stopped, failed, or all ranks through their last gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.core.events import WorkerFinished
from keepstep.core.job_state import JobState
from keepstep.core.membership import Worker
from keepstep.core.process_status import exit_code_of, say_status

LEFT_THE_LOOP = "DONE"  # the page's name for it
CURE = " (work handed to run.finish() is protected: a replacement does it)"


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


def begin_finish(state: JobState, event: WorkerFinished, now_s: float) -> None:
    """One has passed the last gate and come to the script's end: every rank holds the last step."""
    assert state.newest is not None
    state.finishing, state.final_step = True, event.step
    if state.incident is not None and event.generation is not None and event.generation < state.newest.number:
        # It will not be repaired: who left the loop in an older generation does not come back.
        for victim in state.incident.victims:
            state.cut_short.setdefault(victim.rank, victim.worker)
    cut_short = {str(rank): worker for rank, worker in state.cut_short.items()}
    state.persist("note", {"about": "finished", "step": event.step, "cut_short": cut_short})
    state.say(f"all {event.step or ''} steps are finished".replace("  ", " "))
    idle = [w.number for w in state.members.useful() if w.number not in state.newest.members]
    others = [number for number in state.newest.members if number != event.worker]
    in_need = others if state.incident is not None or state.complaint is not None else []
    leaving = tuple(sorted([*idle, *(n for n in in_need if state.members.workers[n].useful)]))
    if leaving:
        state.release(leaving)
    state.close_incident(now_s, "after_training" if state.cut_short else None)


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
    everybody = [*players, *(state.members.workers[number] for number in state.cut_short.values())]
    if any(worker.alive for worker in everybody):
        _release_late(state, players, now_s)
        return
    state.release_at_s = None
    if any(worker.status is None for worker in everybody):
        # Its agent still has to say how it ended.
        if state.status_until_s is None:
            state.status_until_s = now_s + state.config.exit_wait_s
        if now_s < state.status_until_s:
            return
    ends = [_end_of(state, rank) for rank in range(len(players))]
    failed = [end for end in ends if end.exit_code]
    for end in ends:
        if end.text and not end.exit_code:
            state.say(f"{end.text}; every step is committed, so this is no failure", "warning")
    if not failed:
        state.end(0, "all ranks have finished", now_s)
        return
    told = "; ".join(end.text for end in failed)
    cure = CURE if any(end.curable for end in failed) else ""
    reason = f"training is complete, all {state.final_step or ''} steps are committed on every rank, but {told}{cure}"
    state.end(failed[0].exit_code, reason.replace("  ", " "), now_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """How a rank's last player ended, in words where there is something to say."""

    exit_code: int = 0
    text: str = ""
    curable: bool = False  # by `run.finish`


def _end_of(state: JobState, rank: int) -> _End:
    """What a rank does after its loop is the script's own: whether it was done tells the exit code.

    Only rank 0 is taken to have something to do there when it had not left its last gate: a script that
    saves on every rank says so by dying in it.
    """
    assert state.newest is not None
    worker = state.members.workers[state.cut_short.get(rank, state.newest.ranks[rank])]
    code = exit_code_of(worker.status)
    if not code:
        return _End()
    who = f"rank {rank} (worker {worker.number}) {say_status(worker.status)}"
    if worker.finished:
        return _End(exit_code=code, text=f"{who} after the end of its loop")
    if worker.phase == LEFT_THE_LOOP:
        return _End(
            exit_code=code,
            text=f"{who} in what the script does after its loop: that may be missing or half done",
            curable=True,
        )
    where = "in its last gate" if worker.phase else "after its last step"
    text = f"{who} {where}: what the script does there after its loop was not done"
    return _End(exit_code=code if rank == 0 else 0, text=text, curable=True)

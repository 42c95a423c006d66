"""The controller's rules: from what is known and the time, what is done now.

`pursue` runs after every event. It reads top-down: the end of the job first, then the start of a
world, then vacant ranks, then complaints, then spares. All its facts stand in `JobState`.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.core.ending import everybody_left, pursue_end, pursue_finish
from keepstep.core.generations import succeeding_generation, vacant_ranks
from keepstep.core.job_state import JobState
from keepstep.core.moves import move_marks, pursue_moves
from keepstep.core.node_watch import explains_complaint, watch_marks
from keepstep.core.observing import observe
from keepstep.core.placement import heirs, moved_along
from keepstep.core.protection import end_unprotected, never_protected, unprotected
from keepstep.core.spare_checks import check_marks, pursue_checks
from keepstep.core.types import Generation
from keepstep.core.waiting import wait_for, waiting_marks
from keepstep.core.world import gather_world, restart_world


def pursue(state: JobState, now_s: float) -> None:
    """Do whatever is due. Idempotent: with the same facts at the same time it adds nothing."""
    if state.over is not None:
        return
    if state.stopping is not None or state.ending is not None:
        pursue_end(state, now_s)
    elif state.finishing or everybody_left(state):
        pursue_finish(state, now_s)
    elif state.config.observe and not state.restarting:
        observe(state, now_s)
    elif state.restarting:
        gather_world(state, now_s)
    elif gone := state.gone():
        if state.gather_until_s is None or now_s >= state.gather_until_s:
            _replace(state, gone, now_s)
    elif state.complaint is not None:
        if now_s >= state.complaint.until_s and not explains_complaint(state, now_s):
            _answer_complaint(state, now_s)
    else:
        pursue_checks(state, now_s)
        pursue_moves(state, now_s)
        _refill(state, now_s)


def next_deadline_s(state: JobState, now_s: float) -> float | None:
    """When `pursue` has something to do though nothing happens; None: only an event can help."""
    marks: list[float | None]
    if state.over is not None:
        return None
    if state.stopping is not None or state.ending is not None:
        marks = [end.until_s for end in (state.stopping, state.ending) if end is not None]
    elif state.finishing or everybody_left(state):
        marks = [state.status_until_s, state.release_at_s]
    elif state.config.observe and not state.restarting:
        marks = [state.gather_until_s, state.complaint.until_s if state.complaint else None]
    elif state.restarting:
        marks = [state.park_until_s, *waiting_marks(state)]
    elif state.gone():
        marks = [state.gather_until_s]
        if state.gather_until_s is None:
            marks = [*waiting_marks(state), state.complaint.until_s if state.complaint else None]
    elif state.complaint is not None:
        marks = [None if explains_complaint(state, now_s) else state.complaint.until_s]
    else:
        marks = [
            state.refill_at_s if state.incident is None else None,
            *check_marks(state),
            *move_marks(state),
        ]
    marks += watch_marks(state, now_s) if state.suspected else []
    due = [mark for mark in (*marks, state.absent_until_s) if mark is not None]
    return max(now_s, min(due)) if due else None


# ---- vacant ranks -------------------------------------------------------------------------------


def _replace(state: JobState, gone: Sequence[int], now_s: float) -> None:
    newest = state.newest
    assert newest is not None
    state.gather_until_s = None
    if left := [number for number in gone if state.members.workers[number].status == 0]:
        _wait_for_those_who_left(state, left, gone, now_s)
        return
    state.complaint = None  # the death explains it
    if why := never_protected(state, gone):
        end_unprotected(state, why, now_s)
        return
    if not state.setup_over:
        reason = state.incident.reason if state.incident else "a member is gone"
        restart_world(
            state,
            "restarted_in_setup",
            f"{reason}, before step {state.config.setup_steps} was published",
            now_s,
        )
        if state.over is None:
            gather_world(state, now_s)
        return
    if why := unprotected(state, gone):
        end_unprotected(state, why, now_s)
        return
    comrades = moved_along(state, gone) if state.config.replace_unit == "node" else []
    gone = [*gone, *comrades]
    vacant = vacant_ranks(newest, gone, state.moves.retired)
    spares = state.spares()
    if len(spares) < len(vacant):
        _want_workers(state, vacant, len(vacant) - len(spares), now_s)
        return
    chosen = heirs(state, vacant, spares)
    staying = [number for number in newest.members if number not in gone] + chosen
    generation = succeeding_generation(
        newest, gone, chosen, state.store_node(staying), tuple(state.moves.retired)
    )
    state.append(generation, _explain(state, newest, generation), now_s)
    for number in comrades:
        state.kill(number, f"all ranks of {state.members.workers[number].node} have moved together")


def _explain(state: JobState, before: Generation, after: Generation) -> str:
    why = {victim.rank: victim.reason for victim in state.incident.victims} if state.incident else {}
    parts = []
    for rank, (old, new) in enumerate(zip(before.ranks, after.ranks, strict=True)):
        if old != new:
            living = state.members.workers[old].useful
            default = f"rank {rank}: worker {old} {'moves with its node' if living else 'is gone'}"
            parts.append(f"{why.get(rank, default)}; worker {new} takes over")
    return "; ".join(parts) or "a donor is gone, the map stays"


def _wait_for_those_who_left(state: JobState, left: Sequence[int], gone: Sequence[int], now_s: float) -> None:
    """A worker that ended with status 0 is not replaced: the script itself stopped there."""
    names = ", ".join(state.name(number) for number in left)
    others_failed = state.complaint is not None and now_s >= state.complaint.until_s
    if others_failed or len(gone) > len(left):
        state.end(
            1, f"{names} ended by itself with status 0 before the end, and the other ranks go on", now_s
        )


def _want_workers(state: JobState, vacant: Sequence[int], missing: int, now_s: float) -> None:
    """No spare is parked: start one where a slot is free, else wait and say for what."""
    ranks = ("rank " if len(vacant) == 1 else "ranks ") + ", ".join(map(str, vacant))
    wanted = missing - len(state.members.starting())
    for node, slot in state.free_slots()[: max(0, wanted)]:
        if state.restarts >= state.config.max_restarts:
            break
        if state.start_failures >= state.config.start_failure_limit:
            break
        state.restarts += 1
        state.start_worker(
            node, slot, f"no spare for {ranks} (restart {state.restarts} of {state.config.max_restarts})"
        )
    starting = [worker.number for worker in state.members.starting()]
    if len(starting) >= missing:
        what = f"worker {', '.join(map(str, starting))} to start, for {ranks}"
    elif state.restarts >= state.config.max_restarts:
        what = f"a spare for {ranks}: no slot's worker may be started again (max restarts {state.config.max_restarts})"
    elif state.start_failures >= state.config.start_failure_limit:
        what = f"a spare for {ranks}: the last {state.start_failures} workers died while starting"
    else:
        what = f"a free slot for {ranks}"
    wait_for(state, what, now_s, gives_up=True)


# ---- complaints and spares ----------------------------------------------------------------------


def _answer_complaint(state: JobState, now_s: float) -> None:
    """Something failed and nobody died: the same map, newly connected."""
    complaint, newest = state.complaint, state.newest
    assert complaint is not None and newest is not None
    reason = f"{state.name(complaint.worker)} reports: {complaint.reason}; nobody died"
    state.open_incident("complaint", reason, now_s, complaint.seen_s, None)
    state.same_map_streak += 1
    if not state.setup_over:
        restart_world(
            state,
            "restarted_in_setup",
            f"{reason}, before step {state.config.setup_steps} was published",
            now_s,
        )
        if state.over is None:
            gather_world(state, now_s)
    elif state.same_map_streak > state.config.same_map_limit:
        state.end(1, f"{reason}; {state.same_map_streak - 1} generations in a row came to nothing", now_s)
    else:
        generation = succeeding_generation(
            newest, (), (), state.store_node(newest.members), tuple(state.moves.retired)
        )
        state.append(generation, f"{reason}; same map, connected anew", now_s)


def _refill(state: JobState, now_s: float) -> None:
    """Keep the number of spares, once training goes on."""
    config = state.config
    if state.refill_at_s is None or now_s < state.refill_at_s or state.incident is not None:
        return
    state.refill_at_s = None
    if state.start_failures >= config.start_failure_limit:
        state.say(
            f"the last {state.start_failures} spares died while starting: no more are started", "warning"
        )
        return
    missing = config.world_size + config.spares - state.members.useful_count()
    for node, slot in state.free_slots()[: max(0, missing)]:
        state.start_worker(node, slot, f"spare on the free slot {slot} of {node}")

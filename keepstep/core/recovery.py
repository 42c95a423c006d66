"""The controller's rules: from what is known and the time, what is done now.

`pursue` runs after every event. It reads top-down: the end of the job first, then the start of a
world, then vacant ranks, then complaints, then spares. All its facts stand in `JobState`.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.core.generations import fresh_generation, succeeding_generation, vacant_ranks
from keepstep.core.job_state import JobState, Waiting, exit_code_of
from keepstep.core.membership import Standing, Worker
from keepstep.core.types import Generation

NO_SPARE_EXIT_CODE = 75  # EX_TEMPFAIL: nothing is wrong with the script, try again with more machines


def pursue(state: JobState, now_s: float) -> None:
    """Do whatever is due. Idempotent: with the same facts at the same time it adds nothing."""
    if state.over is not None:
        return
    if state.stopping is not None or state.ending is not None:
        _pursue_end(state, now_s)
    elif state.finishing or _everybody_left(state):
        _pursue_finish(state, now_s)
    elif state.config.observe and not state.restarting:
        _observe(state, now_s)
    elif state.restarting:
        _gather_world(state, now_s)
    elif gone := state.gone():
        if state.gather_until_s is None or now_s >= state.gather_until_s:
            _replace(state, gone, now_s)
    elif state.complaint is not None:
        if now_s >= state.complaint.until_s:
            _answer_complaint(state, now_s)
    else:
        _refill(state, now_s)


def next_deadline_s(state: JobState, now_s: float) -> float | None:
    """When `pursue` has something to do though nothing happens; None: only an event can help."""
    marks: list[float | None]
    if state.over is not None:
        return None
    if state.stopping is not None or state.ending is not None:
        marks = [end.until_s for end in (state.stopping, state.ending) if end is not None]
    elif state.finishing or _everybody_left(state):
        marks = [state.status_until_s, state.release_at_s]
    elif state.config.observe and not state.restarting:
        marks = [state.complaint.until_s if state.complaint else None]
    elif state.restarting:
        marks = [state.park_until_s, *_waiting_marks(state)]
    elif state.gone():
        marks = [state.gather_until_s]
        if state.gather_until_s is None:
            marks = [*_waiting_marks(state), state.complaint.until_s if state.complaint else None]
    elif state.complaint is not None:
        marks = [state.complaint.until_s]
    else:
        marks = [state.refill_at_s if state.incident is None else None]
    due = [mark for mark in (*marks, state.absent_until_s) if mark is not None]
    return max(now_s, min(due)) if due else None


def _waiting_marks(state: JobState) -> list[float | None]:
    return [state.waiting.next_say_s, state.waiting.until_s] if state.waiting is not None else []


# ---- the end ------------------------------------------------------------------------------------


def _pursue_end(state: JobState, now_s: float) -> None:
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


def _everybody_left(state: JobState) -> bool:
    """Every member ended by itself with status 0, though none said that it had finished."""
    if state.restarting or state.newest is None:
        return False
    members = [state.members.workers[number] for number in state.newest.ranks]
    return all(not worker.alive and worker.status == 0 for worker in members)


def _pursue_finish(state: JobState, now_s: float) -> None:
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


# ---- the world's start --------------------------------------------------------------------------


def restart_world(state: JobState, resolution: str, reason: str, now_s: float) -> None:
    """End every worker that has begun; the next generation starts at the script's first line."""
    assert state.incident is not None
    state.incident.resolution = resolution
    if state.restarts >= state.config.max_restarts and not state.config.observe:
        state.end(
            state.last_exit_code or 1,
            f"{reason}; the world was started again {state.restarts} times already "
            f"(max restarts {state.config.max_restarts})",
            now_s,
        )
        return
    state.restarts += 1
    state.persist("note", {"about": "restart", "reason": reason})
    state.say(f"{reason}: every rank starts again from the script's first line", "warning")
    state.restarting, state.published, state.setup_over = True, 0, False
    state.complaint = state.waiting = state.gather_until_s = None
    for worker in state.members.useful():
        # A worker that has not reached init() has seen nothing of the old world.
        if worker.standing is not Standing.STARTING:
            state.kill(worker.number, reason)


def _gather_world(state: JobState, now_s: float) -> None:
    size = state.config.world_size
    if not state.begun:
        return
    useful = state.members.useful()
    for node, slot in state.members.free_slots()[: max(0, size + state.config.spares - len(useful))]:
        state.start_worker(node, slot, "the world starts")
    spares = state.spares()
    if len(spares) >= size:
        state.waiting = None
        chosen = _first_in_slot_order(state, spares, now_s)
        if chosen:
            numbers = [worker.number for worker in chosen]
            generation = fresh_generation(state.generations, numbers, state.store_node(numbers))
            state.append(generation, f"{size} workers are there: all ranks start at step 0", now_s)
        return
    state.park_until_s = None
    useful = [worker for worker in state.members.useful() if worker.standing is not Standing.PLAYING]
    what = f"{size - len(spares)} of {size} workers to reach keepstep.init()"
    if len(useful) < size:
        missing = size - len(useful)
        what = f"{missing} free slot{'s' if missing > 1 else ''} for a world of {size}"
    ending = bool(state.members.alive()) and len(useful) < size and len(state.members.alive()) >= size
    _wait(state, what, now_s, gives_up=len(useful) < size and not ending, quiet_at_first=True)


def _first_in_slot_order(state: JobState, spares: Sequence[Worker], now_s: float) -> list[Worker]:
    """The workers for ranks 0..N-1: those of the first slots, unless they keep us waiting."""
    size = state.config.world_size
    living = [worker for worker in state.members.useful() if worker.standing is not Standing.PLAYING]
    preferred = state.members.in_slot_order(living)[:size]
    if all(worker.standing is Standing.PARKED for worker in preferred):
        return preferred
    if state.park_until_s is None:
        state.park_until_s = now_s + state.config.park_grace_s
    if now_s < state.park_until_s:
        return []
    return state.members.in_slot_order(spares)[:size]


# ---- vacant ranks -------------------------------------------------------------------------------


def _replace(state: JobState, gone: Sequence[int], now_s: float) -> None:
    newest = state.newest
    assert newest is not None
    state.gather_until_s = None
    if left := [number for number in gone if state.members.workers[number].status == 0]:
        _wait_for_those_who_left(state, left, gone, now_s)
        return
    state.complaint = None  # the death explains it
    if not state.setup_over:
        reason = state.incident.reason if state.incident else "a member is gone"
        restart_world(
            state,
            "restarted_in_setup",
            f"{reason}, before step {state.config.setup_steps} was published",
            now_s,
        )
        if state.over is None:
            _gather_world(state, now_s)
        return
    vacant = vacant_ranks(newest, gone)
    spares = state.spares()
    if len(spares) < len(vacant):
        _want_workers(state, vacant, len(vacant) - len(spares), now_s)
        return
    chosen = [worker.number for worker in spares[: len(vacant)]]
    staying = [number for number in newest.members if number not in gone] + chosen
    generation = succeeding_generation(newest, gone, chosen, state.store_node(staying))
    state.append(generation, _explain(state, newest, generation), now_s)


def _explain(state: JobState, before: Generation, after: Generation) -> str:
    why = {victim.rank: victim.reason for victim in state.incident.victims} if state.incident else {}
    parts = []
    for rank, (old, new) in enumerate(zip(before.ranks, after.ranks, strict=True)):
        if old != new:
            parts.append(f"{why.get(rank, f'rank {rank}: worker {old} is gone')}; worker {new} takes over")
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
    for node, slot in state.members.free_slots()[: max(0, wanted)]:
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
    _wait(state, what, now_s, gives_up=True)


def _wait(state: JobState, what: str, now_s: float, *, gives_up: bool, quiet_at_first: bool = False) -> None:
    """Say what is waited for, now and every so often; end the job when it has been too long."""
    config = state.config
    until_s = now_s + config.spare_timeout_s if gives_up else None
    if state.waiting is None:
        state.waiting = Waiting(
            what=what, since_s=now_s, next_say_s=now_s + config.waiting_say_s, until_s=until_s
        )
        if not quiet_at_first:
            state.say(f"waiting for {what}", "warning")
        if until_s is None or until_s > now_s:
            return
    waiting = state.waiting
    if gives_up != (waiting.until_s is not None):
        waiting.until_s = until_s
    if what != waiting.what:
        waiting.what = what
        if not quiet_at_first:
            state.say(f"waiting for {what}", "warning")
    waited_s = now_s - waiting.since_s
    if waiting.until_s is not None and now_s >= waiting.until_s:
        state.end(
            NO_SPARE_EXIT_CODE, f"waited {waited_s:.0f} s for {what}: nothing is left to go on with", now_s
        )
    elif now_s >= waiting.next_say_s:
        limit = "" if waiting.until_s is None else f", giving up after {config.spare_timeout_s:.0f} s"
        state.say(f"still waiting for {what}, for {waited_s:.0f} s now{limit}", "warning")
        waiting.next_say_s = now_s + config.waiting_say_s


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
            _gather_world(state, now_s)
    elif state.same_map_streak > state.config.same_map_limit:
        state.end(1, f"{reason}; {state.same_map_streak - 1} generations in a row came to nothing", now_s)
    else:
        generation = succeeding_generation(newest, (), (), state.store_node(newest.members))
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
    missing = config.world_size + config.spares - len(state.members.useful())
    for node, slot in state.members.free_slots()[: max(0, missing)]:
        state.start_worker(node, slot, f"spare on the free slot {slot} of {node}")


def refill_later(state: JobState, now_s: float) -> None:
    if state.refill_at_s is None:
        state.refill_at_s = now_s + state.config.refill_delay_s


# ---- watching only ------------------------------------------------------------------------------


def _observe(state: JobState, now_s: float) -> None:
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

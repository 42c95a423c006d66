"""The world's start, and its start anew: enough nodes, enough workers, ranks in the order of the slots."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.core.generations import fresh_generation
from keepstep.core.job_state import JobState
from keepstep.core.membership import Standing, Worker
from keepstep.core.waiting import wait_for


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


def gather_world(state: JobState, now_s: float) -> None:
    size = state.config.world_size
    if not state.begun:
        return
    missing_nodes = state.config.nodes - len(state.nodes.keys() - state.members.late)
    if missing_nodes > 0 and not state.generations:
        what = f"{missing_nodes} of {state.config.nodes} nodes to join"
        wait_for(state, what, now_s, gives_up=True)
        return
    wanted = size + state.config.spares - state.members.useful_count()
    if wanted > 0:
        for node, slot in state.free_slots()[:wanted]:
            state.start_worker(node, slot, "the world starts")
    if state.members.parked_count() >= size and len(spares := state.spares()) >= size:
        state.waiting = None
        chosen = _first_in_slot_order(state, spares, now_s)
        if chosen:
            numbers = [worker.number for worker in chosen]
            generation = fresh_generation(state.generations, numbers, state.store_node(numbers))
            state.append(generation, f"{size} workers are there: all ranks start at step 0", now_s)
        return
    state.park_until_s = None
    alive = state.members.alive_count()
    useful = state.members.waiting_count()
    what = f"{size - state.members.parked_count()} of {size} workers to reach keepstep.init()"
    if useful < size:
        missing = size - useful
        what = f"{missing} free slot{'s' if missing > 1 else ''} for a world of {size}"
    ending = bool(alive) and useful < size and alive >= size
    wait_for(state, what, now_s, gives_up=useful < size and not ending, quiet_at_first=True)


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

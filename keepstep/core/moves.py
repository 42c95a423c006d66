"""Planned moves: a rank goes to another worker while its player still lives, and training does not stop for it.

The source is told to lend its state, the target to build as the rank and to copy it, both while training goes
on. Only then the planned generation is written down and announced ahead; the source puts it into the gate.
Until then the death of a target costs nobody anything. `pursue_moves` runs when nothing fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.core.actions import Lend, Prepare
from keepstep.core.generations import planned_generation
from keepstep.core.job_state import JobState
from keepstep.core.membership import Standing, Worker
from keepstep.core.move_events import DrainRequested, LendReady, MoveReady, MoveRequested, UndrainRequested
from keepstep.core.move_facts import Move, Stage
from keepstep.core.placement import target_for
from keepstep.core.waiting import refill_later

TRIES = 3  # targets that die while they are prepared, until the move is given up


# ---- requests ---------------------------------------------------------------------------------------


def move_refusal(state: JobState, rank: int, to: str) -> str | None:
    """Why this move cannot be asked for, in one line; None when it can."""
    size = state.config.world_size
    if not 0 <= rank < size:
        return f"there is no rank {rank}: this job has ranks 0 to {size - 1}"
    if rank in state.moves.by_rank:
        move = state.moves.by_rank[rank]
        return f"rank {rank} is moving already ({move.stage.value}, because of {move.reason})"
    if state.over is not None or state.finishing:
        return "the job has finished"
    if state.restarting or state.newest is None or not state.setup_over:
        return f"the job is in its setup: a rank can be moved from step {state.config.setup_steps} on"
    if state.config.observe:
        return "the job runs with --mode observe: nothing is touched"
    return None if not to else _place_refusal(state, rank, to)


def _place_refusal(state: JobState, rank: int, to: str) -> str | None:
    if to not in state.members.slots:
        known = ", ".join(sorted(state.members.slots)) or "none"
        return f"there is no node {to}: the nodes are {known}"
    if to in state.moves.draining:
        return f"node {to} is being drained ({state.moves.draining[to]}): undrain it first"
    claimed = state.moves.targets()
    spare = any(w.node == to and w.number not in claimed for w in state.spares())
    if not spare and not any(node == to for node, _ in state.free_slots()):
        return f"node {to} is full: it has neither a parked spare nor a free slot for rank {rank}"
    return None


def drain_refusal(state: JobState, node: str) -> str | None:
    """Why this node cannot be drained; None when it can."""
    if node not in state.members.slots:
        known = ", ".join(sorted(state.members.slots)) or "none"
        return f"there is no node {node}: the nodes are {known}"
    if node in state.moves.draining:
        return f"node {node} is being drained already ({state.moves.draining[node]})"
    return None


def undrain_refusal(state: JobState, node: str) -> str | None:
    """Why this node cannot be given back; None when it can."""
    kept_out = node in state.moves.draining or barred_on(state, node)
    return None if kept_out else f"node {node} is not being drained"


def barred_on(state: JobState, node: str) -> set[tuple[str, int]]:
    """The slots of a node that the policy keeps out."""
    return {place for place in state.policy_barred if place[0] == node}


def forget_drain(state: JobState, node: str) -> None:
    """The node may be used again, with all its slots; one whose own checks failed stays quarantined."""
    barred = barred_on(state, node)
    state.moves.draining.pop(node, None)
    state.members.quarantined -= barred
    state.policy_barred -= barred


def move_requested(state: JobState, event: MoveRequested, now_s: float) -> None:
    refusal = move_refusal(state, event.rank, event.to)
    if refusal is not None:
        state.say(f"rank {event.rank} is not moved: {refusal}", "warning")
        return
    _ask(state, event.rank, event.reason, event.by, f"rank {event.rank}", now_s, event.to)


def drain_requested(state: JobState, event: DrainRequested, now_s: float) -> None:
    refusal = drain_refusal(state, event.node)
    if refusal is not None:
        state.say(f"node {event.node} is not drained: {refusal}", "warning")
        return
    state.moves.draining[event.node] = event.reason
    body = {"node": event.node, "reason": event.reason, "by": event.by}
    state.persist("note", {"about": "drain", **body})
    ranks = ranks_on(state, event.node)
    what = f"its ranks {', '.join(map(str, ranks))} move away" if ranks else "no rank is played there"
    state.say(f"node {event.node} is drained ({event.reason}): {what}, and nothing new starts there")


def undrain_requested(state: JobState, event: UndrainRequested, now_s: float) -> None:
    refusal = undrain_refusal(state, event.node)
    if refusal is not None:
        state.say(refusal, "warning")
        return
    forget_drain(state, event.node)
    state.persist("note", {"about": "undrain", "node": event.node})
    state.say(f"node {event.node} may be used again")
    refill_later(state, now_s)
    for rank, move in list(state.moves.by_rank.items()):
        if move.unit == event.node and move.stage is not Stage.SWITCHING:
            _drop(state, rank, f"node {event.node} may be used again")


def ranks_on(state: JobState, node: str) -> list[int]:
    """The ranks that are played on a node."""
    return (
        []
        if state.newest is None
        else [r for r in range(len(state.newest.ranks)) if state.node_of_rank(r) == node]
    )


def _ask(state: JobState, rank: int, reason: str, by: str, unit: str, now_s: float, to: str = "") -> None:
    assert state.newest is not None
    source = state.newest.ranks[rank]
    move = Move(rank=rank, source=source, reason=reason, by=by, unit=unit, to=to, asked_s=now_s)
    state.moves.by_rank[rank] = move
    state.persist("note", {"about": "move", **move.body()})
    where = f" to node {to}" if to else ""
    state.say(f"rank {rank} is to move from worker {source}{where} ({reason}; asked for by {by})")


def _drop(state: JobState, rank: int, why: str) -> None:
    move = state.moves.by_rank.pop(rank)
    state.persist("note", {"about": "move", **move.body(), "stage": "dropped", "why": why})
    state.say(f"rank {rank} is not moved: {why}", "warning")


# ---- what source and target report ---------------------------------------------------------------------


def lend_ready(state: JobState, event: LendReady) -> None:
    """The source can be copied from: the target builds as the rank."""
    for move in state.moves.by_rank.values():
        if (move.source, move.target) == (event.worker, event.target) and move.stage is Stage.LENDING:
            move.stage, move.address = Stage.PREPARING, event.address
            state.actions.append(
                Prepare(worker=event.target, rank=move.rank, source=move.source, address=event.address)
            )


def move_ready(state: JobState, event: MoveReady, now_s: float) -> None:
    """The target is built as the rank, and has copied its state once (or found that a step is too short)."""
    rank = state.moves.targets().get(event.worker)
    move = None if rank is None else state.moves.by_rank[rank]
    if move is None or move.stage is not Stage.PREPARING:
        return
    move.stage, move.ready_s, move.fits = Stage.READY, now_s, event.fits
    move.copied_bytes, move.copy_s = event.bytes, event.seconds
    how = "" if event.fits else "; a step is too short to copy it in, so the switch will wait for the copy"
    state.say(
        f"worker {event.worker} is ready to take over rank {move.rank}, {now_s - move.asked_s:.1f} s after the "
        f"request ({event.bytes / 1e6:.1f} MB in {event.seconds:.2f} s){how}"
    )


# ---- the rules -------------------------------------------------------------------------------------------


def pursue_moves(state: JobState, now_s: float) -> None:
    """Find targets, and switch when they are ready. Nobody is gone and nobody complains."""
    book = state.moves
    if book.pending:
        if book.switch_until_s is not None and now_s >= book.switch_until_s:
            enter_now(state, f"the switch was not made within {state.config.switch_timeout_s:.0f} s")
        return
    if not state.setup_over or state.incident is not None:
        return
    for node, reason in book.draining.items():
        for rank in ranks_on(state, node):
            if rank not in book.by_rank:
                _ask(state, rank, reason, f"the drain of {node}", node, now_s)
    for rank, move in list(book.by_rank.items()):
        _look_after(state, rank, move, now_s)
    ready = [move for move in book.by_rank.values() if move.stage is Stage.READY]
    units = {move.unit for move in ready} - _incomplete_units(state)
    ready = [move for move in ready if move.unit in units]
    if ready:
        _switch(state, ready, now_s)


def move_marks(state: JobState) -> list[float | None]:
    """When `pursue_moves` has something to do though nothing happens."""
    return [state.moves.switch_until_s if state.moves.pending else None]


def enter_now(state: JobState, why: str) -> None:
    """Tell everybody to enter the planned generation at once, from whatever step they are in."""
    state.moves.pending, state.moves.switch_until_s = False, None
    state.announce(why)


def forget_copies(state: JobState, node: str) -> None:
    """An agent came back: what it was to pass on about moves may be lost, so it is said again."""
    workers = state.members.workers
    for move in state.moves.by_rank.values():
        ends = [workers[number].node for number in (move.source, move.target) if number is not None]
        if node in ends and move.stage in (Stage.LENDING, Stage.PREPARING):
            move.stage = Stage.ASKED


def retire_donors(state: JobState) -> None:
    """Training goes on in the newest generation: whoever only lent its state is done."""
    assert state.newest is not None
    for donor, rank in state.newest.donors.items():
        if donor in state.moves.retired:
            continue
        target = state.newest.ranks[rank]
        worker = state.members.workers[target]
        state.moves.retired.add(donor)
        state.forget_places()
        state.persist("note", {"about": "retired", "worker": donor, "rank": rank, "target": target})
        state.kill(donor, f"rank {rank} has moved to worker {target} on {worker.node}")
        move = state.moves.by_rank.pop(rank, None)
        if move is not None:
            state.persist("note", {"about": "move", **move.body(), "stage": "done"})
    for node in state.moves.draining:
        if state.newest.donors and not ranks_on(state, node):
            state.say(f"node {node} is drained: no rank is played there any more")


def _look_after(state: JobState, rank: int, move: Move, now_s: float) -> None:
    """One move's next small step."""
    assert state.newest is not None
    if state.newest.ranks[rank] == move.target:
        del state.moves.by_rank[rank]  # a failure made it the rank's player
        state.persist("note", {"about": "move", **move.body(), "stage": "done"})
        return
    if state.newest.ranks[rank] != move.source:
        _drop(state, rank, f"worker {move.source} does not play it any more")
        return
    target = None if move.target is None else state.members.workers[move.target]
    if target is not None and not _usable(state, target):
        move.target, move.stage, target = None, Stage.ASKED, None
        move.tries += 1
        if move.tries >= TRIES:
            _drop(state, rank, f"{TRIES} targets in a row were lost while they were prepared")
            return
    if target is None:
        target = _find_target(state, move)
    if target is not None and move.stage is Stage.ASKED and target.standing is Standing.PARKED:
        move.stage, move.target_s, move.waits = Stage.LENDING, now_s, ""
        state.say(
            f"rank {rank}: worker {target.number} on {target.node} is prepared to take over from worker {move.source}"
        )
        state.actions.append(Lend(worker=move.source, target=target.number))


def _usable(state: JobState, target: Worker) -> bool:
    return target.standing in (Standing.STARTING, Standing.PARKED) and target.node not in state.moves.draining


def _find_target(state: JobState, move: Move) -> Worker | None:
    """The best spare that is not another move's; else a new worker on a free slot; else say what is missing."""
    claimed = state.moves.targets()
    candidates = [
        spare for spare in state.spares() if spare.number not in claimed and move.to in ("", spare.node)
    ]
    if candidates:
        found = target_for(state, move.rank, candidates)
        move.target = found.number
        return found
    starting = [w for w in state.members.starting() if w.number not in claimed and move.to in ("", w.node)]
    slots = [slot for slot in state.free_slots() if move.to in ("", slot[0])]
    if starting:
        move.target = starting[0].number
    elif slots:
        move.target = state.start_worker(*slots[0], f"to take over rank {move.rank}")
    waits = "a spare" + (f" on {move.to}" if move.to else "")
    if move.target is not None:
        waits = f"worker {move.target} to start"
    if waits != move.waits:
        move.waits = waits
        state.say(
            f"rank {move.rank}: its move waits for {waits}", "info" if move.target is not None else "warning"
        )
    return None


def _incomplete_units(state: JobState) -> set[str]:
    """Units of which a move is still being prepared; with whole nodes as the unit, also those that wait."""
    whole = state.config.replace_unit == "node"
    return {
        move.unit
        for move in state.moves.by_rank.values()
        if move.stage is not Stage.READY and (whole or move.target is not None)
    }


def _switch(state: JobState, ready: Sequence[Move], now_s: float) -> None:
    """Write the planned generation down and announce it ahead."""
    newest = state.newest
    assert newest is not None
    targets = {move.rank: move.target for move in ready if move.target is not None}
    members = [*newest.ranks, *targets.values()]
    generation = planned_generation(newest, targets, state.store_node(members))
    reason = "; ".join(
        f"rank {move.rank} moves from worker {move.source} to worker {move.target} ({move.reason})"
        for move in ready
    )
    incident = state.open_incident("migration", reason, now_s, None, None)
    incident.evidence["moves"] = [move.body() for move in ready]
    for move in ready:
        move.stage = Stage.SWITCHING
    state.moves.pending = True
    state.moves.switch_until_s = now_s + state.config.switch_timeout_s
    state.append(generation, reason, now_s)

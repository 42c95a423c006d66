"""What a policy's decision means for the job: it is written down with its reason, then made by the rules that exist.

Migrations and drains are planned moves; a rebuilt rank counts as lost. Nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from keepstep.core.health_events import SignalSeen
from keepstep.core.job_state import JobState
from keepstep.core.losses import member_lost
from keepstep.core.membership import Standing
from keepstep.core.move_events import DrainRequested, MoveRequested
from keepstep.core.moves import drain_refusal, drain_requested, move_refusal, move_requested
from keepstep.core.policy import Decision, Place, Whereabouts, remember
from keepstep.core.policy_rules import Act
from keepstep.core.protection import unprotected
from keepstep.core.waiting import refill_later

BY = "the policy"
NOTE = "policy"


def signal_seen(state: JobState, event: SignalSeen, now_s: float) -> None:
    """One signal of one source. Before ranks can be moved at all it is kept for then, the newest of its kind."""
    if event.node not in state.members.slots or _ends(state):
        return
    if state.restarting or not state.setup_over:
        key = (event.source, event.kind, event.code, event.node, event.slot, event.device)
        remember(state.policy.later, key, event)
        return
    _judge(state, event, now_s)


def pursue_policy(state: JobState, now_s: float) -> None:
    """Signals that were seen too early."""
    if not state.policy.later or state.restarting or not state.setup_over or _ends(state):
        return
    waiting, state.policy.later = state.policy.later, {}
    for event in waiting.values():
        if event.node in state.members.slots:
            _judge(state, event, now_s)


def recall_decision(state: JobState, body: Mapping[str, Any]) -> None:
    """An entry of an earlier controller."""
    state.policy.recalled.append(body)
    if body["dry_run"]:
        return
    place = (str(body["node"]), body["slot"])
    if body["keep_out"]:
        _bar(state, _slots(state, place, str(body["keep_out"]), body["slots"]))
    for node, slot in body["innocent"]:
        _unbar(state, [(str(node), int(slot))])


def _ends(state: JobState) -> bool:
    return bool(state.finishing or state.stopping or state.ending or state.over)


def _judge(state: JobState, event: SignalSeen, now_s: float) -> None:
    book = state.policy
    decision = book.judge(event, _whereabouts(state, event), now_s)
    if decision is None:
        return
    dry = book.policy.dry_run or state.config.observe
    if not dry and not decision.refused:
        decision = replace(decision, refused=_impossible(state, decision))
    refused = decision.refused
    out = decision.rule.quarantine if not refused and decision.action is not Act.ALERT else "none"
    if decision.action is Act.QUARANTINE and not refused and out == "none":
        out = "slot" if event.slot is not None else "node"
    innocent = [] if dry else [place for place in book.innocent if place[1] is not None]
    book.innocent.clear()
    slots = state.members.slots.get(event.node, 0)
    body = {
        "about": NOTE,
        **decision.body(),
        "keep_out": "" if out == "none" else out,
        "slots": slots,
        "innocent": [list(place) for place in innocent],
        "dry_run": dry,
        "at_s": now_s,
    }
    state.persist("note", body)
    remember(book.verdicts, (event.node, event.slot), body)
    _say(state, decision, dry)
    _unbar(state, [(node, slot) for node, slot in innocent if slot is not None])
    if not dry and not refused:
        if out != "none":
            _bar(state, _slots(state, (event.node, event.slot), out, slots))
            _end_spares(state, now_s)
        _carry_out(state, decision, now_s)


def _say(state: JobState, decision: Decision, dry: bool) -> None:
    ranks = decision.ranks
    whom = f" rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
    if decision.action is Act.DRAIN:
        whom = f" {decision.signal.node}"
    what = f"{decision.action.value}{whom}"
    if decision.refused:
        state.say(f"policy: no {what}, because {decision.refused}; {decision.reason}", "warning")
    elif dry:
        state.say(f"policy (nothing is done): would {what}; {decision.reason}", "warning")
    elif decision.action is not Act.IGNORE:
        state.say(f"policy: {what}; {decision.reason}", "warning")


def _whereabouts(state: JobState, event: SignalSeen) -> Whereabouts:
    newest, workers = state.newest, state.members.workers
    assert newest is not None
    here = []
    for rank, number in enumerate(newest.ranks):
        worker = workers.get(number)
        if worker is not None and worker.useful and worker.node == event.node:
            here.append((rank, worker.slot))
    return Whereabouts(
        ranks=tuple(rank for rank, slot in here if event.slot in (None, slot)),
        node_ranks=tuple(rank for rank, _ in here),
        moving=tuple(state.moves.by_rank),
    )


def _impossible(state: JobState, decision: Decision) -> str:
    """Why the job cannot do it now; "" when it can."""
    match decision.action:
        case Act.MIGRATE:
            refusals = (move_refusal(state, rank, "") for rank in decision.ranks)
            return next((why for why in refusals if why is not None), "")
        case Act.DRAIN:
            return drain_refusal(state, decision.signal.node) or ""
        case Act.REBUILD:
            return _no_replica(state, decision)
    return ""


def _no_replica(state: JobState, decision: Decision) -> str:
    """A rank is given up only where it can be rebuilt: what its machine holds may be all there is."""
    assert state.newest is not None
    lost = _lost(state, decision)
    if (why := unprotected(state, [state.newest.ranks[rank] for rank in lost])) is not None:
        return f"protection is off ({why}): its death would end the job"
    shut = decision.signal.node if decision.rule.quarantine == "node" else ""
    room = sum(spare.node != shut for spare in state.spares())
    room += sum(node != shut for node, _ in state.free_slots())
    if room < len(lost) + len(state.gone()):
        return "there is neither a spare nor a free slot to rebuild it on"
    for rank in lost:
        shard = state.shards.get(rank)
        if shard is not None and not any(
            one == shard and twin not in lost for twin, one in state.shards.items()
        ):
            return f"rank {rank} has no live replica to be rebuilt from"
    return ""


def _lost(state: JobState, decision: Decision) -> list[int]:
    """The ranks that a rebuild gives up: of those that it moves, the ones on the signal's own place."""
    where = _whereabouts(state, decision.signal)
    return [rank for rank in decision.ranks if rank in where.ranks]


def _carry_out(state: JobState, decision: Decision, now_s: float) -> None:
    node, reason = decision.signal.node, decision.reason
    lost = _lost(state, decision) if decision.action is Act.REBUILD else []
    whole = decision.action is Act.DRAIN or (
        decision.action in (Act.REBUILD, Act.MIGRATE) and decision.rule.quarantine == "node"
    )
    if whole and drain_refusal(state, node) is None:
        drain_requested(state, DrainRequested(node=node, reason=reason, by=BY), now_s)
    if decision.action is Act.MIGRATE and not whole:
        for rank in decision.ranks:
            move_requested(state, MoveRequested(rank=rank, reason=reason, by=BY), now_s)
    for rank in lost:
        assert state.newest is not None
        worker = state.members.workers[state.newest.ranks[rank]]
        member_lost(state, worker, "hardware", f"is given up: {reason}", now_s, None, reason)
        if state.over is None:
            state.kill(worker.number, reason)


# ---- places that are not used again --------------------------------------------------------------------


def _slots(state: JobState, place: Place, out: str, slots: int) -> list[tuple[str, int]]:
    node, slot = place
    if out == "slot" and slot is not None:
        return [(node, slot)]
    return [(node, one) for one in range(slots)]


def _bar(state: JobState, places: Iterable[tuple[str, int]]) -> None:
    new = [place for place in places if place not in state.members.quarantined]
    state.members.quarantined.update(new)
    state.policy_barred.update(new)


def _unbar(state: JobState, places: Iterable[tuple[str, int]]) -> None:
    mine = [place for place in places if place in state.policy_barred]
    state.members.quarantined.difference_update(mine)
    state.policy_barred.difference_update(mine)


def _end_spares(state: JobState, now_s: float) -> None:
    """Spares on such a slot are of no use; others take their place where there is room."""
    for worker in state.members.useful():
        barred = (worker.node, worker.slot) in state.policy_barred
        if barred and worker.standing in (Standing.STARTING, Standing.PARKED):
            state.kill(worker.number, f"slot {worker.slot} of {worker.node} is not used any more (policy)")
            refill_later(state, now_s)

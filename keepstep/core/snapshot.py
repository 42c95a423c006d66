"""What `status` shows of a job: one JSON-able picture of the controller's state."""

from __future__ import annotations

from typing import Any

from keepstep.core.job_state import JobState
from keepstep.core.keeping import unkept_ranks
from keepstep.core.membership import Standing, Worker
from keepstep.core.node_facts import NodeFacts
from keepstep.core.protection import protection


def job_phase(state: JobState) -> str:
    """One word: setup, running, migrating, recovering, waiting, finished or failed."""
    if state.over is not None:
        return "finished" if state.over.exit_code == 0 else "failed"
    if state.finishing:
        return "finished"
    if state.waiting is not None and state.waiting.until_s is not None:
        return "waiting"
    if state.incident is not None:
        moving = state.incident.cause == "migration" and not state.incident.victims
        return "migrating" if moving else "recovering"
    return "running" if state.setup_over else "setup"


def snapshot(state: JobState) -> dict[str, Any]:
    """Generation, ranks, spares, free slots, the open incident and what is waited for."""
    newest = None if state.restarting else state.newest
    members = state.members
    shield = protection(state)
    ranks = []
    for rank, number in enumerate(newest.ranks if newest else ()):
        ranks.append({"rank": rank, **_worker(members.workers.get(number), number, state.final_step)})
    playing = set(newest.members) if newest else set()
    others = [worker for worker in members.workers.values() if worker.number not in playing and worker.alive]
    return {
        "job": state.config.job,
        "state": job_phase(state),
        "world_size": state.config.world_size,
        "generation": newest.number if newest else None,
        "published": state.published,
        "ranks": ranks,
        "spares": [_worker(w, w.number) for w in others if w.useful],
        "ending": [_worker(w, w.number) for w in others if w.standing is Standing.ENDING],
        "free_slots": [{"node": node, "slot": slot} for node, slot in members.free_slots()],
        "nodes": [_node(state, facts) for facts in state.nodes.values()],
        "incident": state.incident.body() if state.incident else None,
        "incidents": state.incident_count,
        "spares_wanted": state.config.spares,
        "restarts": state.restarts,
        "waiting": None
        if state.waiting is None
        else {
            "for": state.waiting.what,
            "since_s": state.waiting.since_s,
            "until_s": state.waiting.until_s,
        },
        "moves": [move.body() for _, move in sorted(state.moves.by_rank.items())],
        "draining": dict(state.moves.draining),
        "verdicts": list(state.policy.verdicts.values()),
        "kept_out": [{"node": node, "slot": slot} for node, slot in sorted(state.members.quarantined)],
        "exit_code": state.over.exit_code if state.over else None,
        "reason": state.over.reason if state.over else "",
        "ledger_lost": state.ledger_lost,
        "unkept_ranks": unkept_ranks(state),
        "observe": state.config.observe,
        "protection": {"on": shield.on, "reason": shield.reason, "ranks": list(shield.ranks)},
    }


def _node(state: JobState, facts: NodeFacts) -> dict[str, Any]:
    return {
        "node": facts.name,
        "slots": state.members.slots.get(facts.name, 0),
        "labels": dict(facts.labels),
        "peer": facts.peer,
        "state": facts.link.value,
        "silent_s": facts.silent_s,
    }


def _worker(worker: Worker | None, number: int, last_step: int = 0) -> dict[str, Any]:
    if worker is None:
        return {"worker": number, "node": None, "slot": None, "standing": "unknown", "step": 0}
    return {
        "worker": number,
        "node": worker.node,
        "slot": worker.slot,
        "standing": worker.standing.value,
        "readiness": worker.readiness,
        # The last gate counts like a step, and is none.
        "step": min(worker.step, last_step or worker.step),
    }

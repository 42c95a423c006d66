"""A controller that comes back: its state rebuilt from what the earlier one wrote down.

Processes are believed to live until their agent joins and names those that do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from keepstep.core.actions import EndJob, Persist
from keepstep.core.generations import generation_from_body
from keepstep.core.job_state import JobState
from keepstep.core.membership import Standing, Worker
from keepstep.core.move_facts import Move, Stage
from keepstep.core.moves import forget_drain
from keepstep.core.node_facts import UNDATED, Link, NodeFacts
from keepstep.core.policy_acts import recall_decision
from keepstep.core.replicas import ReplicaBook


def rebuild(state: JobState, entries: Iterable[Persist]) -> None:
    """Fill `state` from the ledger. Raises ValueError when generations do not follow each other."""
    open_incident: Mapping[str, Any] | None = None
    for entry in entries:
        body = entry.body
        match entry.kind:
            case "job":
                state.begun = True
            case "generation":
                _generation(state, body)
            case "incident":
                state.incident_count = max(state.incident_count, int(body["number"]))
                open_incident = body
            case "incident_phase":
                open_incident = body
            case "incident_closed":
                open_incident = None
            case "note":
                _note(state, body)
            case "end":
                # Written, but perhaps not carried out any more.
                state.over = EndJob(exit_code=int(body["exit_code"]), reason=str(body["reason"]))
                state.actions.append(state.over)
    newest = state.newest
    state.absent = {worker.node for worker in state.members.workers.values()}
    for worker in state.members.workers.values():
        worker.standing = Standing.STARTING
        if newest is not None and any(worker.number in g.members for g in state.generations):
            worker.standing = Standing.PLAYING
    if open_incident is not None:
        # Who has resumed since is not known; the incident is closed without that.
        body = {
            **open_incident,
            "resolution": "unresolved",
            "verdict": "the controller was restarted meanwhile",
        }
        state.persist("incident_closed", body)


def _generation(state: JobState, body: Mapping[str, Any]) -> None:
    generation = generation_from_body(body)
    if generation.number != len(state.generations):
        raise ValueError(f"generation {generation.number} follows {len(state.generations) - 1} in the ledger")
    state.generations.append(generation)
    state.ever.update(generation.members)
    if generation.fresh:
        state.restarting, state.published, state.setup_over = False, 0, False
        state.replicas = ReplicaBook(state.config.world_size)
        state.twins_differ = ""


def _note(state: JobState, body: Mapping[str, Any]) -> None:
    match body.get("about"):
        case "worker":
            state.members.adopt(
                Worker(number=int(body["worker"]), node=str(body["node"]), slot=int(body["slot"]))
            )
        case "node":
            name = str(body["node"])
            labels = {str(key): str(value) for key, value in body["labels"].items()}
            state.nodes[name] = node = NodeFacts(name=name, labels=labels, peer=str(body["peer"]))
            node.since_s = UNDATED
            state.link(node, Link.DISCONNECTED)  # until it joins again
            if (place := node.place) is not None:
                state.members.ordinals[name] = place
            if node.for_spares:
                state.members.late.add(name)
        case "restart":
            state.restarts += 1
            state.restarting, state.setup_over = True, False
        case "drain":
            state.moves.draining[str(body["node"])] = str(body["reason"])
        case "undrain":
            forget_drain(state, str(body["node"]))
        case "move":
            _move(state, body)
        case "policy":
            recall_decision(state, body)
        case "retired":
            state.moves.retired.add(int(body["worker"]))
            state.forget_places()
        case "self_check":
            failing = state.self_checks.setdefault(int(body["worker"]), {})
            failing[str(body["check"])] = str(body["reason"])
            if not body["reason"]:
                del failing[str(body["check"])]
        case "fingerprint":
            state.twins_differ = str(body["text"])
        case "finished":
            state.finishing, state.final_step = True, int(body["step"])
            state.cut_short = {int(rank): int(worker) for rank, worker in body.get("cut_short", {}).items()}
        case "spare_check":
            state.members.failed_checks[(str(body["node"]), int(body["slot"]))] += 1
        case "quarantine":
            state.members.quarantined.add((str(body["node"]), int(body["slot"])))
        case "state":
            state.replicas = ReplicaBook.load(body)
        case "setup_over":
            state.setup_over, state.published = True, state.config.setup_steps


def _move(state: JobState, body: Mapping[str, Any]) -> None:
    """A move that was asked for and not ended begins anew: what its target had copied is not counted on."""
    rank = int(body["rank"])
    if body["stage"] != Stage.ASKED.value:
        state.moves.by_rank.pop(rank, None)
        return
    state.moves.by_rank[rank] = Move(
        rank=rank,
        source=int(body["source"]),
        reason=str(body["reason"]),
        by=str(body["by"]),
        unit=str(body["unit"]),
        to=str(body["to"]),
        asked_s=UNDATED,
    )

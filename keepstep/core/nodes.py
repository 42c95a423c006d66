"""Agents that join, come back, or stay away: which processes live, and what they must hear again."""

from __future__ import annotations

from keepstep.core.events import AgentJoined
from keepstep.core.job_state import Complaint, JobState
from keepstep.core.losses import process_lost
from keepstep.core.membership import Standing, Worker
from keepstep.core.moves import forget_copies
from keepstep.core.node_facts import Link, NodeFacts
from keepstep.core.process_status import say_status
from keepstep.core.waiting import refill_later


def agent_joined(state: JobState, event: AgentJoined, now_s: float) -> None:
    again = event.node in state.members.slots
    state.members.offer(event.node, event.slots)
    _know(state, event)
    state.absent.discard(event.node)
    known = state.members.workers
    for number in event.workers:
        if number not in known:
            # Its number is spent, whoever it is; it takes no slot that is known here.
            state.members.adopt(Worker(number=number, node=event.node, slot=-1))
            state.kill(number, f"worker {number} is in no ledger")
        elif not known[number].alive:
            _take_back(state, known[number], now_s)
    missing = [w for w in state.members.of_node(event.node) if w.number not in event.workers]
    for worker in missing:
        status = event.exited.get(worker.number)
        text = f"{say_status(status)} while its agent was away"
        process_lost(state, worker, status, text, now_s, "death")
    _tell_again(state, event.node)
    if not again and state.newest is not None and not state.restarting:
        refill_later(state, now_s)  # spares may be missing for want of its slots


def _tell_again(state: JobState, node: str) -> None:
    """What was said while the agent could not hear, said again; a new one has yet to hear who is where."""
    forget_copies(state, node)
    for worker in state.members.of_node(node):
        fenced = worker.standing is Standing.PLAYING and (
            worker.number not in state.places or state.restarting
        )
        if worker.node == node and worker.standing is Standing.ENDING:
            state.kill(worker.number, f"worker {worker.number} should have ended")
        elif worker.node == node and fenced:
            state.kill(worker.number, f"worker {worker.number} is fenced")
        elif worker.node == node and worker.standing is Standing.PARKED:
            worker.stood_by = False
            if not state.restarting:
                state.stand_by(worker)
    if not state.restarting and state.newest is not None and not state.finishing:
        state.announce(f"the agent of {node} is here: generation {state.newest.number} counts")


def _take_back(state: JobState, worker: Worker, now_s: float) -> None:
    """It was given up with its node and is alive after all: of use only while its rank has no other player."""
    worker.standing = Standing.PLAYING
    if not state.is_member(worker.number):
        state.kill(worker.number, f"worker {worker.number} was given up with its node")
        return
    reason = f"it came back with {worker.node} before anybody had taken its rank over"
    state.say(f"{state.name(worker.number)}: {reason}")
    if state.complaint is None:
        state.complaint = Complaint(
            worker=worker.number, reason=reason, seen_s=now_s, until_s=now_s + state.config.complaint_grace_s
        )


def _know(state: JobState, event: AgentJoined) -> None:
    """The node's facts; written down when they are new, so that a later controller knows them."""
    node = state.nodes.get(event.node)
    if node is None or (node.labels, node.peer) != (event.labels, event.peer):
        body = {"node": event.node, "slots": event.slots, "labels": dict(event.labels), "peer": event.peer}
        state.persist("note", {"about": "node", **body})
    elif node.link is not Link.CONNECTED and event.node not in state.absent:
        state.say(f"the agent of {event.node} is connected again")
    state.nodes[event.node] = facts = NodeFacts(name=event.node, labels=event.labels, peer=event.peer)
    state.link(facts, Link.CONNECTED)
    if (place := facts.place) is not None:
        state.members.ordinals[event.node] = place
    if facts.for_spares:
        state.members.late.add(event.node)
    else:
        state.members.late.discard(event.node)


def node_lost(
    state: JobState, node: str, reason: str, now_s: float, first_evidence_s: float | None = None
) -> None:
    """Give up a node and every worker on it; all its ranks are victims of one incident."""
    if node in state.nodes:
        state.link(state.nodes[node], Link.LOST)
    if node not in state.members.slots and not state.has_workers(node):
        return
    state.say(f"node {node} is lost: {reason}", "error")
    state.absent.discard(node)
    state.members.withdraw(node)
    for worker in state.members.of_node(node):
        text = f"is lost with node {node} ({reason})"
        process_lost(state, worker, None, text, now_s, "node", first_evidence_s)


def miss_absent(state: JobState, now_s: float) -> None:
    """After a controller's restart every agent must come back in time; else its node is lost."""
    if not state.absent:
        state.absent_until_s = None
    elif state.absent_until_s is None:
        state.absent_until_s = now_s + state.config.agent_wait_s
    elif now_s >= state.absent_until_s:
        for node in sorted(state.absent):
            reason = f"its agent did not come back within {state.config.agent_wait_s:.0f} s"
            node_lost(state, node, reason, now_s)

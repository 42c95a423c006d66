"""When is a whole node given up? From broken connections, silence, and what other nodes find when they ask.

Two independent signs are needed, whichever come first:
* its agent's connection broke, and ranks elsewhere complain of broken collectives that nothing else explains;
* it is silent (or gone), and no other node's machine gets an answer from its machine: a probe is a TCP
  connect, which the kernel accepts even where the agent's process is starved or stopped;
* its agent stays away for `agent_wait_s`.
A silent node whose ranks evidently train on (steps get published) is not given up: a step needs every rank.
"""

from __future__ import annotations

from keepstep.core.actions import Probe
from keepstep.core.events import AgentDisconnected, AgentHeard, AgentSilent, ProbeAnswered
from keepstep.core.job_state import JobState
from keepstep.core.node_facts import Inquiry, Link, NodeFacts, domain_of, shared_levels
from keepstep.core.nodes import node_lost

ASKED_AT_MOST = 3
SILENT = "silent"
# One step may be published by ranks that had passed its gate before the node fell silent.
EVIDENT_STEPS = 2


def agent_disconnected(state: JobState, event: AgentDisconnected, now_s: float) -> None:
    """The connection ended; workers may live on."""
    node = state.nodes.get(event.node)
    if node is None or node.link is Link.LOST:
        return
    if not node.suspect:
        node.since_s, node.published_then = now_s, state.published
    state.link(node, Link.DISCONNECTED)
    node.there = False
    if state.has_workers(node.name):
        state.say(
            f"the agent of {node.name} is not connected ({event.reason}); its workers may live on", "warning"
        )
    _ask_others(state, node, now_s)


def agent_silent(state: JobState, event: AgentSilent, now_s: float) -> None:
    """No heartbeats; said again while it lasts."""
    node = state.nodes.get(event.node)
    if node is None or node.link in (Link.LOST, Link.DISCONNECTED):
        return
    node.silent_s = event.silent_s
    if node.link is Link.CONNECTED:
        node.since_s, node.published_then = now_s - event.silent_s, state.published
        state.link(node, Link.SILENT)
    if node.inquiry is None:
        node.there = False
        _ask_others(state, node, now_s)


def agent_heard(state: JobState, event: AgentHeard) -> None:
    """It spoke again."""
    node = state.nodes.get(event.node)
    if node is not None and node.link is Link.SILENT:
        node.inquiry, node.there, node.silent_s = None, False, 0.0
        state.link(node, Link.CONNECTED)


def probe_answered(state: JobState, event: ProbeAnswered) -> None:
    node = state.nodes.get(event.node)
    if node is not None and node.inquiry is not None and event.by in node.inquiry.asked:
        node.inquiry.answers[event.by] = event.outcome


def watch_nodes(state: JobState, now_s: float) -> None:
    """Give up what must be given up. Idempotent."""
    if state.ending is not None or state.stopping is not None or state.finishing:
        return
    for node in state.suspects():
        reason = _verdict(state, node, now_s)
        if reason is not None:
            node.inquiry = None
            node_lost(state, node.name, reason, now_s, node.since_s)


def explains_complaint(state: JobState, now_s: float) -> bool:
    """Whether a suspect node with ranks may be behind a complaint: its case comes first, for a short while."""
    complaint = state.complaint
    if complaint is None or now_s >= complaint.seen_s + state.config.suspect_hold_s:
        return False
    return any(not node.there and state.has_members(node.name) for node in state.suspects())


def watch_marks(state: JobState, now_s: float) -> list[float | None]:
    """When `watch_nodes` has something to do though nothing happens. What is past has been looked at."""
    config = state.config
    marks: list[float | None] = []
    for node in state.suspects():
        if node.inquiry is not None:
            marks.append(node.inquiry.until_s)
        if node.link is Link.DISCONNECTED:
            marks += [node.since_s + config.agent_wait_s, _stalled_until_s(state, node)]
            if state.complaint is not None:
                marks.append(max(node.since_s, state.complaint.seen_s) + config.node_grace_s)
    if state.complaint is not None and state.suspects():
        marks.append(state.complaint.seen_s + config.suspect_hold_s)
    return [mark for mark in marks if mark is not None and mark > now_s]


def _verdict(state: JobState, node: NodeFacts, now_s: float) -> str | None:
    """Why the node is to be given up now; None: not yet, or not at all."""
    config = state.config
    if node.link is Link.DISCONNECTED:
        # A death that is known already explains a complaint just as well.
        complaint = None if state.gone() or not state.has_members(node.name) else state.complaint
        if complaint is not None and now_s >= max(node.since_s, complaint.seen_s) + config.node_grace_s:
            who = state.name(complaint.worker)
            return f"its agent's connection broke, and {who} lost its peers ({complaint.reason})"
        if (stalled_s := _stalled_until_s(state, node)) is not None and now_s >= stalled_s:
            return f"its agent is gone, and the recovery under way waits for its ranks since {config.node_stalled_s:g} s"
        if now_s >= node.since_s + config.agent_wait_s:
            return f"its agent did not come back within {config.agent_wait_s:g} s"
    inquiry = node.inquiry
    if inquiry is None or not (inquiry.complete or now_s >= inquiry.until_s):
        return None
    node.inquiry = None
    outcomes = set(inquiry.answers.values())
    node.there = bool(outcomes - {SILENT})
    if node.there or not outcomes:
        return None
    if state.published >= node.published_then + EVIDENT_STEPS and node.link is Link.SILENT:
        node.there = True  # its ranks contribute to every step that is published
        return None
    askers = ", ".join(sorted(inquiry.answers))
    return f"it was silent for {now_s - node.since_s:.1f} s, and {askers} cannot reach it either"


def _stalled_until_s(state: JobState, node: NodeFacts) -> float | None:
    """How long a recovery waits for ranks whose agent cannot even tell them; None: as long as it takes.

    They may have died with it, and then nobody would ever say so. Only where spares can take their place.
    """
    incident = state.incident
    if incident is None or incident.announced_s is None or state.gone():
        return None
    members = sum(state.is_member(worker.number) for worker in state.members.of_node(node.name))
    if not 0 < members <= len(state.spares()):
        return None
    return max(node.since_s, incident.announced_s) + state.config.node_stalled_s


def _ask_others(state: JobState, node: NodeFacts, now_s: float) -> None:
    """Let other connected nodes try to reach it, those of other failure domains first."""
    if not node.peer:
        return
    levels = state.config.domains
    own = domain_of(node, levels)
    askers = [
        other
        for other in state.nodes.values()
        if other.link is Link.CONNECTED and other.name != node.name and other.peer
    ]
    askers.sort(key=lambda other: shared_levels(domain_of(other, levels), own))
    chosen = tuple(other.name for other in askers[:ASKED_AT_MOST])
    if not chosen:
        return
    timeout_s = state.config.probe_timeout_s
    node.inquiry = Inquiry(asked=chosen, until_s=now_s + timeout_s + state.config.probe_slack_s)
    for by in chosen:
        state.actions.append(Probe(node=node.name, peer=node.peer, by=by, timeout_s=timeout_s))

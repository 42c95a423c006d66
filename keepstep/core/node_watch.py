"""When is a whole node given up? From broken connections, silence, and what other nodes find when they ask.

Two independent signs are needed, whichever come first:
* its agent's connection broke, and ranks elsewhere complain of broken collectives that nothing else explains;
* it is silent (or gone), and no other node's machine gets an answer from its machine: a probe is a TCP
  connect, which the kernel accepts even where the agent's process is starved or stopped;
* its agent stays away for `agent_wait_s`.
A silent node whose ranks evidently train on (steps get published) is not given up: a step needs every rank.
"""

from __future__ import annotations

from keepstep.core.actions import DropAgent, Probe
from keepstep.core.events import AgentDisconnected, AgentHeard, AgentSilent, ProbeAnswered
from keepstep.core.job_state import JobState
from keepstep.core.node_facts import UNDATED, Inquiry, Link, NodeFacts, domain_of, shared_levels
from keepstep.core.nodes import node_lost

ASKED_AT_MOST = 3
ASK_AGAIN_S = 1.0
LATE_S = 0.5
RETURN_GRACE_S = 5.0
FEW_SUSPECTS = 32
LOOK_INTERVAL_S = 0.1
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
        node.published_seen, node.told = state.published, False
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
        node.published_seen, node.told = state.published, False
        state.link(node, Link.SILENT)
    if node.inquiry is None:
        node.there = False
        _ask_others(state, node, now_s)


def agent_heard(state: JobState, event: AgentHeard) -> None:
    """It spoke again. Whoever was given up meanwhile does not know that: it has to join anew."""
    node = state.nodes.get(event.node)
    if node is not None and node.link is Link.LOST:
        reason = "it was given up while it was silent"
        state.say(f"node {node.name} is heard again; {reason}, so it has to join anew", "warning")
        state.actions.append(DropAgent(node=node.name, reason=reason))
    if node is not None and node.link is Link.SILENT:
        node.inquiry, node.there, node.silent_s = None, False, 0.0
        state.link(node, Link.CONNECTED)


def probe_answered(state: JobState, event: ProbeAnswered) -> None:
    node = state.nodes.get(event.node)
    if node is not None and node.inquiry is not None and event.by in node.inquiry.asked:
        node.inquiry.answers[event.by] = event.outcome


def watch_nodes(state: JobState, now_s: float) -> None:
    """Give up what must be given up. Idempotent."""
    if not state.suspected:
        state.watch_due_s = None
        return
    if now_s < next_look_s(state):
        return
    _excuse_lateness(state, now_s)
    state.looked_s = now_s
    if state.ending is None and state.stopping is None and not state.finishing:
        grace_s = _grace_s(state)
        for node in state.suspects():
            _look_at(state, node, now_s)
            reason = _verdict(state, node, now_s, grace_s)
            if reason is not None:
                _give_up(state, node, reason, now_s)
    state.watch_due_s = min(watch_marks(state, now_s), default=None)


def next_look_s(state: JobState) -> float:
    """From when on suspects are looked at again: a few at every event, a whole cluster (a controller whose own
    network is cut) not so often that nothing else is done."""
    return state.looked_s + LOOK_INTERVAL_S if len(state.suspected) > FEW_SUSPECTS else state.looked_s


def explains_complaint(state: JobState, now_s: float) -> bool:
    """Whether a suspect node with ranks may be behind a complaint: its case comes first, for a short while."""
    complaint = state.complaint
    if complaint is None or now_s >= complaint.seen_s + state.config.suspect_hold_s:
        return False
    return any(
        (node.link is Link.DISCONNECTED or not node.there) and _replaceable(state, node)
        for node in state.suspects()
    )


def watch_marks(state: JobState, now_s: float) -> list[float]:
    """When `watch_nodes` has something to do though nothing happens. What is past has been looked at."""
    config = state.config
    if len(state.suspected) > FEW_SUSPECTS:
        return [max(now_s, next_look_s(state))]
    marks: list[float | None] = []
    grace_s = _grace_s(state)
    for node in state.suspects():
        if node.inquiry is not None:
            marks.append(node.inquiry.until_s)
        if node.link is Link.DISCONNECTED:
            marks += [_wait_until_s(state, node), _stalled_until_s(state, node), node.asked_s + ASK_AGAIN_S]
            seen_s = _unexplained_s(state)
            if seen_s is not None:
                marks.append(max(node.since_s, seen_s) + grace_s)
    if state.complaint is not None and state.suspected:
        marks.append(state.complaint.seen_s + config.suspect_hold_s)
    return [mark for mark in marks if mark is not None and mark > now_s]


# ---- one node -----------------------------------------------------------------------------------------


def _look_at(state: JobState, node: NodeFacts, now_s: float) -> None:
    """Date it, ask about it again, and see whether its ranks train on."""
    if node.since_s == UNDATED:  # known from the ledger, not seen yet: its agent is on its way, as it seems
        node.since_s, node.asked_s = now_s + RETURN_GRACE_S, now_s + RETURN_GRACE_S - ASK_AGAIN_S
        node.published_then = node.published_seen = state.published
    if state.published > node.published_seen:
        node.published_seen = state.published
        if state.published >= node.published_then + EVIDENT_STEPS:
            node.evident_s = now_s
    if node.link is Link.DISCONNECTED and node.inquiry is None and now_s >= node.asked_s + ASK_AGAIN_S:
        _ask_others(state, node, now_s)


def _verdict(state: JobState, node: NodeFacts, now_s: float, grace_s: float) -> str | None:
    """Why the node is to be given up now; None: not yet, or not at all."""
    config = state.config
    if node.link is Link.DISCONNECTED:
        seen_s = _unexplained_s(state)
        blamed = seen_s is not None and _replaceable(state, node) and _complained_elsewhere(state, node)
        if seen_s is not None and blamed and now_s >= max(node.since_s, seen_s) + grace_s:
            return f"its agent's connection broke, and {_who_complains(state)}"
        if (stalled_s := _stalled_until_s(state, node)) is not None and now_s >= stalled_s:
            return f"its agent is gone, and the recovery under way waits for its ranks since {config.node_stalled_s:g} s"
        if now_s >= _wait_until_s(state, node):
            return f"its agent did not come back within {config.agent_wait_s:g} s"
    inquiry = node.inquiry
    if inquiry is None or not (inquiry.complete or now_s >= inquiry.until_s):
        return None
    node.inquiry = None
    outcomes = set(inquiry.answers.values())
    node.there = bool(outcomes - {SILENT})
    if node.there or not outcomes:
        return None
    if node.evident_s > node.since_s:
        node.there = True  # its ranks contribute to every step that is published
        return None
    if state.has_members(node.name) and not _ranks_elsewhere(state, node):
        return None  # whatever state there is, is there: its return is better than its loss
    askers = ", ".join(sorted(inquiry.answers))
    return f"it was silent for {now_s - node.since_s:.1f} s, and {askers} cannot reach it either"


def _give_up(state: JobState, node: NodeFacts, reason: str, now_s: float) -> None:
    node.inquiry = None
    if not state.config.observe:
        node_lost(state, node.name, reason, now_s, min(node.since_s, now_s))
    elif not node.told:
        node.told = True
        text = f"would give up node {node.name}: {reason}"
        state.persist("note", {"about": "would", "text": text, "reason": reason})
        state.say(f"observe: {text}", "warning")


def _unexplained_s(state: JobState) -> float | None:
    """Since when members complain of broken connections though no death is known; None: nobody does."""
    if state.gone():
        return None  # a death that is known explains it just as well
    if state.complaint is not None:
        return state.complaint.seen_s
    incident = state.incident
    return incident.opened_s if incident is not None and not incident.victims else None


def _who_complains(state: JobState) -> str:
    if state.complaint is not None:
        return f"{state.name(state.complaint.worker)} lost its peers ({state.complaint.reason})"
    return "ranks elsewhere lost their peers"


def _complained_elsewhere(state: JobState, node: NodeFacts) -> bool:
    """A complaint of the node's own ranks says nothing about the node's machine."""
    if state.complaint is None:
        return True
    worker = state.members.workers.get(state.complaint.worker)
    return worker is not None and worker.node != node.name


def _grace_s(state: JobState) -> float:
    """When most agents are away at once it is rather the controller's own network that is."""
    nodes = state.member_nodes()
    away = sum(node.name in nodes for node in state.suspects())
    return state.config.node_grace_s if 2 * away <= max(2, len(nodes)) else RETURN_GRACE_S


def _wait_until_s(state: JobState, node: NodeFacts) -> float:
    return max(node.since_s, node.evident_s) + state.config.agent_wait_s


def _stalled_until_s(state: JobState, node: NodeFacts) -> float | None:
    """How long a recovery waits for ranks whose agent cannot even tell them; None: as long as it takes.

    They may have died with it, and then nobody would ever say so.
    """
    incident = state.incident
    if incident is None or incident.announced_s is None or state.gone() or not _replaceable(state, node):
        return None
    return max(node.since_s, incident.announced_s) + state.config.node_stalled_s


def _replaceable(state: JobState, node: NodeFacts) -> bool:
    """Whether it has ranks, and others could play them: else its agent's return is the only hope anyway."""
    members = sum(state.is_member(worker.number) for worker in state.members.of_node(node.name))
    if not members or not _ranks_elsewhere(state, node):
        return False
    spares = sum(spare.node != node.name for spare in state.spares())
    return members <= spares + sum(name != node.name for name, _ in state.free_slots())


def _ranks_elsewhere(state: JobState, node: NodeFacts) -> bool:
    return any(name != node.name for name in state.member_nodes())


def _excuse_lateness(state: JobState, now_s: float) -> None:
    """A controller that stood still (stopped, starved) has not heard what was said meanwhile: begin anew."""
    late_s = 0.0 if state.watch_due_s is None else now_s - state.watch_due_s
    if late_s < LATE_S:
        return
    for node in state.suspects():
        node.inquiry = None
        if node.since_s != UNDATED:
            node.since_s += late_s
        node.asked_s = now_s
    if state.complaint is not None:
        state.complaint.seen_s += late_s
        state.complaint.until_s += late_s


def _ask_others(state: JobState, node: NodeFacts, now_s: float) -> None:
    """Let other connected nodes try to reach it, those of other failure domains first."""
    if not node.peer:
        return
    levels = state.config.domains
    own = domain_of(node, levels)
    node.asked_s = now_s
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

"""What befalls whole nodes: machines that die, networks that are cut and heal, agents that are restarted.

What the controller's shell would see of it is told to the core: broken connections, silence, probes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from keepstep.core.actions import Probe
from keepstep.core.events import AgentDisconnected, AgentJoined, AgentSilent, ProbeAnswered
from keepstep.sim.agenda import Channel

if TYPE_CHECKING:
    from keepstep.sim.cluster import Cluster
    from keepstep.sim.virtual_worker import VirtualWorker

SILENCE_TOLD_S = 1.0
VICTIM = "n1"


class Reach:
    """Which nodes the controller and the other nodes reach at this moment."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.cut: set[str] = set()
        self._held: dict[str, list[Callable[[], None]]] = {}

    def away(self, node: str) -> bool:
        """Whether the agent of a living node is being restarted: what is for it or from it waits."""
        return node in self._held

    def hold(self, node: str, errand: Callable[[], None]) -> None:
        self._held[node].append(errand)

    def outcome(self, node: str) -> str:
        """What a probe of the node finds."""
        if node in self.cut:
            return "silent"
        if node not in self._cluster.channels:
            return "refused" if self._cluster.chance(0.5) else "silent"
        return "refused" if self.away(node) else "reached"

    def leave(self, node: str) -> None:
        self._held.setdefault(node, [])

    def come_back(self, node: str) -> list[Callable[[], None]]:
        return self._held.pop(node, [])


def can_be_lost(cluster: Cluster) -> bool:
    return VICTIM in cluster.channels and not any(w.finished for w in cluster.workers.values())


def of_victim(cluster: Cluster) -> list[VirtualWorker]:
    return [w for w in cluster.workers.values() if w.alive and w.node == VICTIM]


def lose_node(cluster: Cluster) -> None:
    """The machine dies: agent and workers at once, every connection breaks."""
    if not can_be_lost(cluster):
        return
    cluster.tell(f"*** node {VICTIM} is lost")
    del cluster.channels[VICTIM]
    cluster.reach.come_back(VICTIM)
    for worker in of_victim(cluster):
        cluster.exit(worker, -9)
    cluster.deliver(AgentDisconnected(node=VICTIM, reason="connection reset"), Channel(cluster.agenda))


def cut_node(cluster: Cluster) -> None:
    """Its network is cut: everybody lives, nobody hears anybody; later it may heal."""
    if not can_be_lost(cluster) or cluster.reach.away(VICTIM):
        return
    cluster.tell(f"*** the network of {VICTIM} is cut")
    channel = cluster.channels.pop(VICTIM)
    cluster.reach.cut.add(VICTIM)
    for worker in of_victim(cluster):
        if worker.room is not None:
            worker.room.leave(worker)
            worker.room.fail_one(worker)
    began_s = cluster.agenda.now_s
    heals_s = cluster.delay(20.0)

    def still_silent() -> None:
        if VICTIM in cluster.reach.cut and cluster.end is None:
            event = AgentSilent(node=VICTIM, silent_s=cluster.agenda.now_s - began_s)
            cluster.deliver(event, Channel(cluster.agenda))
            cluster.agenda.after(SILENCE_TOLD_S, still_silent)

    def heal() -> None:
        cluster.tell(f"the network of {VICTIM} is there again")
        cluster.reach.cut.discard(VICTIM)
        cluster.channels[VICTIM] = channel
        cluster.reach.leave(VICTIM)
        _join_again(cluster)

    cluster.agenda.after(SILENCE_TOLD_S, still_silent)
    cluster.agenda.after(heals_s, heal)


def restart_agent(cluster: Cluster) -> None:
    """The agent dies and comes back; its workers live on, and what was said meanwhile waited."""
    if VICTIM not in cluster.channels or cluster.reach.away(VICTIM):
        return
    cluster.tell(f"*** the agent of {VICTIM} dies")
    cluster.reach.leave(VICTIM)
    cluster.deliver(AgentDisconnected(node=VICTIM, reason="connection reset"), Channel(cluster.agenda))

    def come_back() -> None:
        if not cluster.reach.away(VICTIM) or VICTIM not in cluster.channels:
            return
        cluster.tell(f"the agent of {VICTIM} is back")
        _join_again(cluster)

    cluster.agenda.after(0.05 + cluster.delay(2.0), come_back)


def _join_again(cluster: Cluster) -> None:
    """The new connection counts from the moment at which the core hears of it."""
    hello = joined(cluster, VICTIM)

    def heard() -> None:
        if VICTIM not in cluster.channels or not cluster.reach.away(VICTIM):
            return
        held = cluster.reach.come_back(VICTIM)
        cluster.hear(hello)
        for errand in held:
            errand()

    cluster.channels[VICTIM].send(cluster.delay(0.01), heard)


def joined(cluster: Cluster, node: str) -> AgentJoined:
    """What a node's agent says when it connects."""
    here = [worker for worker in cluster.workers.values() if worker.node == node]
    return AgentJoined(
        node=node,
        slots=cluster.nodes[node],
        workers=tuple(w.number for w in here if w.alive),
        exited={w.number: w.status for w in here if w.status is not None},
        finished=tuple(w.number for w in here if w.finished),
        peer=f"{node}:1",
    )


def answer_probe(cluster: Cluster, probe: Probe) -> None:
    """A node tries to reach another one, and says what it found."""
    if probe.by not in cluster.channels or cluster.reach.away(probe.by):
        return
    outcome = cluster.reach.outcome(probe.node)
    takes_s = probe.timeout_s if outcome == "silent" else cluster.delay(0.01)
    event = ProbeAnswered(node=probe.node, by=probe.by, outcome=outcome)
    cluster.agenda.after(takes_s, lambda: cluster.deliver(event, Channel(cluster.agenda)))

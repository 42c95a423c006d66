"""Which spare takes which rank, and whose agent keeps whose records: failures should not share their causes.

Failure domains come from the nodes' labels (`JobConfig.domains`, outermost first), the node itself is the
innermost. Pure choices over what is known; nothing is announced here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from keepstep.core.node_facts import Link, domain_of, natural, shared_levels

if TYPE_CHECKING:
    from keepstep.core.job_state import JobState
    from keepstep.core.membership import Worker

MOST_TWINS = 16  # of so many copies not all share a cause


def heirs(state: JobState, vacant: Sequence[int], spares: Sequence[Worker]) -> list[int]:
    """One spare for each vacant rank, in their order. `spares`: at least as many, the best first.

    Hot before warm; then far from the node that was lost, then far from the rank's twins, then the oldest.
    """
    left = list(spares)
    lost = (
        {victim.rank: victim.node for victim in state.incident.victims if victim.cause == "node"}
        if state.incident
        else {}
    )
    chosen = []
    for rank in vacant:
        avoided = [lost[rank]] if rank in lost else []
        twins = state.twins_of(rank)
        if len(twins) <= MOST_TWINS:
            avoided += [node for twin in twins if (node := state.node_of_rank(twin))]
        best = min(left, key=lambda spare: (spare.readiness != "hot", _nearness(state, spare.node, avoided)))
        left.remove(best)
        chosen.append(best.number)
    return chosen


def crowded(state: JobState, ranks: Sequence[int]) -> list[str]:
    """What is to be said of these ranks' places: twins that share a node. Empty when all is well."""
    lines = []
    for rank in ranks:
        own, twins = state.node_of_rank(rank), state.twins_of(rank)
        if len(twins) > MOST_TWINS:
            continue
        near = [twin for twin in twins if state.node_of_rank(twin) == own]
        others = [twin for twin in twins if twin not in near]
        if near and not others:
            lines.append(
                f"ranks {rank} and {', '.join(map(str, near))} hold the same state and all live on {own}"
            )
    return lines


def keepers(state: JobState) -> dict[str, str]:
    """For each node with members the node whose agent keeps their records; none where there is no other.

    Another failure domain first, then nodes that hold spares (a replacement finds them at home), evenly.
    """
    levels = state.config.domains
    able = [node for node in state.nodes.values() if node.link is Link.CONNECTED and node.peer]
    spare_nodes = {spare.node for spare in state.spares()}
    load = dict.fromkeys((node.name for node in able), 0)
    found: dict[str, str] = {}
    by_domain: Mapping[str, tuple[str, ...]] = {node.name: domain_of(node, levels) for node in able}
    for name in sorted(state.member_nodes(), key=natural):
        own = domain_of(state.nodes.get(name), levels)
        others = [node.name for node in able if node.name != name]
        if not others:
            continue
        best = min(
            others,
            key=lambda other: (
                shared_levels(by_domain[other][:-1], own[:-1]),
                load[other],
                other not in spare_nodes,
                natural(other),
            ),
        )
        load[best] += 1
        found[name] = best
    return found


def peers(state: JobState) -> dict[str, str]:
    """Where the agents of all nodes that can be reached listen for other nodes."""
    return {node.name: node.peer for node in state.nodes.values() if node.peer and node.link is not Link.LOST}


def _nearness(state: JobState, node: str, avoided: Sequence[str]) -> int:
    levels = state.config.domains
    own = domain_of(state.nodes.get(node), levels)
    return max(
        (shared_levels(own, domain_of(state.nodes.get(other), levels)) for other in avoided), default=0
    )

"""Which spare takes which rank, and whose agent keeps whose records: failures should not share their causes.

Failure domains come from the nodes' labels (`JobConfig.domains`, outermost first), the node itself is the
innermost. Pure choices over what is known; nothing is announced here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from keepstep.core.node_facts import Link, domain_of, natural, shared_levels

if TYPE_CHECKING:
    from keepstep.core.job_state import JobState
    from keepstep.core.membership import Worker

MOST_TWINS = 16  # of so many copies not all share a cause
CANDIDATES = 32


def heirs(state: JobState, vacant: Sequence[int], spares: Sequence[Worker]) -> list[int]:
    """One spare for each vacant rank, in their order. `spares`: at least as many, the best first.

    Hot before warm; then far from the node that was lost, then far from the rank's twins, then the oldest.
    """
    left = _together(state, vacant, spares) if state.config.replace_unit == "node" else list(spares)
    lost = (
        {victim.rank: victim.node for victim in state.incident.victims if victim.cause == "node"}
        if state.incident
        else {}
    )
    chosen = []
    claimed = state.moves.targets()
    for rank in vacant:
        dead = [lost[rank]] if rank in lost else []
        twins = state.twins_of(rank)
        few = twins if len(twins) <= MOST_TWINS else []
        near = [node for twin in few if (node := state.node_of_rank(twin))]
        best = min(
            left,
            key=lambda spare: (
                claimed.get(spare.number) != rank,  # it is built as this very rank already
                spare.number in claimed,
                spare.readiness != "hot",
                _nearness(state, spare.node, dead),
                _nearness(state, spare.node, near),
            ),
        )
        left.remove(best)
        chosen.append(best.number)
    return chosen


def target_for(state: JobState, rank: int, spares: Sequence[Worker]) -> Worker:
    """The spare that a living rank moves to: hot before warm, then away from its node, then from its twins."""
    twins = state.twins_of(rank)
    near = [node for twin in twins[:MOST_TWINS] if (node := state.node_of_rank(twin))]
    own = [state.node_of_rank(rank)]
    return min(
        spares,
        key=lambda spare: (
            spare.readiness != "hot",
            _nearness(state, spare.node, own),
            _nearness(state, spare.node, near),
            spare.number,
        ),
    )


def moved_along(state: JobState, gone: Sequence[int]) -> list[int]:
    """With whole nodes as the unit: the living members on the nodes of those who are gone.

    None (and said) where a rank's only living copy would go with them, or spares are too few.
    """
    workers, places = state.members.workers, state.places
    nodes = {workers[number].node for number in gone}
    comrades = [number for number in places if workers[number].useful and workers[number].node in nodes]
    if not comrades:
        return []
    names = ", ".join(sorted(nodes))
    alone = [
        places[number]
        for number in comrades
        if not any(state.node_of_rank(twin) not in {"", *nodes} for twin in state.twins_of(places[number]))
    ]
    if alone:
        ranks = ", ".join(map(str, sorted(alone)))
        state.say(
            f"{names} is not replaced as a whole: no other node is known to hold the state of ranks {ranks}",
            "warning",
        )
        return []
    if len(state.spares()) < len(gone) + len(comrades):
        state.say(
            f"{names} is not replaced as a whole: that takes {len(gone) + len(comrades)} spares, "
            f"{len(state.spares())} are there",
            "warning",
        )
        return []
    return comrades


def _together(state: JobState, vacant: Sequence[int], spares: Sequence[Worker]) -> list[Worker]:
    """The spares of one node, where one has enough of them: the fewest that do; else all."""
    by_node: dict[str, list[Worker]] = {}
    for spare in spares:
        by_node.setdefault(spare.node, []).append(spare)
    enough = [group for group in by_node.values() if len(group) >= len(vacant)]
    if not enough:
        return list(spares)
    fewest = min(enough, key=len)
    return list(fewest)


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

    Whoever has a keeper that still can be one keeps it. A new one is sought evenly, in another failure domain
    where one is near in the order, among nodes that hold spares first (a replacement finds the records at
    home). A few candidates are looked at for each: thousands of nodes take milliseconds.
    """
    able = {name for name, node in state.nodes.items() if node.link is Link.CONNECTED and node.peer}
    names = state.member_nodes()
    found = {name: keeper for name, keeper in state.keepers.items() if name in names and keeper in able}
    if len(found) < len(names):
        _seek_keepers(state, sorted(names - found.keys(), key=natural), able, found)
    state.keepers = found
    return found


def _seek_keepers(state: JobState, names: Sequence[str], able: set[str], found: dict[str, str]) -> None:
    levels = state.config.domains
    spare_nodes = {spare.node for spare in state.spares()}
    order = sorted(able, key=lambda name: (name not in spare_nodes, natural(name)))
    places = [(name, domain_of(state.nodes[name], levels)) for name in order]
    load = dict.fromkeys(order, 0)
    for keeper in found.values():
        load[keeper] += 1
    # Neighbours in the order share a rack: the search begins on the other side.
    for at, name in enumerate(names, start=len(places) // 2):
        own = domain_of(state.nodes.get(name), levels)
        best: tuple[int, int, str] | None = None
        for step in range(min(len(places), CANDIDATES)):
            other, domain = places[(at + step) % len(places)]
            if other == name:
                continue
            candidate = (shared_levels(domain, own), load[other])
            if best is None or candidate < best[:2]:
                best = (*candidate, other)
            if candidate <= (0, len(found) // len(places)):
                break
        if best is not None:
            found[name] = best[2]
            load[best[2]] += 1


def peers(state: JobState) -> dict[str, str]:
    """Where the agents of all nodes that can be reached listen for other nodes."""
    return {node.name: node.peer for node in state.nodes.values() if node.peer and node.link is not Link.LOST}


def _nearness(state: JobState, node: str, avoided: Sequence[str]) -> int:
    levels = state.config.domains
    own = domain_of(state.nodes.get(node), levels)
    return max(
        (shared_levels(own, domain_of(state.nodes.get(other), levels)) for other in avoided), default=0
    )

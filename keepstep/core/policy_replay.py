"""What a policy would have done about recorded signals, in a job of which only the signals are known.

Each place of which a signal speaks is taken to play one rank, in the order in which they appear, unless the
record names the rank. A rank that is moved goes to a new place of its own, at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from keepstep.core.health_events import SignalSeen
from keepstep.core.policy import Decision, PolicyBook, Whereabouts
from keepstep.core.policy_rules import Policy


def replay(
    policy: Policy, signals: Iterable[tuple[float, SignalSeen, int | None]]
) -> Iterator[tuple[float, Decision]]:
    """`signals`: when (in seconds), what, and which rank was played there (None: not recorded)."""
    book = PolicyBook(policy)
    places: dict[int, tuple[str, int]] = {}  # rank -> node, slot
    seen: set[tuple[str, int]] = set()
    for at_s, signal, named in signals:
        if signal.slot is not None:
            here = (signal.node, signal.slot)
            if named is not None:
                places = {rank: place for rank, place in places.items() if place != here}
                places[named] = here
            elif here not in seen:
                places[max(places, default=-1) + 1] = here
            seen.add(here)
        on_node = tuple(sorted(rank for rank, (node, _) in places.items() if node == signal.node))
        ranks = tuple(rank for rank in on_node if signal.slot in (None, places[rank][1]))
        decision = book.judge(signal, Whereabouts(ranks=ranks, node_ranks=on_node), at_s)
        if decision is None:
            continue
        yield at_s, decision
        if not decision.refused:
            for rank in decision.ranks:
                places[rank] = (f"spare-{rank}", 0)

"""What the workers of one node say at the same moment, as one event, and taken apart again.

After a failure every rank reports its verdict and its return. A job of 16,384 ranks has 2,048 nodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from keepstep.core.events import Event, NodeResumed, NodeVerdict, Resumed, VerdictReached


def alike(event: object) -> Hashable | None:
    """Events with the same answer may be told as one; None: this one stands for itself."""
    match event:
        case Resumed():
            return (Resumed, event.generation)
        case VerdictReached():
            same = (event.target, event.course, event.reason, event.bit_exact, event.recomputed)
            return (VerdictReached, event.generation, *same)
        case _:
            return None


def joined(node: str, events: Sequence[Event]) -> Event:
    """One event for several that are alike; a single one as it is. The newest of a worker counts."""
    first = events[0]
    if len(events) == 1:
        return first
    if isinstance(first, Resumed):
        steps = {event.worker: event.step for event in events if isinstance(event, Resumed)}
        return NodeResumed(node=node, generation=first.generation, steps=steps)
    assert isinstance(first, VerdictReached)
    verdicts = [event for event in events if isinstance(event, VerdictReached)]
    return NodeVerdict(
        node=node,
        generation=first.generation,
        target=first.target,
        course=first.course,
        reason=first.reason,
        connected_s={event.worker: event.connect_s for event in verdicts},
        voted_s={event.worker: event.vote_s for event in verdicts},
        bit_exact=first.bit_exact,
        recomputed=first.recomputed,
    )


def each_verdict(event: NodeVerdict) -> list[VerdictReached]:
    """What its members said."""
    return [
        VerdictReached(
            worker=worker,
            generation=event.generation,
            target=event.target,
            course=event.course,
            reason=event.reason,
            connect_s=connect_s,
            vote_s=event.voted_s.get(worker, 0.0),
            bit_exact=event.bit_exact,
            recomputed=event.recomputed,
        )
        for worker, connect_s in event.connected_s.items()
    ]

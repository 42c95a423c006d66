"""An announcement on its way to thousands of agents: encoded once, and as a change where the rest is known.

It only chooses the bytes; whether a link takes them is the link's affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from keepstep.controller.agents import AgentLink
from keepstep.core.actions import Announce
from keepstep.wire.changes import change_between
from keepstep.wire.codec import encode


def announced(links: Iterable[AgentLink], announce: Announce) -> Iterator[tuple[AgentLink, bytes]]:
    """What each link is to be sent; a link that was told the announcement before gets only what changed."""
    whole: bytes | None = None
    changes: dict[int, bytes | None] = {}  # by the generation that a link knows
    for link in links:
        if link.muted:
            continue
        known, link.told = link.told, announce
        data = None
        if known is not None:
            base = known.generation.number
            if base not in changes:
                change = change_between(known, announce)
                changes[base] = None if change is None else encode(change)
            data = changes[base]
        if data is None:
            data = whole = whole or encode(announce)
        yield link, data

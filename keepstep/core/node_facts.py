"""What is known of each node: where it stands, how to reach its agent, and what others found out about it.

Values only; what follows from them is decided in `node_watch`.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

PLACE_LABEL = "node_rank"
UNDATED = -1.0
SPARE_LABEL = ("keepstep", "spare")  # a node that offers its slots for spares only


class Link(enum.StrEnum):
    """How the controller stands with a node's agent."""

    CONNECTED = "connected"
    SILENT = "silent"  # connected, but not heard for longer than its heartbeats explain
    DISCONNECTED = "disconnected"
    LOST = "lost"


@dataclass(slots=True, kw_only=True)
class Inquiry:
    """Other nodes were asked whether they reach this one's agent. `answers`: node -> outcome."""

    asked: tuple[str, ...]
    until_s: float
    answers: dict[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.answers) == len(self.asked)


@dataclass(slots=True, kw_only=True)
class NodeFacts:
    """One node.

    `since_s`: when it left CONNECTED (UNDATED: before this controller looked); `published_then`: what all
    ranks held at that time. `evident_s`: when its ranks last proved that they train on.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    peer: str = ""
    link: Link = Link.CONNECTED
    since_s: float = 0.0
    silent_s: float = 0.0
    published_then: int = 0
    published_seen: int = 0
    evident_s: float = 0.0
    asked_s: float = 0.0
    told: bool = False  # watching only: what would be done was said
    inquiry: Inquiry | None = None
    there: bool = False  # an inquiry found that its machine answers

    @property
    def suspect(self) -> bool:
        return self.link in (Link.SILENT, Link.DISCONNECTED)

    @property
    def for_spares(self) -> bool:
        key, value = SPARE_LABEL
        return self.labels.get(key) == value

    @property
    def place(self) -> int | None:
        """Where among the nodes the user put this one (torchrun's node rank); None: its name counts."""
        text = self.labels.get(PLACE_LABEL, "")
        return int(text) if text.isascii() and text.isdecimal() else None


def domain_of(node: NodeFacts | None, levels: Sequence[str]) -> tuple[str, ...]:
    """The failure domains that a node lies in, outermost first, the node itself last.

    A label that is not given counts as a domain of its own: nothing is known to be shared.
    """
    if node is None:
        return ()
    return (*(node.labels.get(level, f"?{node.name}") for level in levels), node.name)


def shared_levels(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many failure domains two nodes share: 0 is best, all of them (and the node) worst."""
    return sum(left == right for left, right in zip(one, other, strict=False))


@functools.lru_cache(maxsize=1 << 16)
def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """A sort key under which node10 comes after node9."""
    return tuple(
        (0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name) if part
    )

"""Which agents have gone silent? Judged from when each was last heard, by whoever listens to them all.

The listener's own absence (stopped, starved, suspended) is nobody's silence: when it has not looked for a
while, every mark begins anew. Silence alone proves nothing; what follows from it is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.core.events import AgentHeard, AgentSilent

# 2,000 agents send 2,000 heartbeats a second at most; few agents, one every quarter of a second each.
FASTEST_HEARTBEAT_S = 0.25
MAX_HEARTBEATS_PER_S = 2000
HEARTBEATS_MISSED = 4
DEFAULT_TIMEOUT_S = 1.0
REPEAT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """When a connected agent last said anything, and how often it was told to."""

    last_s: float
    heartbeat_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Silence:
    last_s: float
    told_s: float


def heartbeat_s(agents: int) -> float:
    """How often each of so many agents shall say that it is there."""
    return max(FASTEST_HEARTBEAT_S, agents / MAX_HEARTBEATS_PER_S)


class SilenceWatch:
    """`step` takes all connected agents at one moment: who fell silent, who still is (once a second), who spoke.

    `timeout_s`: silence beyond it counts, and beyond four heartbeats. `largest_gap_s`: time between two
    steps beyond this was not watched.
    """

    def __init__(self, timeout_s: float = DEFAULT_TIMEOUT_S, largest_gap_s: float = 0.5) -> None:
        if not 0 < timeout_s < float("inf"):
            raise ValueError(f"heartbeat_timeout_s must be a finite number above 0, not {timeout_s}")
        self._timeout_s = timeout_s
        self._largest_gap_s = largest_gap_s
        self._watched_since_s: float | None = None
        self._last_s: float | None = None
        self._silent: dict[str, _Silence] = {}

    def step(self, heard: Mapping[str, Heard], now_s: float) -> list[AgentSilent | AgentHeard]:
        """Look at every connected agent; one that disconnects is forgotten. `now_s` never goes back."""
        if self._last_s is None or now_s - self._last_s > self._largest_gap_s:
            self._watched_since_s = now_s
        self._last_s = now_s
        assert self._watched_since_s is not None
        self._silent = {node: silence for node, silence in self._silent.items() if node in heard}
        found: list[AgentSilent | AgentHeard] = []
        for node, agent in heard.items():
            known = self._silent.get(node)
            if known is not None and agent.last_s > known.last_s:
                del self._silent[node]
                found.append(AgentHeard(node=node))
                continue
            silent_s = now_s - max(agent.last_s, self._watched_since_s)
            limit_s = max(self._timeout_s, HEARTBEATS_MISSED * agent.heartbeat_s)
            if silent_s > limit_s and (known is None or now_s - known.told_s >= REPEAT_S):
                self._silent[node] = _Silence(last_s=agent.last_s, told_s=now_s)
                found.append(AgentSilent(node=node, silent_s=silent_s))
        return found

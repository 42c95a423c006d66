"""How often agents shall say that they are there, and who of them has fallen silent.

It reads the links and tells; whether anybody is silent is judged in the core.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from keepstep.controller.agents import AgentLink
from keepstep.core.events import Event
from keepstep.core.silence import Heard, SilenceWatch, heartbeat_s
from keepstep.wire.messages import AgentWelcome, JobSpec

CHECK_INTERVAL_S = 0.1
# Agents are told of another pace only when it differs by so much from the one they know.
PACE_CHANGE = 1.25


class Heartbeats:
    """Over all of one controller's agents. `put` gets AgentSilent and AgentHeard; `run` until cancelled."""

    def __init__(
        self, links: Mapping[str, AgentLink], spec: JobSpec, put: Callable[[Event], None], timeout_s: float
    ) -> None:
        self._links = links
        self._spec = spec
        self._put = put
        self._watch = SilenceWatch(timeout_s)

    def welcome(self, link: AgentLink) -> AgentWelcome:
        """What an agent is told when it joins. Others are told anew, should there be too many for their pace."""
        pace_s = heartbeat_s(len(self._links))
        for other in self._links.values():
            if other is not link and other.connected and other.heartbeat_s * PACE_CHANGE < pace_s:
                other.send(self._pace(other, pace_s))
        return self._pace(link, pace_s)

    async def run(self) -> None:
        while True:
            # As often as the agents' pace is worth: of thousands each look costs milliseconds.
            await asyncio.sleep(max(CHECK_INTERVAL_S, heartbeat_s(len(self._links)) / 4))
            heard = {
                node: Heard(last_s=link.heard_s, heartbeat_s=link.heartbeat_s)
                for node, link in self._links.items()
                if link.connected
            }
            for event in self._watch.step(heard, time.monotonic()):
                self._put(event)

    def _pace(self, link: AgentLink, pace_s: float) -> AgentWelcome:
        link.heartbeat_s = pace_s
        spec = self._spec
        return AgentWelcome(job=spec.job, world_size=spec.world_size, spec=spec, heartbeat_s=pace_s)

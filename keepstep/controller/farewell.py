"""The end of a job, told to its agents: stop, and leave; they are waited for, but not for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from keepstep.controller.agents import AgentLink
from keepstep.core.actions import EndJob
from keepstep.wire.messages import Stop

FAREWELL_TIMEOUT_S = 15.0
HARD_FAREWELL_TIMEOUT_S = 3.0
SILENT_S = 5.0  # an agent that has not been heard for so long is not waited for: its network may be cut
LOOK_INTERVAL_S = 0.5


class Farewell:
    """`all_gone` is set while no agent is connected; `hard` once the job is to end at once."""

    def __init__(self, links: Mapping[str, AgentLink]) -> None:
        self.all_gone = asyncio.Event()
        self.hard = asyncio.Event()
        self._links = links

    async def see_off(self, end: EndJob | None) -> None:
        """Tell every agent to stop and wait until they have left; a second Ctrl-C makes it hard."""
        if not any(link.connected for link in self._links.values()):
            return
        hard = self.hard.is_set()
        self._stop_all(end, hard)
        if not hard and not await self._gone_within(FAREWELL_TIMEOUT_S):
            self._stop_all(end, hard=True)
        await self._gone_within(HARD_FAREWELL_TIMEOUT_S)

    def _stop_all(self, end: EndJob | None, hard: bool) -> None:
        code, reason = (0, "") if end is None else (end.exit_code, end.reason)
        for link in self._links.values():
            if link.connected:
                link.send(Stop(hard=hard, exit_code=code, reason=reason))

    async def _gone_within(self, timeout_s: float) -> bool:
        """True when all agents that are heard have left. Returns early, False, when the stop becomes a hard one."""
        until_s = time.monotonic() + timeout_s
        gone = asyncio.create_task(self.all_gone.wait())
        hard = asyncio.create_task(self.hard.wait())
        waits = {gone} if self.hard.is_set() else {gone, hard}
        try:
            while not self._nobody_left() and (left_s := until_s - time.monotonic()) > 0:
                done, _ = await asyncio.wait(
                    waits, timeout=min(left_s, LOOK_INTERVAL_S), return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    break
        finally:
            for task in (gone, hard):
                task.cancel()
        return self._nobody_left()

    def _nobody_left(self) -> bool:
        heard_after_s = time.monotonic() - SILENT_S
        return not any(link.connected and link.heard_s > heard_after_s for link in self._links.values())

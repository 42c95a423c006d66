"""The end of a job, told to every agent: stop, and wait until they have left; in order first, then at once."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from keepstep.controller.agents import AgentLink
from keepstep.wire.messages import Stop

FAREWELL_TIMEOUT_S = 15.0
HARD_FAREWELL_TIMEOUT_S = 3.0


async def see_off(
    links: Collection[AgentLink], code: int, reason: str, *, hard: asyncio.Event, all_gone: asyncio.Event
) -> None:
    """Tell every agent how the job ended and wait until they have left; `hard` (a second Ctrl-C) may come meanwhile."""
    if not any(link.connected for link in links):
        return
    at_once = hard.is_set()
    _stop_all(links, Stop(hard=at_once, exit_code=code, reason=reason))
    if not at_once and not await _gone_within(FAREWELL_TIMEOUT_S, hard, all_gone):
        _stop_all(links, Stop(hard=True, exit_code=code, reason=reason))
    await _gone_within(HARD_FAREWELL_TIMEOUT_S, hard, all_gone)


def _stop_all(links: Collection[AgentLink], stop: Stop) -> None:
    for link in links:
        if link.connected:
            link.send(stop)


async def _gone_within(timeout_s: float, hard: asyncio.Event, all_gone: asyncio.Event) -> bool:
    """True when all agents have left. Returns early, False, when the stop becomes a hard one meanwhile."""
    gone = asyncio.create_task(all_gone.wait())
    harder = asyncio.create_task(hard.wait())
    waits = {gone} if hard.is_set() else {gone, harder}
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in (gone, harder):
        task.cancel()
    return all_gone.is_set()

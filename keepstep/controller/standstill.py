"""When no rank of the job moves for a while: asks every node how its ranks stand, and who is waited for.

A node's agent sees only its own ranks; that its one rank is waited for by those of other nodes it hears
from here. Whether that rank is given up stays the agent's judgement (`keepstep.core.agent`): slow is not
dead. Nothing is asked while steps go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from keepstep.controller.inquiry import Ask, compare, understood
from keepstep.core.events import Event, NodeProgressed, Progressed

log = logging.getLogger("keepstep.controller")

STILL_S = 5.0
PACE_FACTOR = 4.0
KEPT_INTERVALS = 32
LONGEST_PAUSE_S = 60.0
SAY_AFTER_S = 30.0
CHECK_INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 5.0


class Standstill:
    """Runs from the first step reported until `close`."""

    def __init__(
        self, *, ask: Ask, nodes: Callable[[], Sequence[str]], say: Callable[[str, str], None]
    ) -> None:
        self._ask = ask
        self._nodes = nodes
        self._say = say
        self._moved_s = 0.0
        self._intervals: deque[float] = deque(maxlen=KEPT_INTERVALS)
        self._task: asyncio.Task[None] | None = None

    def saw(self, event: Event) -> None:
        """Any rank's step is a move."""
        if isinstance(event, Progressed) or (isinstance(event, NodeProgressed) and event.steps):
            now_s = time.monotonic()
            if self._task is None:
                self._task = asyncio.create_task(self._watch(), name="standstill")
            else:
                self._intervals.append(now_s - self._moved_s)
            self._moved_s = now_s

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def patience_s(self) -> float:
        """How long the job may stand before anybody is asked: longer than its own pace explains."""
        return max(STILL_S, PACE_FACTOR * max(self._intervals, default=0.0))

    async def _watch(self) -> None:
        pause_s, due_s, said = STILL_S, 0.0, False
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            now_s = time.monotonic()
            still_s = now_s - self._moved_s
            if still_s < self.patience_s():
                pause_s, due_s, said = STILL_S, 0.0, False
            elif now_s >= due_s:
                text = await self._inquire()
                if text and still_s > SAY_AFTER_S and not said:
                    said = True
                    self._say(f"no rank has moved for {still_s:.0f} s: {text}", "warning")
                due_s = time.monotonic() + pause_s
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _inquire(self) -> str:
        """Tell the nodes whose ranks are waited for. Returns the finding, when there is one."""
        nodes = list(self._nodes())
        answers = await asyncio.gather(*(self._ask(n, "stands", {}, ANSWER_TIMEOUT_S) for n in nodes))
        told = {node: understood(answer) for node, answer in zip(nodes, answers, strict=True)}
        finding = await asyncio.to_thread(compare, list(told.values()))
        if finding.kind == "nobody":
            return ""
        for node, summary in told.items():
            workers = [w["worker"] for w in summary.get("workers", ()) if w["rank"] in finding.ranks]
            if workers and finding.kind == "outsider":
                about: dict[str, Any] = {"workers": workers}
                await self._ask(node, "waited-for", about, ANSWER_TIMEOUT_S)
        return finding.text

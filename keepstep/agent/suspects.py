"""A living worker is suspected: the controller hears of it at once, the evidence is taken before a kill."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from keepstep.agent.evidence import DEADLINE_S, Evidence
from keepstep.agent.workers import Worker
from keepstep.core.agent import STOPPED, Suspicion
from keepstep.core.events import WorkerSuspected

# A stopped worker's ranks wait already, and its stacks change nothing: the report does not wait for them.
STOPPED_REPORT_S = 0.05

log = logging.getLogger(__name__)


class Suspects:
    """Reports suspicions. `published` reads the newest step that all ranks hold."""

    def __init__(
        self, evidence: Evidence, published: Callable[[], int], send: Callable[[WorkerSuspected], None]
    ) -> None:
        self._evidence = evidence
        self._published = published
        self._send = send
        self._collecting: dict[int, asyncio.Task[None]] = {}

    async def report(self, worker: Worker, suspicion: Suspicion) -> None:
        """Send WorkerSuspected: for a stopped worker at once, for a hung one with its stacks (2 s at most)."""
        worker.suspected_since_s = suspicion.since_s
        facts = {**suspicion.evidence, **self._evidence.at_once(worker, suspicion.reason)}
        collecting = asyncio.create_task(self._collect(worker, facts))
        self._collecting[worker.number] = collecting
        stopped = suspicion.evidence.get("state") == STOPPED
        await asyncio.wait({collecting}, timeout=STOPPED_REPORT_S if stopped else DEADLINE_S)
        if not worker.alive:
            return  # its exit has been reported: a suspicion would come too late
        self._send(
            WorkerSuspected(
                worker=worker.number,
                reason=suspicion.reason,
                published=self._published(),
                evidence=dict(facts),
                first_evidence_s=suspicion.since_s,
            )
        )

    async def settled(self, worker: int) -> None:
        """Wait until the evidence about a worker is taken, if any is being taken; DEADLINE_S at most."""
        collecting = self._collecting.pop(worker, None)
        if collecting is not None:
            await asyncio.wait({collecting}, timeout=DEADLINE_S)
            collecting.cancel()

    def close(self) -> None:
        """Give up what is still being taken."""
        for collecting in self._collecting.values():
            collecting.cancel()

    async def _collect(self, worker: Worker, facts: dict[str, Any]) -> None:
        try:
            await self._evidence.of_suspect(worker, facts)
        except OSError as error:  # a full disk must not keep a hung worker alive
            log.error("the evidence about worker %s is incomplete: %s", worker.number, error)
            facts["incomplete"] = str(error)

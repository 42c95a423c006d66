"""Looks at this node's workers ten times a second: what the kernel and their pages say of them.

It measures and passes on; whether a worker is stopped, hung or only slow is decided in the core.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable

from keepstep.agent import procfs
from keepstep.agent.announcements import Announcements
from keepstep.agent.evidence import phase_name
from keepstep.agent.workers import Worker, Workers
from keepstep.core.agent import Sample, Suspicion, VitalsConfig, VitalsMachine
from keepstep.core.events import NodeProgressed

SAMPLE_INTERVAL_S = 0.1
PROGRESS_INTERVAL_S = 0.2

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# How far into a step a phase is; whoever is the least far is waited for.
_ORDER = {"SETUP": 0, "BETWEEN": 1, "ASIDE": 1, "STEP": 2, "GATE": 3, "UPDATE": 4, "BLOCK_END": 5}


class Vitals:
    """Samples until cancelled.

    `send` gets NodeProgressed whenever workers got further, every `progress_s` at most; `suspect` gets each
    suspicion once.
    """

    def __init__(
        self,
        workers: Workers,
        announcements: Announcements,
        *,
        node: str,
        send: Callable[[NodeProgressed], None],
        suspect: Callable[[Worker, Suspicion], None],
        config: VitalsConfig | None = None,
    ) -> None:
        self.progress_s = PROGRESS_INTERVAL_S
        self._node = node
        self._workers = workers
        self._announcements = announcements
        self._send = send
        self._suspect = suspect
        self._machine = VitalsMachine(config)
        self._told: dict[int, int] = {}
        self._told_published = -1
        self._told_s = 0.0

    def keep_pace(self, heartbeat_s: float) -> None:
        """A large cluster wants to hear of each node less often: progress keeps to the pace of its heartbeats."""
        self.progress_s = max(PROGRESS_INTERVAL_S, heartbeat_s - 2 * SAMPLE_INTERVAL_S)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            now_s = time.monotonic()
            if now_s - self._told_s >= self.progress_s:
                self._told_s = now_s
                self._tell_progress()
            watched = [worker for worker in self._workers.living() if not worker.killed_on_purpose]
            waited = self._waited_for(watched) | {w.number for w in watched if w.waited_elsewhere}
            samples = [s for w in watched if (s := _sample(w, w.number in waited)) is not None]
            for suspicion in self._machine.step(samples, now_s):
                worker = self._workers.get(suspicion.worker)
                assert worker is not None
                self._suspect(worker, suspicion)

    def _waited_for(self, watched: Iterable[Worker]) -> set[int]:
        """Members of the newest generation that are less far than another one, among those the least far."""
        generation = self._announcements.generation
        members = [w for w in watched if self._announcements.rank_of(w.number) is not None]
        members = [w for w in members if w.page.generation == generation]
        # Counts since a process's start can be compared only among those that started together.
        comparable = all(self._announcements.since_the_start(w.number) for w in members)
        far = {
            w.number: (
                w.page.step,
                _ORDER.get(phase_name(w.page), 9),
                w.page.collectives if comparable else 0,
            )
            for w in members
        }
        least, most = min(far.values(), default=None), max(far.values(), default=None)
        return {number for number, point in far.items() if point == least != most}

    def _tell_progress(self) -> None:
        generation = self._announcements.generation
        if generation is None:
            return
        living = self._workers.living()
        # A page that has not entered the newest generation counts the steps of the one before.
        steps = {w.number: w.page.step for w in living if w.page.generation == generation}
        published = self._workers.published()
        news = {number: step for number, step in steps.items() if self._told.get(number) != step}
        if news or published != self._told_published:
            self._told, self._told_published = steps, published
            self._send(
                NodeProgressed(node=self._node, generation=generation, published=published, steps=news)
            )


def _sample(worker: Worker, others_wait: bool) -> Sample | None:
    pid = worker.python_pid or worker.process.pid
    found = procfs.stat(pid)
    if found is None:
        return None
    page = worker.page
    return Sample(
        worker=worker.number,
        state=found.state,
        cpu_s=found.cpu_ticks / _TICKS_PER_S,
        io_bytes=procfs.io_bytes(pid) or 0,
        collectives=page.collectives,
        step=page.step,
        phase=phase_name(page),
        phase_age_s=(time.monotonic_ns() - page.phase_since_ns) / 1e9,
        others_wait=others_wait,
    )

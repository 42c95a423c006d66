"""Which worker's output is on the console, as the generations come; nothing where there is no console.

It joins what the announcements say with what the console can do, so that the agent need not.
"""

from __future__ import annotations

from pathlib import Path

from keepstep.agent.announcements import Announcements
from keepstep.agent.config import AgentConfig
from keepstep.agent.console import Console
from keepstep.agent.workers import Worker
from keepstep.core.actions import Announce
from keepstep.wire.messages import JobSpec


class Shown:
    """The console of one agent, if it has one. `open` before the first worker."""

    def __init__(self, config: AgentConfig, announcements: Announcements) -> None:
        self._config = config
        self._announcements = announcements
        self._console: Console | None = None

    def open(self, spec: JobSpec, run_dir: Path) -> Console | None:
        """Raises UsageError when the job's -t or -r cannot be read."""
        if self._config.console is not None:
            self._console = Console(self._config.console, run_dir, spec.tee, spec.redirects)
        return self._console

    def follow(self, worker: int, slot: int) -> None:
        """A worker starts."""
        if self._console is not None:
            self._console.follow(worker, slot)

    def adopt(self, worker: Worker) -> None:
        """A worker runs already: what it writes from now on."""
        if self._console is not None:
            self._console.follow(worker.number, worker.slot, from_now=True)
            if self._announcements.newest is not None:
                self.announced(worker.number, self._announcements.newest)

    def announced(self, worker: int, announce: Announce) -> None:
        """Before a worker hears of a generation: what it wrote so far belongs to the one before."""
        if self._console is None:
            return
        generation = announce.generation
        if worker in generation.members:
            rank = generation.rank_of(worker)
            self._console.promoted(worker, rank, generation.number, fresh=generation.fresh)
        elif self._announcements.fenced(worker) is not None:
            self._console.hide(worker)

    def hide(self, worker: int) -> None:
        """It is a spare."""
        if self._console is not None:
            self._console.hide(worker)

    def greeted(self, worker: int) -> None:
        """It came to init()."""
        if self._console is not None:
            self._console.greeted(worker)

    def ended(self, worker: int, *, failed: bool) -> None:
        """Its process is gone."""
        if self._console is not None:
            self._console.ended(worker, failed=failed)

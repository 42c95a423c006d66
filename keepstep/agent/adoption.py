"""A new agent takes over the workers of the one before it: they have trained on meanwhile.

It puts together what the parts must remember, and what they get back; which of the workers still belong to
the job the controller says. An embedded agent leaves nothing: its workers end with its process.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from keepstep.agent import cleanup, memory
from keepstep.agent.announcements import Announcements
from keepstep.agent.config import AgentConfig
from keepstep.agent.memory import Memory, Remembered
from keepstep.agent.peers import Peers
from keepstep.agent.workers import Workers
from keepstep.wire.messages import JobSpec

log = logging.getLogger(__name__)


class Succession:
    """What one agent takes from the one before it and leaves to the one after it."""

    def __init__(
        self, config: AgentConfig, workers: Workers, announcements: Announcements, peers: Peers
    ) -> None:
        self._config = config
        self._run_dir = config.run_dir.absolute()
        self._workers = workers
        self._announcements = announcements
        self._peers = peers
        self._memory: Memory | None = None
        self._lock: int | None = None

    def take_over(self) -> Remembered | None:
        """Adopt what a dead agent of this node and run has left. Raises UsageError when it lives, OSError."""
        config = self._config
        if config.embedded:
            return None
        found = memory.recall(config.node, self._run_dir, config.token)
        if found is None:
            return None
        self._lock = found.lock
        cleanup.own(found.page_dir)
        cleanup.remake_socket_dir(found.socket.parent)
        self._announcements.load(found.announcements)
        self._workers.adopt(found.workers, found.page_dir)
        living = [worker.number for worker in self._workers.living()]
        # A loader's worker of a dead rank holds its sockets open; one that was never written down is unknown.
        ended = cleanup.end_strangers(found.page_dir, living)
        log.warning(
            "took over workers %s of the agent before; %s had ended, %s leftover processes were ended",
            living,
            sorted(worker.number for worker in self._workers if not worker.alive),
            ended,
        )
        return found

    def begin(self, spec: JobSpec, page_dir: Path, socket: Path) -> None:
        """From here on workers are started. Raises OSError, and ValueError when another agent has the folder."""
        cleanup.belongs_to(socket.parent, page_dir)
        if self._lock is None:
            self._lock = memory.lock(page_dir)
            if self._lock is None:
                raise ValueError(f"another agent holds {page_dir}")
        if self._config.embedded:
            return
        self._peers.journals.keep_in(page_dir)
        self._memory = Memory(
            page_dir,
            node=self._config.node,
            run_dir=self._run_dir,
            token=self._config.token,
            spec=spec,
            socket=socket,
            describe=self._describe,
        )
        self._memory.now()

    def remember(self, *, at_once: bool = False) -> None:
        """Something changed that the next agent must know."""
        if self._memory is not None:
            (self._memory.now if at_once else self._memory.soon)()

    def close(self) -> None:
        """Give the folder free."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _describe(self) -> dict[str, Any]:
        return {
            "workers": self._workers.describe(),
            "announcements": self._announcements.to_state(),
            "peer": self._peers.address,
        }

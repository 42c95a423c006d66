"""The workers' side of the agent: who may connect, what they are told, where their messages go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from keepstep.agent.announcements import Announcements
from keepstep.agent.peers import Peers
from keepstep.agent.socket import Link
from keepstep.agent.workers import Workers
from keepstep.core.claims import doubt
from keepstep.core.events import (
    Complained,
    Event,
    FingerprintTaken,
    KeeperMissed,
    KeeperRegained,
    Resumed,
    ScriptFailed,
    SelfCheckFailed,
    SelfCheckPassed,
    SpareChecked,
    StateDescribed,
    StateReceived,
    UsageRefused,
    VerdictReached,
    WorkerFinished,
    WorkerParked,
    WorkerSuspected,
)
from keepstep.core.move_events import LendReady, MoveReady
from keepstep.errors import WireError
from keepstep.wire.messages import Fetch, Hello, JobSpec, JournalKept, Welcome

_FORWARDED = (
    WorkerParked,
    VerdictReached,
    StateReceived,
    Resumed,
    FingerprintTaken,
    KeeperMissed,
    KeeperRegained,
    LendReady,
    MoveReady,
    StateDescribed,
    SelfCheckFailed,
    SelfCheckPassed,
    ScriptFailed,
    SpareChecked,
    UsageRefused,
    WorkerFinished,
)


# What speaks of a rank's state: only its player knows.
_OF_THE_OWN_RANK = (FingerprintTaken, JournalKept, StateDescribed)


class Desk:
    """Serves the workers' connections. `spec` is set before the first worker is started."""

    def __init__(
        self,
        advertise: str,
        workers: Workers,
        announcements: Announcements,
        peers: Peers,
        *,
        send: Callable[[Event], None],
        greeted: Callable[[int], None],
    ) -> None:
        self.spec: JobSpec | None = None
        self._advertise = advertise
        self._workers = workers
        self._announcements = announcements
        self._peers = peers
        self._send = send
        self._greeted = greeted

    def refusal(self, hello: Hello, pid: int) -> str | None:
        """Why this peer may not speak as that worker; None when it may."""
        worker = self._workers.get(hello.worker)
        if worker is None or not worker.alive:
            return f"this node has no living worker {hello.worker}"
        if not worker.process.owns(pid):
            return f"process {pid} does not belong to worker {hello.worker}"
        if hello.role == "store":
            return self._announcements.fenced(hello.worker)
        if worker.link is not None and worker.link.pid != pid:
            return f"worker {hello.worker} is connected already"
        return None

    def connected(self, link: Link) -> None:
        """Welcome it, and tell it what it missed."""
        worker, spec = self._workers.get(link.worker), self.spec
        assert worker is not None and spec is not None
        if worker.link is not None:
            worker.link.close()  # the same process says Hello again: its older connection is dead
        worker.link, worker.python_pid = link, link.pid
        self._greeted(link.worker)
        link.send(
            Welcome(
                job=spec.job,
                world_size=spec.world_size,
                record_bytes=spec.record_bytes,
                orphan_timeout_s=spec.orphan_timeout_s,
                advertise=self._advertise,
                record_ack_s=spec.record_ack_s,
                mode=spec.mode,
            )
        )
        for message in self._announcements.greetings(link.worker):
            link.send(message)

    def received(self, link: Link, message: Any) -> None:
        """Answer a worker's message or pass it on. Raises WireError for one that no worker may send."""
        self._doubt(link.worker, message)
        match message:
            case Complained():
                published = max(message.published, self._workers.published())
                self._send(replace(message, published=published))
            case Fetch():
                self._peers.fetch(link.worker, message, link.send)
            case JournalKept():
                self._peers.journals.keep(message.rank, message.data)
            case _ if isinstance(message, _FORWARDED):
                self._send(message)
            case _:
                raise WireError(f"{type(message).__name__} is nothing that a worker may say")

    def _doubt(self, worker: int, message: Any) -> None:
        """Raises WireError for what this worker may not say, or what cannot be true."""
        if getattr(message, "worker", worker) != worker:
            raise WireError(f"worker {worker} speaks for worker {message.worker}")
        world_size = self.spec.world_size if self.spec is not None else 0
        known = self._announcements
        # A worker hears of generations through its agent alone; before the first there is none to speak of.
        newest = (-1 if known.generation is None else known.generation) if known.certain else None
        reason = doubt(message, world_size=world_size, newest=newest)
        if reason is not None:
            raise WireError(f"{type(message).__name__} of worker {worker}: {reason}")
        own, claimed = known.rank_of(worker), getattr(message, "rank", None)
        if isinstance(message, _OF_THE_OWN_RANK) and own is not None and claimed != own:
            raise WireError(f"worker {worker} plays rank {own} and speaks for rank {claimed}")

    def lied(self, worker: int, reason: str) -> None:
        """It cannot be believed any more: whoever decides will fence it."""
        self._send(WorkerSuspected(worker=worker, reason=f"it breaks the protocol: {reason}"))

    def disconnected(self, link: Link) -> None:
        """Its end is seen by the pidfd; a lost connection alone means nothing."""
        worker = self._workers.get(link.worker)
        if worker is not None and worker.link is link:
            worker.link = None

"""The agent of one node: an asyncio shell between the controller, this node's workers and the kernel.

It decides nothing about the job: the controller's actions are carried out in order, what happens comes
back as events. `Agent(AgentConfig(...)).run()` returns when the controller said stop, or (embedded)
when the controller has been gone for too long.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from keepstep.agent import cleanup
from keepstep.agent.announcements import Announcements
from keepstep.agent.config import AgentConfig
from keepstep.agent.connection import ControllerConnection
from keepstep.agent.guardian import Guardian
from keepstep.agent.records import Records
from keepstep.agent.socket import Link, WorkerSocket
from keepstep.agent.store import GenerationStore
from keepstep.agent.workers import Worker, Workers
from keepstep.core.actions import Announce, KillWorker, Release, StandBy, StartWorker
from keepstep.core.events import (
    Complained,
    FingerprintTaken,
    Resumed,
    ScriptFailed,
    StateReceived,
    UsageRefused,
    VerdictReached,
    WorkerExited,
    WorkerFinished,
    WorkerParked,
)
from keepstep.errors import ProtectionError, UsageError, WireError
from keepstep.wire.framing import MAX_FRAME_BYTES
from keepstep.wire.messages import (
    PROTOCOL_VERSION,
    AgentHello,
    AgentWelcome,
    Fetch,
    Hello,
    JobSpec,
    JournalKept,
    Stop,
    Welcome,
)

CANNOT_RUN_STATUS = 127  # as a shell says it
EMBEDDED_ORPHAN_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 2.0
WATCH_INTERVAL_S = 0.25

_FORWARDED = (
    WorkerParked,
    VerdictReached,
    StateReceived,
    Resumed,
    FingerprintTaken,
    ScriptFailed,
    UsageRefused,
    WorkerFinished,
)

log = logging.getLogger(__name__)


class Agent:
    """One node's agent. `run` it once, in the main thread's loop."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._spec: JobSpec | None = None
        self._page_dir: Path | None = None
        self._socket_dir: Path | None = None
        self._guardian: Guardian | None = None
        self._failure: Exception | None = None
        self._over = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

        self._announcements = Announcements()
        self._store = GenerationStore()
        self._workers = Workers(
            node=config.node,
            slots=config.slots,
            token=config.token,
            run_dir=config.run_dir.absolute(),
            announcements=self._announcements,
            on_exit=self._worker_exited,
        )
        self._records = Records(self._announcements, self._workers.page_of)
        self._controller = ControllerConnection(
            config.controller_url, self._hello, self._welcomed, self._carry_out
        )
        self._socket: WorkerSocket | None = None

    async def run(self) -> None:
        """Serve until told to stop; leaves no process, socket or shared-memory file.

        Raises ProtectionError (refused, or controller lost while embedded) and UsageError.
        """
        try:
            cleanup.remove_stale()
            self._config.run_dir.mkdir(parents=True, exist_ok=True)
            self._socket_dir = cleanup.make_socket_dir()
            self._socket = WorkerSocket(
                self._socket_dir / "agent.sock", self._config.token, self, self._store
            )
            await self._socket.open()
            self._spawn(self._controller.run())
            if self._config.embedded:
                self._spawn(self._end_without_controller())
            await self._over.wait()
        finally:
            await self._leave()
        if self._failure is not None:
            raise self._failure

    # ---- the controller's side ------------------------------------------------------------------------

    def _hello(self) -> AgentHello:
        return AgentHello(
            version=PROTOCOL_VERSION,
            token=self._config.token,
            node=self._config.node,
            slots=self._config.slots,
            pid=os.getpid(),
            advertise=self._config.advertise,
            workers=tuple(worker.number for worker in self._workers.living()),
        )

    def _welcomed(self, welcome: AgentWelcome) -> None:
        if self._spec is not None:
            if welcome.job != self._spec.job:
                raise WireError(
                    f"this agent serves job {self._spec.job}, the controller speaks of {welcome.job}"
                )
            return
        spec = welcome.spec
        config = self._config
        orphan_s = config.orphan_timeout_s
        if orphan_s is None:
            orphan_s = EMBEDDED_ORPHAN_TIMEOUT_S if config.embedded else spec.orphan_timeout_s
        record_bytes = config.record_bytes or spec.record_bytes
        if not 0 < record_bytes <= MAX_FRAME_BYTES // 2:
            raise WireError(f"records of {record_bytes} bytes do not fit into a message")
        try:
            self._page_dir = cleanup.make_page_dir(spec.job, config.node)
        except (OSError, ValueError) as error:
            self._fail(UsageError(f"no room for the workers' shared memory: {error}"))
            return
        self._spec = replace(spec, record_bytes=record_bytes, orphan_timeout_s=orphan_s)
        if config.embedded:
            assert self._socket_dir is not None
            self._guardian = Guardian(self._page_dir, self._socket_dir)

    def _carry_out(self, action: Any) -> None:
        match action:
            case StartWorker():
                if action.node == self._config.node:
                    self._start(action)
            case StandBy():
                self._announcements.stand_by(action)
                self._tell(action.worker, action)
            case Announce():
                self._announce(action)
            case Release():
                for number in action.workers:
                    self._announcements.release(number)
                    self._tell(number, action)
            case KillWorker():
                worker = self._workers.get(action.worker)
                if worker is not None and worker.alive:
                    self._spawn(self._kill(worker, action))
            case Stop():
                self._stop(action.hard)
            case _:
                raise WireError(f"{type(action).__name__} is nothing that an agent can do")

    def _start(self, action: StartWorker) -> None:
        if self._spec is None or self._page_dir is None or self._socket is None or self._stopping:
            return
        try:
            self._workers.start(action.worker, action.slot, self._spec, self._page_dir, self._socket.path)
        except (UsageError, OSError) as error:
            self._controller.send(UsageRefused(worker=action.worker, message=str(error)))
            self._controller.send(WorkerExited(worker=action.worker, status=CANNOT_RUN_STATUS))

    def _announce(self, announce: Announce) -> None:
        if not self._announcements.accept(announce):
            return
        self._store.announce(announce.generation.number)
        for worker in self._workers.living():
            news = self._announcements.news_for(worker.number)
            if worker.link is not None and news is not None:
                worker.link.send(news)
        self._workers.drop_superseded()

    async def _kill(self, worker: Worker, action: KillWorker) -> None:
        if not await worker.process.end(action.grace_s):
            log.error("worker %s does not end, not even by SIGKILL: it hangs in the kernel", worker.number)

    def _tell(self, number: int, message: object) -> None:
        worker = self._workers.get(number)
        if worker is not None and worker.link is not None:
            worker.link.send(message)

    # ---- the workers' side ----------------------------------------------------------------------------

    def _worker_exited(self, worker: Worker, event: WorkerExited) -> None:
        self._controller.send(event)

    def refusal(self, hello: Hello, pid: int) -> str | None:
        """See `socket.Desk`."""
        worker = self._workers.get(hello.worker)
        if worker is None or not worker.alive:
            return f"this node has no living worker {hello.worker}"
        if not worker.process.owns(pid):
            return f"process {pid} does not belong to worker {hello.worker}"
        if hello.role == "store":
            return self._announcements.fenced(hello.worker)
        if worker.link is not None:
            return f"worker {hello.worker} is connected already"
        return None

    def connected(self, link: Link) -> None:
        """See `socket.Desk`."""
        worker, spec = self._workers.get(link.worker), self._spec
        assert worker is not None and spec is not None
        worker.link, worker.python_pid = link, link.pid
        link.send(
            Welcome(
                job=spec.job,
                world_size=spec.world_size,
                record_bytes=spec.record_bytes,
                orphan_timeout_s=spec.orphan_timeout_s,
                advertise=self._config.advertise,
            )
        )
        for message in self._announcements.greetings(link.worker):
            link.send(message)

    def received(self, link: Link, message: Any) -> None:
        """See `socket.Desk`."""
        if getattr(message, "worker", link.worker) != link.worker:
            raise WireError(f"worker {link.worker} speaks for worker {message.worker}")
        match message:
            case Complained():
                published = max(message.published, self._workers.published())
                self._controller.send(replace(message, published=published))
            case Fetch():
                link.send(self._records.fetch(message))
            case JournalKept():
                self._records.keep_journal(message)
            case _ if isinstance(message, _FORWARDED):
                self._controller.send(message)
            case _:
                raise WireError(f"{type(message).__name__} is nothing that a worker may say")

    def disconnected(self, link: Link) -> None:
        """See `socket.Desk`."""
        worker = self._workers.get(link.worker)
        if worker is not None and worker.link is link:
            worker.link = None

    # ---- the end --------------------------------------------------------------------------------------

    def _stop(self, hard: bool) -> None:
        if hard:
            for worker in self._workers.living():
                worker.process.kill()
        if self._stopping is None:
            self._stopping = self._spawn(self._end_all(0.0 if hard else self._config.stop_grace_s))

    async def _end_all(self, grace_s: float) -> None:
        await asyncio.gather(*(worker.process.end(grace_s) for worker in self._workers.living()))
        await self._controller.flush(FLUSH_TIMEOUT_S)
        self._over.set()

    async def _end_without_controller(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            lost_since_s = self._controller.lost_since_s
            if (
                lost_since_s is not None
                and time.monotonic() - lost_since_s > self._config.controller_timeout_s
            ):
                self._fail(
                    ProtectionError(f"the controller was gone for {self._config.controller_timeout_s:g} s")
                )
                return

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._over.set()

    async def _leave(self) -> None:
        for worker in self._workers.living():
            worker.process.kill()
        await asyncio.gather(*(worker.process.end() for worker in self._workers.living()))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            await self._socket.close()
        await asyncio.to_thread(self._tidy)

    def _tidy(self) -> None:
        if self._page_dir is not None:
            if not cleanup.end_users_of(self._page_dir):
                log.error("processes of this job could not be ended: %s", cleanup.users_of(self._page_dir))
            self._workers.close()
            cleanup.remove(self._page_dir)
        if self._socket_dir is not None:
            cleanup.remove(self._socket_dir)
        if self._guardian is not None:
            self._guardian.dismiss()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail(error)

"""The agent of one node: an asyncio shell between the controller, this node's workers and the kernel.

It decides nothing about the job: the controller's actions are carried out in order, what happens comes
back as events. `Agent(AgentConfig(...)).run()` returns when the controller said stop, or when it has been
gone for too long. When an agent in a process of its own is killed, its workers train on, and the next one
for the same run takes them over.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from keepstep.agent import cleanup
from keepstep.agent.adoption import Succession
from keepstep.agent.announcements import Announcements
from keepstep.agent.config import AgentConfig
from keepstep.agent.connection import ControllerConnection
from keepstep.agent.desk import Desk
from keepstep.agent.guardian import Guardian
from keepstep.agent.measuring import Measuring
from keepstep.agent.metrics import metrics_of
from keepstep.agent.peers import Peers
from keepstep.agent.questions import Questions
from keepstep.agent.said import Said
from keepstep.agent.shown import Shown
from keepstep.agent.socket import WorkerSocket
from keepstep.agent.store import GenerationStore
from keepstep.agent.suspects import Suspects
from keepstep.agent.vitals import Vitals
from keepstep.agent.witness import Witness
from keepstep.agent.workers import Worker, Workers
from keepstep.core.actions import FOR_ONE_WORKER, Announce, KillWorker, Probe, Release, StandBy, StartWorker
from keepstep.core.agent import Suspicion
from keepstep.core.events import Event, UsageRefused, WorkerExited
from keepstep.core.process_status import say_status
from keepstep.errors import UsageError, WireError
from keepstep.wire.messages import (
    PROTOCOL_VERSION,
    AgentHello,
    AgentWelcome,
    AnnounceChange,
    Ask,
    JobSpec,
    Stop,
)

CANNOT_RUN_STATUS = 127  # as a shell says it
SOCKET_NAME = "agent.sock"
FLUSH_TIMEOUT_S = 2.0
NOTES_TIMEOUT_S = 2.0

log = logging.getLogger(__name__)


class Agent:
    """One node's agent. `run` it once, in the main thread's loop."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._say = config.say or (lambda text, level: None)
        self._spec: JobSpec | None = None
        self._page_dir: Path | None = None
        self._socket_dir: Path | None = None
        self._guardian: Guardian | None = None
        self._failure: Exception | None = None
        self._over = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._notes: set[asyncio.Task[None]] = set()
        self._detached = False
        self._said = Said()
        self.ended: Stop | None = None  # how the controller said that the job has ended

        run_dir = config.run_dir.absolute()
        self._announcements = Announcements()
        self._shown = Shown(config, self._announcements)
        self.questions = Questions()
        Measuring(config.advertise).answer(self.questions)
        self._store = GenerationStore()
        self._workers = Workers(
            node=config.node,
            slots=config.slots,
            token=config.token,
            run_dir=run_dir,
            announcements=self._announcements,
            on_exit=self._worker_exited,
            tls=config.tls,
        )
        self._witness = Witness(config, self._workers, self._announcements, self.questions)
        self._controller = ControllerConnection(
            config.controller_url,
            self._hello,
            self._welcomed,
            self._carry_out,
            tls=config.tls,
            say=self._say,
            patient=lambda: self._spec is not None,
        )
        self._peers = Peers(
            config, self._announcements, self._store, self._workers.page_of, self._workers.published
        )
        self._desk = Desk(
            config.advertise,
            self._workers,
            self._announcements,
            self._peers,
            send=self._report,
            greeted=self._greeted,
        )
        self._succession = Succession(config, self._workers, self._announcements, self._peers)
        self._suspects = Suspects(self._witness.evidence, self._workers.published, self._controller.send)
        self._vitals = Vitals(
            self._workers,
            self._announcements,
            node=config.node,
            send=self._controller.send,
            suspect=self._suspect,
            config=config.vitals,
        )
        self._socket: WorkerSocket | None = None

    @property
    def joined(self) -> bool:
        """Whether a controller has ever welcomed this agent."""
        return self._spec is not None

    async def run(self) -> None:
        """Serve until told to stop; leaves no process, socket or shared-memory file (but see `detach`).

        Raises ProtectionError (refused, or the controller stayed away) and UsageError.
        """
        try:
            self._take_over()
            cleanup.remove_stale()
            self._config.run_dir.mkdir(parents=True, exist_ok=True)
            if self._socket_dir is None:
                self._socket_dir = cleanup.make_socket_dir()
            self._socket = WorkerSocket(
                self._socket_dir / SOCKET_NAME, self._config.token, self._desk, self._store
            )
            await self._socket.open()
            await self._peers.open()
            self._succession.remember(at_once=True)  # where the peers find it
            self._detached = False
            self._spawn(self._controller.run())
            self._spawn(metrics_of(self._config, self._workers, self._announcements, self._controller).run())
            self._spawn(self._vitals.run())
            self._spawn(self._witness.log_times.run())
            config = self._config
            limit_s = config.controller_timeout_s if config.embedded else config.isolation_timeout_s
            self._spawn(self._controller.miss(limit_s))
            await self._over.wait()
        finally:
            await self._leave()
        if self._failure is not None:
            raise self._failure

    def detach(self) -> None:
        """Leave, and the workers to the agent that comes next (an upgrade); they wait for it while they train."""
        assert not self._config.embedded, "workers of an embedded agent end with its process"
        self._detached = True
        self._over.set()

    # ---- the agent before this one --------------------------------------------------------------------

    def _take_over(self) -> None:
        """Adopt what a dead agent of this node and run has left, if there was one. Raises UsageError."""
        self._detached = True  # should it fail, the workers wait for the next attempt
        found = self._succession.take_over()
        self._detached = found is not None
        if found is None:
            return
        self._page_dir, self._socket_dir = found.page_dir, found.socket.parent
        self._peers.prefer(found.peer)
        self._begin(found.spec)
        self._store.announce(self._announcements.generation or 0)
        for worker in self._workers.living():
            self._shown.adopt(worker)

    def _begin(self, spec: JobSpec) -> None:
        """The job is known, and there is a place for its pages. Raises OSError, ValueError."""
        assert self._page_dir is not None and self._socket_dir is not None
        self._succession.begin(spec, self._page_dir, self._socket_dir / SOCKET_NAME)
        config = self._config
        self._spec = self._desk.spec = spec
        self._peers.world_size = spec.world_size
        self._witness.redactor.learn(spec.env)
        console = self._shown.open(spec, config.run_dir.absolute())
        if console is not None:
            self._spawn(console.run())
        if config.embedded:
            self._guardian = Guardian(self._page_dir, self._socket_dir)

    # ---- the controller's side ------------------------------------------------------------------------

    def _hello(self) -> AgentHello:
        return AgentHello(
            version=PROTOCOL_VERSION,
            token=self._config.token,
            node=self._config.node,
            slots=self._config.slots,
            pid=os.getpid(),
            advertise=self._config.advertise,
            labels=self._config.labels,
            peer=self._peers.address,
            **self._workers.account(self._controller.unsent_exits),
        )

    def _welcomed(self, welcome: AgentWelcome) -> None:
        self._vitals.keep_pace(welcome.heartbeat_s)
        if self._spec is None:
            self._settle(welcome.spec)
            return
        if welcome.job != self._spec.job:
            raise WireError(f"this agent serves job {self._spec.job}, the controller speaks of {welcome.job}")
        for event in self._said.again(self._announcements.generation):
            self._controller.send(event)

    def _settle(self, spec: JobSpec) -> None:
        """The first word of the controller: for which job workers are to be started here."""
        config = self._config
        spec = config.settle(spec)
        try:
            self._page_dir = cleanup.make_page_dir(spec.job, config.node)
            self._begin(spec)
            self._say(f"{config.node} takes part in job {spec.job} of {spec.world_size} ranks", "info")
        except (OSError, ValueError) as error:
            self._fail(UsageError(f"no place for the workers' shared memory: {error}"))

    def _carry_out(self, action: Any) -> None:
        match action:
            case StartWorker():
                if action.node == self._config.node:
                    self._start(action)
            case StandBy():
                self._announcements.stand_by(action)
                self._succession.remember()
                self._shown.hide(action.worker)
                self._workers.tell(action.worker, action)
            case _ if isinstance(action, FOR_ONE_WORKER):
                self._workers.tell(action.worker, action)
            case Announce() | AnnounceChange():
                self._announce(self._announcements.whole(action))
            case Release():
                for number in action.workers:
                    self._announcements.release(number)
                    self._workers.tell(number, action)
                self._succession.remember()
            case KillWorker():
                worker = self._workers.get(action.worker)
                if worker is not None and worker.alive:
                    self._witness.about_to_kill(worker)
                    self._spawn(self._kill(worker, action))
            case Probe():
                self._peers.probe(action, self._controller.send)
            case Ask():
                self._spawn(self._answer(action))
            case AgentWelcome():
                self._vitals.keep_pace(action.heartbeat_s)
            case Stop():
                self.ended = action
                self._stop(action.hard)
            case _:
                raise WireError(f"{type(action).__name__} is nothing that an agent can do")

    async def _answer(self, ask: Ask) -> None:
        self._controller.send(await self.questions.answer(ask))

    def _start(self, action: StartWorker) -> None:
        if self._spec is None or self._page_dir is None or self._socket is None or self._stopping:
            return
        try:
            self._workers.start(action.worker, action.slot, self._spec, self._page_dir, self._socket.path)
        except (UsageError, OSError) as error:
            self._controller.send(UsageRefused(worker=action.worker, message=str(error)))
            self._controller.send(WorkerExited(worker=action.worker, status=CANNOT_RUN_STATUS))
            return
        self._say(f"worker {action.worker} started on slot {action.slot}: {action.reason}", "info")
        self._succession.remember(at_once=True)
        self._shown.follow(action.worker, action.slot)

    def _announce(self, announce: Announce) -> None:
        self._witness.announced(announce)
        if not self._announcements.accept(announce):
            return
        self._store.announce(announce.generation.number)
        self._peers.announce(announce)
        for worker in self._workers.living():
            news = self._announcements.news_for(worker.number)
            self._shown.announced(worker.number, announce)
            if worker.link is not None and news is not None:
                worker.link.send(news)
        self._workers.drop_superseded()
        self._succession.remember()

    async def _kill(self, worker: Worker, action: KillWorker) -> None:
        await self._suspects.settled(worker.number)
        worker.killed_on_purpose = True
        if not await worker.process.end(action.grace_s):
            log.error("worker %s does not end, not even by SIGKILL: it hangs in the kernel", worker.number)

    def _report(self, event: Event) -> None:
        """What a worker said: on to the controller, and again should that have been lost."""
        self._said.note(event)
        self._controller.send(event)

    def _greeted(self, worker: int) -> None:
        self._succession.remember()
        self._shown.greeted(worker)

    def _suspect(self, worker: Worker, suspicion: Suspicion) -> None:
        self._spawn(self._suspects.report(worker, suspicion))

    # ---- a worker's end -------------------------------------------------------------------------------

    def _worker_exited(self, worker: Worker, event: WorkerExited) -> None:
        self._controller.send(event)
        self._witness.ended(worker.number, event.status)
        self._say(f"worker {worker.number} {say_status(event.status, event.oom_killed)}", "info")
        self._said.ended(worker.number)
        self._succession.remember()
        # First the news, then the last lines; the end of the job cannot overtake them: it comes back through
        # this loop.
        failed = event.status != 0 and not self._stopping
        self._shown.ended(worker.number, failed=failed)
        expected = worker.killed_on_purpose or self._announcements.may_end(worker.number)
        if failed and not expected:
            self._notes.add(self._spawn(self._witness.note_death(worker, event)))

    # ---- the end --------------------------------------------------------------------------------------

    def leave(self, reason: str, *, hard: bool = False) -> None:
        """Leave the job: the controller hears at once that this node will not come back, then its workers end."""
        if self._stopping is None and self.ended is None:
            self._controller.leave(reason)
        self._stop(hard)

    def _stop(self, hard: bool) -> None:
        if hard:
            self._workers.kill_all()
        if self._stopping is None:
            self._stopping = self._spawn(self._end_all(0.0 if hard else self._config.stop_grace_s))

    async def _end_all(self, grace_s: float) -> None:
        await self._workers.end_all(grace_s)
        await self._controller.flush(FLUSH_TIMEOUT_S)
        self._over.set()

    def _fail(self, error: Exception) -> None:
        self._failure = self._failure or error
        self._over.set()

    async def _leave(self) -> None:
        if not self._detached:
            self._workers.kill_all()
            await self._workers.end_all()
            if self._notes:
                await asyncio.wait(self._notes, timeout=NOTES_TIMEOUT_S)
        self._suspects.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._peers.close()
        if self._socket is not None:
            await self._socket.close()
        if self._detached:
            self._workers.release()
        else:
            await asyncio.to_thread(self._tidy)
        self._succession.close()

    def _tidy(self) -> None:
        if self._page_dir is not None:
            cleanup.end_users_of(self._page_dir)
            self._workers.close()
        for folder in (self._page_dir, self._socket_dir):
            if folder is not None:
                cleanup.remove(folder)
        if self._guardian is not None:
            self._guardian.dismiss()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._notes.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail(error)

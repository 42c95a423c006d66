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
from keepstep.agent.console import Console
from keepstep.agent.desk import Desk
from keepstep.agent.guardian import Guardian
from keepstep.agent.measuring import Measuring
from keepstep.agent.peers import Peers
from keepstep.agent.questions import Questions
from keepstep.agent.socket import WorkerSocket
from keepstep.agent.store import GenerationStore
from keepstep.agent.suspects import Suspects
from keepstep.agent.vitals import PROGRESS_INTERVAL_S, Vitals
from keepstep.agent.witness import Witness
from keepstep.agent.workers import Worker, Workers
from keepstep.core.actions import Announce, CheckSpare, KillWorker, Probe, Release, StandBy, StartWorker
from keepstep.core.agent import Suspicion
from keepstep.core.events import UsageRefused, WorkerExited
from keepstep.core.job_state import say_status
from keepstep.errors import ProtectionError, UsageError, WireError
from keepstep.wire.framing import MAX_FRAME_BYTES
from keepstep.wire.messages import (
    PROTOCOL_VERSION,
    AgentHello,
    AgentWelcome,
    Ask,
    JobSpec,
    Stop,
)

CANNOT_RUN_STATUS = 127  # as a shell says it
EMBEDDED_ORPHAN_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 2.0
WATCH_INTERVAL_S = 0.25
NOTE_DELAY_S = 0.05
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
        self._console: Console | None = None
        self.ended: Stop | None = None  # how the controller said that the job has ended

        run_dir = config.run_dir.absolute()
        self._announcements = Announcements()
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
        self._witness = Witness(
            node=config.node,
            run_dir=run_dir,
            token=config.token,
            workers=self._workers,
            announcements=self._announcements,
            questions=self.questions,
        )
        self._evidence = self._witness.evidence
        self._controller = ControllerConnection(
            config.controller_url, self._hello, self._welcomed, self._carry_out, tls=config.tls, say=self._say
        )
        self._peers = Peers(
            config, self._announcements, self._store, self._workers.page_of, self._workers.published
        )
        self._desk = Desk(
            config.advertise,
            self._workers,
            self._announcements,
            self._peers,
            send=self._controller.send,
            greeted=self._greeted,
        )
        self._suspects = Suspects(self._evidence, self._workers.published, self._controller.send)
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
        """Serve until told to stop; leaves no process, socket or shared-memory file.

        Raises ProtectionError (refused, or controller lost while embedded) and UsageError.
        """
        try:
            cleanup.remove_stale()
            self._config.run_dir.mkdir(parents=True, exist_ok=True)
            self._socket_dir = cleanup.make_socket_dir()
            self._socket = WorkerSocket(
                self._socket_dir / "agent.sock", self._config.token, self._desk, self._store
            )
            await self._socket.open()
            await self._peers.open()
            self._spawn(self._controller.run())
            self._spawn(self._vitals.run())
            self._spawn(self._witness.log_times.run())
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
            labels=self._config.labels,
            peer=self._peers.address,
        )

    def _welcomed(self, welcome: AgentWelcome) -> None:
        # A large cluster wants to hear of each node less often: progress keeps to the same pace.
        self._vitals.progress_s = max(PROGRESS_INTERVAL_S, welcome.heartbeat_s)
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
            self._fail(UsageError(f"no place for the workers' shared memory: {error}"))
            return
        ack_s = spec.record_ack_s if config.record_ack_s is None else config.record_ack_s
        spec = replace(spec, working_dir=config.working_dir or spec.working_dir)
        self._spec = replace(spec, record_bytes=record_bytes, orphan_timeout_s=orphan_s, record_ack_s=ack_s)
        self._peers.world_size = spec.world_size
        self._say(f"{config.node} takes part in job {spec.job} of {spec.world_size} ranks", "info")
        self._desk.spec = self._spec
        self._witness.redactor.learn(spec.env)
        if config.console is not None:
            self._console = Console(config.console, config.run_dir.absolute(), spec.tee, spec.redirects)
            self._spawn(self._console.run())
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
                if self._console is not None:
                    self._console.hide(action.worker)
                self._tell(action.worker, action)
            case CheckSpare():
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
            case Probe():
                self._peers.probe(action, self._controller.send)
            case Ask():
                self._spawn(self._answer(action))
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
        if self._console is not None:
            self._console.follow(action.worker, action.slot)

    def _announce(self, announce: Announce) -> None:
        self._witness.announced(announce)
        if not self._announcements.accept(announce):
            return
        self._store.announce(announce.generation.number)
        self._peers.announce(announce)
        for worker in self._workers.living():
            news = self._announcements.news_for(worker.number)
            if self._console is not None:
                self._show(self._console, worker.number, announce)
            if worker.link is not None and news is not None:
                worker.link.send(news)
        self._workers.drop_superseded()

    async def _kill(self, worker: Worker, action: KillWorker) -> None:
        await self._suspects.settled(worker.number)
        worker.killed_on_purpose = True
        if not await worker.process.end(action.grace_s):
            log.error("worker %s does not end, not even by SIGKILL: it hangs in the kernel", worker.number)

    def _show(self, console: Console, worker: int, announce: Announce) -> None:
        """Before a worker hears of a generation: what it wrote so far belongs to the one before."""
        generation = announce.generation
        if worker in generation.members:
            rank = generation.rank_of(worker)
            console.promoted(worker, rank, generation.number, fresh=generation.fresh)
        elif self._announcements.fenced(worker) is not None:
            console.hide(worker)

    def _greeted(self, worker: int) -> None:
        if self._console is not None:
            self._console.greeted(worker)

    def _tell(self, number: int, message: object) -> None:
        worker = self._workers.get(number)
        if worker is not None and worker.link is not None:
            worker.link.send(message)

    def _suspect(self, worker: Worker, suspicion: Suspicion) -> None:
        self._spawn(self._suspects.report(worker, suspicion))

    # ---- a worker's end -------------------------------------------------------------------------------

    def _worker_exited(self, worker: Worker, event: WorkerExited) -> None:
        self._controller.send(event)
        self._witness.ended(worker.number, event.status)
        self._say(f"worker {worker.number} {say_status(event.status, event.oom_killed)}", "info")
        # First the news, then the last lines; the end of the job cannot overtake them: it comes back through
        # this loop.
        failed = event.status != 0 and not self._stopping
        if self._console is not None:
            self._console.ended(worker.number, failed=failed)
        known = self._announcements
        expected = (
            worker.killed_on_purpose
            or known.released(worker.number)
            or known.fenced(worker.number) is not None
        )
        if failed and not expected:
            self._notes.add(self._spawn(self._note_death(worker, event)))

    async def _note_death(self, worker: Worker, event: WorkerExited) -> None:
        await asyncio.sleep(NOTE_DELAY_S)  # recovery first; the files do not run away
        try:
            self._evidence.of_dead(worker, event)
        except OSError as error:
            log.error("no evidence about worker %s could be kept: %s", worker.number, error)

    # ---- the end --------------------------------------------------------------------------------------

    def leave(self, reason: str, *, hard: bool = False) -> None:
        """Leave the job: the controller hears at once that this node will not come back, then its workers end."""
        if self._stopping is None and self.ended is None:
            self._controller.leave(reason)
        self._stop(hard)

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
        self._notes.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail(error)

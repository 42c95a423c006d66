"""This node's workers: processes with their page, slot and logs. It does not know the controller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from keepstep.agent import limits
from keepstep.agent.announcements import Announcements
from keepstep.agent.environment import Place, command_line, worker_environment
from keepstep.agent.logs import open_logs
from keepstep.agent.memory import RememberedWorker
from keepstep.agent.oom import OomWatch
from keepstep.agent.process import Process
from keepstep.agent.socket import Link
from keepstep.core.events import WorkerExited
from keepstep.errors import UsageError, WireError
from keepstep.wire.messages import JobSpec
from keepstep.wire.page import DEFAULT_RECORD_BYTES, Page
from keepstep.wire.ring import ring_path
from keepstep.wire.tls import TlsFiles

# A rank's successor that is this many steps further holds records of its own for every step in question.
_SUPERSEDED_STEPS = 2
_KEPT_GENERATIONS = 2

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Worker:
    """One worker of this node, living or dead. `python_pid`: who speaks for it, once it said Hello."""

    number: int
    slot: int
    page: Page
    stacks: Path
    process: Process
    link: Link | None = None
    python_pid: int | None = None
    suspected_since_s: float | None = None
    killed_on_purpose: bool = False
    died_in: int | None = None
    waited_mark: tuple[int, ...] | None = None

    @property
    def mark(self) -> tuple[int, ...]:
        """What changes when it moves."""
        page = self.page
        return page.generation, page.step, page.phase_since_ns, page.collectives

    @property
    def waited_elsewhere(self) -> bool:
        """Whether ranks of other nodes wait for it, and it has not moved since they said so."""
        return self.waited_mark is not None and self.waited_mark == self.mark

    @property
    def alive(self) -> bool:
        return self.process.alive

    @property
    def status(self) -> int | None:
        """How it ended, as the kernel or its own page says; None while it lives, or when nobody knows."""
        if self.alive or self.process.status is not None:
            return self.process.status
        return self.page.exit_status


class Workers:
    """The table. `on_exit(worker, event)` runs as soon as a process has ended and its page was read."""

    def __init__(
        self,
        *,
        node: str,
        slots: int,
        token: str,
        run_dir: Path,
        announcements: Announcements,
        on_exit: Callable[[Worker, WorkerExited], None],
        tls: TlsFiles | None = None,
    ) -> None:
        self._tls = tls
        self._node = node
        self._slots = slots
        self._token = token
        self._run_dir = run_dir
        self._announcements = announcements
        self._on_exit = on_exit
        self._workers: dict[int, Worker] = {}
        self._oom = OomWatch()

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def get(self, number: int) -> Worker | None:
        return self._workers.get(number)

    def tell(self, number: int, message: object) -> None:
        """Send a worker a message, if it listens."""
        worker = self._workers.get(number)
        if worker is not None and worker.link is not None:
            worker.link.send(message)

    def living(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.alive]

    def page_of(self, number: int) -> Page | None:
        """The page of a worker, living or dead, as long as it is kept."""
        worker = self._workers.get(number)
        return None if worker is None else worker.page

    def start(self, number: int, slot: int, spec: JobSpec, page_dir: Path, socket: Path) -> Worker:
        """Start a worker's process. Raises UsageError when the command cannot be run, OSError for the rest."""
        if number in self._workers:
            raise UsageError(f"worker {number} was started before: ids are never used again")
        page_path, stacks = _files(page_dir, number)
        page = Page.create(str(page_path), number, spec.record_bytes or DEFAULT_RECORD_BYTES)
        place = Place(
            worker=number,
            node=self._node,
            slot=slot,
            slots=self._slots,
            socket=socket,
            page=page_path,
            stacks=stacks,
            run_dir=self._run_dir,
        )
        try:
            process = self._spawn(spec, place)
        except BaseException:
            page.close()
            page_path.unlink()
            raise
        worker = Worker(number=number, slot=slot, page=page, stacks=stacks, process=process)
        self._workers[number] = worker
        return worker

    def adopt(self, remembered: Iterable[RememberedWorker], page_dir: Path) -> None:
        """Take over what an earlier agent had started: the living to watch, the dead for what their pages keep."""
        for known in remembered:
            number = known.number
            page_path, stacks = _files(page_dir, number)
            try:
                page = Page.open(str(page_path))
            except (OSError, WireError) as error:
                log.error("worker %s is not adopted, its page is lost: %s", number, error)
                continue

            process = None
            if known.alive:
                process = Process.adopt(known.pid, known.started, partial(self._ended, number))
            if process is None:
                process = Process.past(known.pid, known.started, known.status)
            self._workers[number] = Worker(
                number=number,
                slot=known.slot,
                page=page,
                stacks=stacks,
                process=process,
                python_pid=known.python_pid if process.alive else None,
                died_in=None if process.alive else known.died_in or self._announcements.generation or 0,
            )

    def describe(self) -> list[dict[str, Any]]:
        """Every worker as the next agent shall find it."""
        return [
            asdict(
                RememberedWorker(
                    number=worker.number,
                    slot=worker.slot,
                    pid=worker.process.pid,
                    started=worker.process.started,
                    alive=worker.alive,
                    status=worker.process.status,
                    python_pid=worker.python_pid,
                    died_in=worker.died_in,
                )
            )
            for worker in self._workers.values()
        ]

    def account(self, untold: Collection[int]) -> dict[str, Any]:
        """What an agent's hello says of them. `untold`: whose end is about to be told, with all that is known
        of it, is not missed before that."""
        known = [worker for worker in self._workers.values() if worker.number not in untold]
        dead = [worker for worker in known if not worker.alive]
        since = self._announcements.fresh_since
        return {
            "workers": tuple(w.number for w in self._workers.values() if w.alive or w not in known),
            "exited": {w.number: w.status for w in dead if w.status is not None},
            "finished": tuple(
                w.number for w in dead if w.page.finished_step is not None and w.page.generation >= since
            ),
        }

    def published(self) -> int:
        """The newest step that all ranks are known to hold, over every page of this world."""
        # A page of an earlier world (before every rank was restarted) would make a start look advanced.
        fresh_since = self._announcements.fresh_since
        return max(
            (w.page.published for w in self._workers.values() if w.page.generation >= fresh_since), default=0
        )

    def drop_superseded(self) -> None:
        """Remove the pages of workers that died long ago and whose ranks have newer records elsewhere."""
        newest = self._announcements.generation or 0
        for worker in list(self._workers.values()):
            if (
                worker.died_in is not None
                and worker.died_in + _KEPT_GENERATIONS < newest
                and self._superseded(worker)
            ):
                del self._workers[worker.number]
                self._announcements.forget(worker.number)
                worker.page.close()
                for path in (Path(worker.page.path), worker.stacks, Path(ring_path(worker.page.path))):
                    with contextlib.suppress(FileNotFoundError):
                        path.unlink()

    def kill_all(self) -> None:
        """SIGKILL to all at once."""
        for worker in self.living():
            worker.process.kill()

    async def end_all(self, grace_s: float = 0.0) -> None:
        """End all and wait for it, with `grace_s` seconds after SIGTERM."""
        await asyncio.gather(*(worker.process.end(grace_s) for worker in self.living()))

    def release(self) -> None:
        """Watch nobody any longer; the living go on."""
        for worker in self._workers.values():
            worker.process.release()
        self.close()

    def close(self) -> None:
        """Unmap every page; the files go with their folder."""
        for worker in self._workers.values():
            worker.page.close()
        self._workers.clear()

    def _spawn(self, spec: JobSpec, place: Place) -> Process:
        stdout, stderr = open_logs(self._run_dir, place.worker)
        command = command_line(spec)
        try:
            process = Process.start(
                command,
                worker_environment(spec, place, self._token, tls=self._tls),
                directory=spec.working_dir or None,
                stdout=stdout,
                stderr=stderr,
                on_exit=partial(self._ended, place.worker),
            )
            limits.give_back(process.pid)
            return process
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise UsageError(f"cannot run {command[0]!r}: {error.strerror} ({error.filename})") from None
        finally:
            os.close(stdout)
            os.close(stderr)

    def _ended(self, number: int) -> None:
        seen_s = time.monotonic()
        worker = self._workers[number]
        status = worker.status
        worker.died_in = self._announcements.generation or 0
        event = WorkerExited(
            worker=number,
            status=status,
            step=worker.page.step,
            phase=worker.page.phase.name,
            published=self.published(),
            first_evidence_s=worker.suspected_since_s or seen_s,
            oom_killed=status in (-9, None) and self._oom.grew(),
        )
        self._on_exit(worker, event)

    def _superseded(self, dead: Worker) -> bool:
        if self.published() >= dead.page.step + _SUPERSEDED_STEPS:
            return True  # every rank holds a later step, wherever its records lie
        for rank in self._announcements.ranks_played(dead.number):
            players = self._announcements.players(rank)
            later = [self.page_of(number) for number in players[: players.index(dead.number)]]
            wanted = dead.page.step + _SUPERSEDED_STEPS
            if not any(page is not None and page.step >= wanted for page in later):
                return False
        return True


def _files(page_dir: Path, number: int) -> tuple[Path, Path]:
    """Page and stacks of a worker."""
    return page_dir / f"worker-{number}.page", page_dir / f"worker-{number}.stacks"

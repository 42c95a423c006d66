"""This node's workers: processes with their page, slot and logs. It does not know the controller."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from keepstep.agent.announcements import Announcements
from keepstep.agent.environment import Place, command_line, worker_environment
from keepstep.agent.logs import open_logs
from keepstep.agent.oom import OomWatch
from keepstep.agent.process import Process
from keepstep.agent.socket import Link
from keepstep.core.events import WorkerExited
from keepstep.errors import UsageError
from keepstep.wire.messages import JobSpec
from keepstep.wire.page import DEFAULT_RECORD_BYTES, Page
from keepstep.wire.ring import ring_path
from keepstep.wire.tls import TlsFiles

# A rank's successor that is this many steps further holds records of its own for every step in question.
_SUPERSEDED_STEPS = 2
_KEPT_GENERATIONS = 2


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

    @property
    def alive(self) -> bool:
        return self.process.alive


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
        page_path, stacks = page_dir / f"worker-{number}.page", page_dir / f"worker-{number}.stacks"
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

    def close(self) -> None:
        """Unmap every page; the files go with their folder."""
        for worker in self._workers.values():
            worker.page.close()
        self._workers.clear()

    def _spawn(self, spec: JobSpec, place: Place) -> Process:
        stdout, stderr = open_logs(self._run_dir, place.worker)
        command = command_line(spec)
        try:
            return Process.start(
                command,
                worker_environment(spec, place, self._token, tls=self._tls),
                directory=spec.working_dir or None,
                stdout=stdout,
                stderr=stderr,
                on_exit=lambda status: self._ended(place.worker, status),
            )
        except (FileNotFoundError, PermissionError, NotADirectoryError) as error:
            raise UsageError(f"cannot run {command[0]!r}: {error.strerror} ({error.filename})") from None
        finally:
            os.close(stdout)
            os.close(stderr)

    def _ended(self, number: int, status: int) -> None:
        seen_s = time.monotonic()
        worker = self._workers[number]
        worker.died_in = self._announcements.generation or 0
        event = WorkerExited(
            worker=number,
            status=status,
            step=worker.page.step,
            published=self.published(),
            first_evidence_s=worker.suspected_since_s or seen_s,
            oom_killed=status == -9 and self._oom.grew(),
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

"""A job on a PyTorch that lacks what protection needs: it trains, unprotected, and says so.

Under `keepstep run` the ranks find each other through the job's own store; a worker's death then ends the
job, as without Keepstep. Only promised parts of PyTorch are used here.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from keepstep.core.actions import Announce, Release
from keepstep.core.events import SelfCheckFailed, WorkerParked
from keepstep.core.types import Generation
from keepstep.errors import UsageError
from keepstep.trainer import plain
from keepstep.trainer.exit_status import leave_status
from keepstep.trainer.link import Identity, Link
from keepstep.trainer.peer import Directory
from keepstep.trainer.store import AgentStore
from keepstep.wire.messages import Fenced
from keepstep.wire.page import Page, Phase
from keepstep.wire.tls import TlsFiles

REASON = "a piece of PyTorch is missing"  # set by whoever found out
CHECK = "torch"
EXIT_FENCED = 73
EXIT_ORPHANED = 74


class Run:
    """The same face as the protected run, with nothing behind it."""

    is_protected = False
    live = True

    def __init__(self) -> None:
        self._looped = False

    @property
    def rank(self) -> int:
        """The rank that this process plays."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size()

    @property
    def device(self) -> torch.device:
        """The device of this worker's slot."""
        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cpu")

    def protect(self, *, per_rank: dict[str, Any] | None = None, **objects: Any) -> None:
        """Nothing is kept."""

    def on_promote(self, work: Callable[[int], None]) -> Callable[[int], None]:
        """Nobody is ever promoted."""
        return work

    def steps(
        self, loader: Any = None, *, epochs: int | None = None, until: int | None = None
    ) -> Iterator[plain.PlainStep]:
        """The loop as under plain torchrun."""
        if loader is None and until is None:
            raise UsageError("run.steps() without an end: name a loader and epochs=, or until=.")
        if self._looped:
            raise UsageError("run.steps() a second time: a run has one loop; put all its phases into it.")
        self._looped = True
        if loader is not None and epochs is None and until is None:
            epochs = 1
        return iter(plain.PlainLoop(loader, epochs, until))

    def report(self, **values: Any) -> None:
        """Reports belong to protected runs."""

    def finish(self, work: Callable[[], None]) -> None:
        """Do `work` on rank 0."""
        if dist.get_rank() == 0:
            work()


_current: Run | None = None


def init(
    backend: str | None = None,
    *,
    symmetric: bool = False,
    on_rank_change: Callable[[int, int], None] | None = None,
) -> Run:
    """Take the place of `dist.init_process_group`. Raises UsageError for a second call."""
    global _current
    if _current is not None:
        raise UsageError("keepstep.init() was called twice in one process: call it once, at the start.")
    if os.environ.get("KEEPSTEP_DISABLE") == "1" or "KEEPSTEP_SOCKET" not in os.environ:
        plain.start(backend, REASON)
    else:
        _Worker().start(backend)
    _current = Run()
    return _current


def _end_groups() -> None:
    """gloo's threads must not outlive the interpreter's teardown."""
    if dist.is_initialized():
        dist.destroy_process_group()


class _Worker:
    """Waits for its rank as every worker does, and then goes its own way."""

    def __init__(self) -> None:
        self._identity = Identity.from_environment()
        tls = TlsFiles.from_environment()
        self._directory = Directory(self._identity, None if tls is None else tls.client())
        self._named = threading.Event()
        self._generation: Generation | None = None
        self._page = Page.open(self._identity.page_path)
        self._link = Link(self._identity, self._hear, self._orphaned)

    def start(self, backend: str | None) -> None:
        """Report, park, and make the group of all ranks."""
        worker = self._identity.worker
        sys.stderr.write(f"keepstep: worker {worker} runs unprotected: {REASON}\n")
        sys.stderr.flush()
        leave_status(self._identity.page_path)
        self._page.enter(Phase.PARKED)
        self._link.start()
        self._link.send(SelfCheckFailed(worker=worker, check=CHECK, reason=REASON))
        self._link.send(WorkerParked(worker=worker, readiness="warm"))
        while not self._named.wait(1.0):  # the link ends this process when its agent is gone
            pass
        generation = self._generation
        assert generation is not None
        rank = generation.rank_of(worker)
        assert rank is not None
        self._page.generation = generation.number
        self._page.enter(Phase.SETUP)
        store = AgentStore(f"g{generation.number}/unprotected/")
        store.connect(self._directory.dial_store(generation))
        os.environ["RANK"], os.environ["GROUP_RANK"] = str(rank), "0"
        dist.init_process_group(backend, store=store, rank=rank, world_size=self._link.welcome.world_size)
        atexit.register(_end_groups)

    def _hear(self, message: Any) -> None:
        match message:
            case Announce(generation=generation):
                self._directory.note(message)
                if self._generation is None and self._identity.worker in generation.members:
                    if not generation.fresh:
                        self._leave("an unprotected worker cannot take over a rank", EXIT_FENCED)
                    self._generation = generation
                    self._named.set()
            case Fenced(reason=reason):
                self._leave(reason, EXIT_FENCED)
            case Release() if self._generation is None:
                self._leave("the job has finished", 0)
            case _:
                pass

    def _orphaned(self, alone_s: float) -> None:
        self._leave(f"it has had no agent for {alone_s:.0f} s", EXIT_ORPHANED)

    def _leave(self, reason: str, status: int) -> None:
        sys.stderr.write(f"keepstep: worker {self._identity.worker} leaves: {reason}\n")
        sys.stderr.flush()
        self._page.exit_status = status
        os._exit(status)

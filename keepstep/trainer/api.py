"""What a training script sees: `keepstep.init()` and the `Run` that it returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from keepstep.core.events import WorkerParked
from keepstep.core.types import Generation
from keepstep.core.worker_events import Connect, Connected
from keepstep.errors import ProtectionError, StepInterrupted, UsageError
from keepstep.trainer import niceness, plain
from keepstep.trainer.data import Cursor
from keepstep.trainer.elastic import BACKEND_NAME, Place, register
from keepstep.trainer.ends import Ends
from keepstep.trainer.journal import Journal
from keepstep.trainer.link import Identity
from keepstep.trainer.loop import Loop
from keepstep.trainer.promotion import Promotion, fetch_journal, set_rank_environment
from keepstep.trainer.recovery import connect_group, meet, open_fabric
from keepstep.trainer.reports import Reports
from keepstep.trainer.session import Session
from keepstep.trainer.step import Step
from keepstep.wire.page import Phase

_current: Run | None = None


def init(
    backend: str | None = None,
    *,
    symmetric: bool = False,
    on_rank_change: Callable[[int, int], None] | None = None,
) -> Run:
    """Take the place of `dist.init_process_group`; a spare parks in here until it is needed.

    `symmetric`: every rank builds the same shapes, so a spare may build the model beforehand (hot)
    and be turned into any rank; `on_rank_change(old, new)` then mends what the script derived from
    its rank. Raises UsageError for a second call, ProtectionError when the agent is out of reach.
    """
    global _current
    if _current is not None:
        raise UsageError("keepstep.init() was called twice in one process: call it once, at the start.")
    disabled = os.environ.get("KEEPSTEP_DISABLE") == "1"
    if disabled or "KEEPSTEP_SOCKET" not in os.environ:
        plain.start(backend, "KEEPSTEP_DISABLE=1" if disabled else "not started by `keepstep run`")
        _current = Run(None, None, None)
        return _current
    _current = _init_protected(backend, symmetric, on_rank_change)
    return _current


def _init_protected(
    backend: str | None, symmetric: bool, on_rank_change: Callable[[int, int], None] | None
) -> Run:
    session = Session(Identity.from_environment())
    session.ends = Ends(session)
    session.device_type = "cuda" if backend is not None and "nccl" in backend else "cpu"
    if session.device_type == "cuda":
        from keepstep.trainer.nccl import ENVIRONMENT

        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
    session.page.enter(Phase.PARKED)
    session.spare_check.before_parking()
    session.link.send(WorkerParked(worker=session.worker, readiness="warm"))
    generation = session.await_rank(symmetric=symmetric)
    session.page.enter(Phase.SETUP)
    groups = session.groups
    devices = ["cpu", "cuda"] if session.device_type == "cuda" else ["cpu"]
    register(groups, devices=devices)
    if generation is not None and generation.fresh:
        rank = _rank_in(session, generation)
        _start_fresh(session, generation)
    else:
        rank = _rehearsal_rank(session) if generation is None else _rank_in(session, generation)
        session.rehearsing = True
        groups.settle(solo=True)
        groups.journal = fetch_journal(session, rank)
    set_rank_environment(rank)
    dist.init_process_group(BACKEND_NAME, store=dist.HashStore(), rank=rank, world_size=session.world_size)
    if not session.rehearsing:
        session.tell(Connected(generation=session.generation_number))
    return Run(
        session, Promotion(session, rank, on_rank_change), Reports(session.identity.run_dir, session.worker)
    )


def _rank_in(session: Session, generation: Generation) -> int:
    rank = generation.rank_of(session.worker)
    if rank is None:
        raise ProtectionError(f"generation {generation.number} does not name worker {session.worker}")
    return rank


def _rehearsal_rank(session: Session) -> int:
    if session.prepare is not None:
        niceness.step_back()
        return session.prepare.rank
    assert session.standby is not None
    return session.standby.rehearse_rank


def _start_fresh(session: Session, generation: Generation) -> None:
    """The world starts: groups connect as the script makes them, since building a model communicates."""
    session.join()
    session.resumption_due = generation.number > 0  # an incident led here: it is over at the first commit
    action = session.next_action()
    if not isinstance(action, Connect):
        raise ProtectionError(f"a fresh generation begins with Connect, not with {action}")
    try:
        open_fabric(session, generation)
        meet(session, generation)
    except (ProtectionError, TimeoutError) as error:
        session.groups.poison(f"setup: {error}")
        session.strand()
    groups = session.groups
    groups.journal = Journal()

    def connect_new(group: Any) -> None:
        try:
            connect_group(session, group)
        except (RuntimeError, ProtectionError) as error:
            groups.poison(f"setup, group of ranks {group.ranks}: {error}")
            session.strand()

    groups.connect_new = connect_new
    groups.settle(place=Place.SETUP, solo=False, poisoned=groups.poisoned)
    if groups.poisoned:
        session.strand()


class Run:
    """One training run as its script sees it. Unprotected when started without `keepstep run`."""

    def __init__(self, session: Session | None, promotion: Promotion | None, reports: Reports | None) -> None:
        self._session = session
        self._promotion = promotion
        self._reports = reports
        self._loop: Loop | None = None
        self._looped = False
        self._on_promote: list[Callable[[int], None]] = []

    # ---- who am I -------------------------------------------------------------------------------

    @property
    def is_protected(self) -> bool:
        """Whether a failure of this run would be repaired."""
        return self._session is not None

    @property
    def live(self) -> bool:
        """False while a spare rehearses: leave no trace then (files, experiment trackers)."""
        return self._session is None or self._session.live

    @property
    def rank(self) -> int:
        """The rank that this process plays (or rehearses)."""
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks: fixed for the job's life."""
        return dist.get_world_size()

    @property
    def device(self) -> torch.device:
        """The device of this worker's slot."""
        if torch.cuda.is_available() and (self._session is None or self._session.device_type == "cuda"):
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("cpu")

    # ---- what is kept alive ---------------------------------------------------------------------

    def protect(self, *, per_rank: dict[str, Any] | None = None, **objects: Any) -> None:
        """Name everything that must outlive this process: modules, optimizers, schedulers, a GradScaler,
        anything with `state_dict`, dicts of counters. `per_rank`: what differs from rank to rank.

        Raises UsageError, by name, for what cannot be kept.
        """
        session = self._session
        if session is None:
            return
        if self._looped:
            raise UsageError("run.protect() after run.steps(): protect everything before the loop.")
        session.protected.add(**objects)
        if per_rank:
            session.protected.add_per_rank(**per_rank)
        session.faults.at("setup")

    def on_promote(self, work: Callable[[int], None]) -> Callable[[int], None]:
        """Call `work(rank)` on a worker that takes a dead one's rank over: the state is the rank's, and no step
        has been served yet. If it dies in there, the next one is called. Also a decorator; without Keepstep
        nobody is ever promoted. Raises UsageError once the loop has begun.
        """
        if self._looped:
            raise UsageError("run.on_promote() after run.steps(): say it before the loop.")
        self._on_promote.append(work)
        return work

    def _promoted(self) -> None:
        for work in self._on_promote:
            work(self.rank)

    # ---- the loop -------------------------------------------------------------------------------

    def steps(
        self, loader: Any = None, *, epochs: int | None = None, until: int | None = None
    ) -> Iterator[Step] | Iterator[plain.PlainStep]:
        """The training loop: `for step in run.steps(loader, epochs=3)`, or `until=` a number of updates.

        Raises UsageError for a loader that cannot be resumed, or a loop without an end.
        """
        if loader is None and until is None:
            raise UsageError("run.steps() without an end: name a loader and epochs=, or until=.")
        if loader is not None and epochs is None and until is None:
            epochs = 1
        if self._looped:
            raise UsageError("run.steps() a second time: a run has one loop; put all its phases into it.")
        self._looped = True
        session = self._session
        if session is None:
            return iter(plain.PlainLoop(loader, epochs, until))
        assert self._promotion is not None
        assert self._reports is not None
        cursor = None if loader is None else Cursor(loader, epochs, on_worker_death=session.say)
        session.protected.check()
        if not session.rehearsing:
            session.learn_shard()
        self._loop = Loop(
            session,
            self._reports,
            cursor=cursor,
            until=until,
            become_rank=self._promotion.become_rank,
            take_over=self._promoted,
        )
        if not session.rehearsing:
            session.end_setup()
        return self._walk(self._loop)

    @staticmethod
    def _walk(loop: Loop) -> Iterator[Step]:
        while True:
            try:
                step = loop.next_step()
            except StopIteration:
                return
            yield step

    def report(self, **values: Any) -> None:
        """Note numbers of the step under way (its loss), before optimizer.step(): each committed step has
        exactly one line in the run directory's reports."""
        if self._reports is None or not self.live:
            return
        if self._loop is not None and self._loop.in_block and self._loop.gate.passed:
            raise UsageError(
                "run.report() after optimizer.step(): a rank that died in between would leave no line. Report before it."
            )
        self._reports.add(values)

    def finish(self, work: Callable[[], None]) -> None:
        """Do `work` once, on rank 0, after the loop, protected: if its player dies, the replacement does it."""
        session = self._session
        if session is None:
            if dist.get_rank() == 0:
                work()
            return
        if self._loop is None:
            raise UsageError("run.finish() before run.steps(): it is what comes after the loop.")
        done = False
        while session.closed_gates < 2:
            if self.rank == 0 and not done:
                session.groups.settle(place=Place.CLOSING)
                try:
                    work()
                except StepInterrupted:
                    pass
                else:
                    done = True
            self._loop.pass_empty_gate()

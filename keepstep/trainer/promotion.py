"""How a spare becomes a rank: it rehearses alone, is given a rank, and joins the generation.

Warm: parked in init(), built as the rank it will play. Hot (init(symmetric=True)): built and
rehearsed as some rank beforehand, and turned into another in place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from keepstep.core.events import WorkerParked
from keepstep.core.worker_events import CopyStarted
from keepstep.errors import UsageError
from keepstep.trainer import niceness
from keepstep.trainer.adapters import resets
from keepstep.trainer.adapters.rerank import Reranker
from keepstep.trainer.elastic import Place
from keepstep.trainer.journal import Journal
from keepstep.wire.page import Phase

if TYPE_CHECKING:
    from keepstep.trainer.data import Cursor
    from keepstep.trainer.session import Session

JOURNAL_TIMEOUT_S = 300.0
FIRST_POLL_S, LAST_POLL_S = 0.1, 2.0  # each look may ask every agent of the job


def fetch_journal(session: Session, rank: int) -> Journal:
    """The setup journal of `rank`; waits while its player is still setting up."""
    deadline_s, pause_s = time.monotonic() + JOURNAL_TIMEOUT_S, FIRST_POLL_S
    while True:
        answer = session.link.fetch("journal", rank)
        if answer.data is not None:
            return Journal.from_bytes(answer.data)
        if time.monotonic() > deadline_s:
            session.leave(f"rank {rank} has not finished its setup in {JOURNAL_TIMEOUT_S:.0f} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LAST_POLL_S)


class Promotion:
    """What a rehearsed spare does until, and when, it has a rank."""

    def __init__(
        self, session: Session, rehearsed_rank: int, on_rank_change: Callable[[int, int], None] | None
    ):
        self._session = session
        self._rehearsed_rank = rehearsed_rank
        self._on_rank_change = on_rank_change

    def become_rank(self, cursor: Cursor | None) -> bool:
        """Park hot until a generation names this worker (at once when it is named), then join it.

        False: it has become the rank whose living player it is to follow first.
        """
        session = self._session
        resets.reset(session.protected.modules.values())
        reranker = Reranker(list(session.groups), session.protected.modules.values())
        if session.announced is None and session.prepare is None:
            session.page.enter(Phase.PARKED)
            session.link.send(WorkerParked(worker=session.worker, readiness="hot"))
        generation = session.await_rank(symmetric=False)
        if generation is None:
            niceness.step_back()
            assert session.prepare is not None
            if session.prepare.rank != self._rehearsed_rank:
                self._change_rank(reranker, cursor, session.prepare.rank)
            return False
        niceness.step_forward()
        rank = generation.rank_of(session.worker)
        assert rank is not None
        if rank != self._rehearsed_rank:
            self._change_rank(reranker, cursor, rank)
            session.tell(CopyStarted())  # state that was copied ahead is another rank's
        session.learn_shard()
        session.groups.journal = None
        session.groups.settle(solo=False, place=Place.OUTSIDE, poisoned=True)
        session.rehearsing = False
        session.join()
        return True

    def _change_rank(self, reranker: Reranker, cursor: Cursor | None, rank: int) -> None:
        old = self._rehearsed_rank
        try:
            reranker.check(old, rank)
            reranker.apply(old, rank)
        except UsageError as error:
            self._session.leave(f"built as rank {old}, it cannot become rank {rank}: {error}")
        own = [group.key for group in self._session.groups]
        expected = fetch_journal(self._session, rank).groups
        if own != expected:
            self._session.leave(
                f"built as rank {old} it has the groups {own}, rank {rank} has {expected}: "
                "init(symmetric=True) needs the same groups on every rank"
            )
        if cursor is not None:
            cursor.set_rank(old, rank, self._session.world_size)
        set_rank_environment(rank)
        if self._on_rank_change is not None:
            self._on_rank_change(old, rank)
        self._rehearsed_rank = rank


def set_rank_environment(rank: int) -> None:
    """RANK is unset until a worker has one, so that early readers fail loudly."""
    os.environ["RANK"] = str(rank)
    os.environ["GROUP_RANK"] = "0"

"""What of a rank's records lies on this node: in the pages of its workers, and kept for other nodes.

Local memory only: it reads pages, and answers this node's workers and other agents alike. Who asks, and what
lies elsewhere, it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keepstep.agent.announcements import Announcements
from keepstep.agent.kept import KeptRecords
from keepstep.wire.messages import PeerFetch, PeerFetched
from keepstep.wire.page import Page


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One record that fits. `node`: where it lies, "" for here; the rest as in PeerFetched."""

    kind: str
    step: int
    worker: int
    played: int
    sequence: int
    final: bool
    data: bytes
    node: str = ""

    @property
    def order(self) -> tuple[bool, int, bool, int]:
        """The least is the best. A record of the step's start also holds what the block's end changed: it
        comes first wherever it lies. Among equals the newest player's counts, then what is surely its last."""
        return (self.kind != "start", -self.played, not self.final, -self.sequence)

    def describe(self) -> str:
        where = f" on {self.node}" if self.node else ""
        return f"{self.kind} of step {self.step}, kept by worker {self.worker}{where}"


class Records:
    """Finds records of ranks. `page_of`: the page of a local worker, living or dead."""

    def __init__(
        self, announcements: Announcements, page_of: Callable[[int], Page | None], kept: KeptRecords
    ) -> None:
        self._announcements = announcements
        self._page_of = page_of
        self._kept = kept

    def find(self, rank: int, lineage: str) -> Found | None:
        """The best record that fits the lineage here."""
        fitting = [found for found in self._all(rank) if found[0] == lineage]
        return min((found for _, found in fitting), key=lambda found: found.order, default=None)

    def steps(self, rank: int) -> tuple[int, ...]:
        """The steps of all records of a rank that lie here, whatever their lineage."""
        return tuple(sorted({found.step for _, found in self._all(rank)}))

    def answer(self, fetch: PeerFetch) -> PeerFetched:
        """To another agent. What this node knows of an earlier world than the asking one's says nothing."""
        if fetch.fresh_since > self._announcements.fresh_since and self._announcements.newest is not None:
            return PeerFetched(data=None)
        found = self.find(fetch.rank, fetch.lineage)
        if found is None:
            return PeerFetched(data=None, steps=self.steps(fetch.rank))
        return PeerFetched(
            data=found.data,
            kind=found.kind,
            step=found.step,
            worker=found.worker,
            played=found.played,
            final=found.final,
        )

    def _all(self, rank: int) -> list[tuple[str, Found]]:
        """(lineage, record) of everything about a rank."""
        known = self._announcements
        every = [
            (
                record.lineage,
                Found(
                    kind=record.kind,
                    step=record.step,
                    worker=worker,
                    played=known.played_in(rank, worker),
                    sequence=record.sequence,
                    final=True,  # a page holds all that its worker wrote
                    data=record.payload,
                ),
            )
            for worker in known.players(rank)
            if (page := self._page_of(worker)) is not None
            for record in page.records()
        ]
        for worker, generation, record, final in self._kept.of_rank(rank):
            found = Found(
                kind=record.kind,
                step=record.step,
                worker=worker,
                played=max(generation, known.played_in(rank, worker)),
                sequence=record.sequence,
                final=final,
                data=record.payload,
            )
            every.append((record.lineage, found))
        return every

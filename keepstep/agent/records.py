"""What a replacement asks for: the record of its rank out of the dead's pages, and the rank's journal.

It reads pages and keeps journals in memory; who asks, and over what, it does not know.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.agent.announcements import Announcements
from keepstep.wire.messages import Fetch, Fetched, JournalKept
from keepstep.wire.page import Page, Record


class Records:
    """Finds records and journals of ranks. `page_of`: the page of a local worker, living or dead."""

    def __init__(self, announcements: Announcements, page_of: Callable[[int], Page | None]) -> None:
        self._announcements = announcements
        self._page_of = page_of
        self._journals: dict[int, bytes] = {}

    def keep_journal(self, kept: JournalKept) -> None:
        """The newest journal of a rank replaces the one before."""
        self._journals[kept.rank] = kept.data

    def fetch(self, fetch: Fetch) -> Fetched:
        """The answer; `detail` tells "start" or "gate" and where a record came from, or why there is none."""
        if fetch.what == "journal":
            data = self._journals.get(fetch.rank)
            detail = "" if data is not None else f"no journal of rank {fetch.rank} is kept on this node"
            return Fetched(request=fetch.request, data=data, detail=detail)
        found = self._find(fetch.rank, fetch.lineage)
        if found is None:
            return Fetched(request=fetch.request, data=None, detail=self._explain(fetch))
        worker, record = found
        detail = f"{record.kind} of step {record.step}, kept by worker {worker}"
        return Fetched(request=fetch.request, data=record.payload, detail=detail)

    def _find(self, rank: int, lineage: str) -> tuple[int, Record] | None:
        # A record of the step's start also holds what the block's end changed: it comes first wherever it
        # lies. Among equals the newest player's counts.
        fitting = [
            (record.kind != "start", age, -record.sequence, worker, record)
            for age, worker in enumerate(self._announcements.players(rank))
            if (page := self._page_of(worker)) is not None
            for record in page.records()
            if record.lineage == lineage
        ]
        if not fitting:
            return None
        *_, worker, record = min(fitting, key=lambda entry: entry[:3])
        return worker, record

    def _explain(self, fetch: Fetch) -> str:
        players = self._announcements.players(fetch.rank)
        if not players:
            return f"rank {fetch.rank} was never played in this world"
        steps = [
            record.step
            for worker in players
            if (page := self._page_of(worker)) is not None
            for record in page.records()
        ]
        kept = f"kept are steps {sorted(set(steps))}" if steps else "none is kept on this node"
        return f"no record of rank {fetch.rank} fits the lineage {fetch.lineage or 'of the start'}: {kept}"

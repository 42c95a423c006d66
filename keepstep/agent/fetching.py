"""What a replacement asks for, wherever in the cluster it lies: the record that fits, or the rank's journal.

This node's own memory first; then all other agents at once, one deadline for all of them. The best answer
wins, by the same order wherever it lies. It stops early when nothing better can come.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from keepstep.agent.announcements import Announcements
from keepstep.agent.journals import Journals
from keepstep.agent.peer_call import CALL_FAILURES, call
from keepstep.agent.records import Found, Records
from keepstep.wire.messages import Fetch, Fetched, PeerFetch, PeerFetched

DEADLINE_S = 1.0
# After the first record that fits: a living agent answers within milliseconds, a lost node never does.
GRACE_S = 0.25
MAX_CALLS = 64


class Fetching:
    """Answers one node's workers. `node` is this node's name."""

    def __init__(
        self,
        node: str,
        token: str,
        announcements: Announcements,
        records: Records,
        journals: Journals,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._node = node
        self._token = token
        self._announcements = announcements
        self._records = records
        self._journals = journals
        self._tls = tls
        self._calls = asyncio.Semaphore(MAX_CALLS)

    async def fetch(self, worker: int, fetch: Fetch) -> Fetched:
        """The answer to `worker`; `detail` tells what a record is and where it lay, or why there is none."""
        if fetch.what == "journal":
            return await self._journal(fetch)
        search = _Search(self._records.find(fetch.rank, fetch.lineage), set(self._records.steps(fetch.rank)))
        predecessor = next((w for w in self._announcements.players(fetch.rank) if w != worker), None)
        if not search.ended(predecessor):
            async for node, answer in self._ask_all(self._question(fetch), search.successful):
                search.take(node, answer)
                if search.ended(predecessor):
                    break
        if search.best is None:
            return Fetched(request=fetch.request, data=None, detail=self._explain(fetch, search))
        return Fetched(request=fetch.request, data=search.best.data, detail=search.best.describe())

    async def _journal(self, fetch: Fetch) -> Fetched:
        data = self._journals.get(fetch.rank)
        if data is None:
            async for _, answer in self._ask_all(self._question(fetch), lambda: False):
                if answer is not None and answer.data is not None:
                    data = answer.data
                    self._journals.adopt(fetch.rank, data)
                    break
        detail = "" if data is not None else f"no journal of rank {fetch.rank} is kept on this node"
        if data is None and self._others():
            detail = f"no journal of rank {fetch.rank} is kept on any node"
        return Fetched(request=fetch.request, data=data, detail=detail)

    def _question(self, fetch: Fetch) -> PeerFetch:
        return PeerFetch(
            what=fetch.what,
            rank=fetch.rank,
            lineage=fetch.lineage,
            fresh_since=self._announcements.fresh_since,
        )

    def _others(self) -> Mapping[str, str]:
        """The other agents, by node; those that keep records first."""
        newest = self._announcements.newest
        if newest is None:
            return {}
        keepers = set(newest.keepers.values())
        others = [(node, peer) for node, peer in newest.peers.items() if node != self._node and peer]
        return dict(sorted(others, key=lambda item: (item[0] not in keepers, item[0])))

    async def _ask_all(
        self, question: PeerFetch, satisfied: Callable[[], bool]
    ) -> AsyncIterator[tuple[str, PeerFetched | None]]:
        """Every other agent's answer as it comes, None for one that gives none; ends at the deadline."""
        deadline_s = time.monotonic() + DEADLINE_S
        tasks = {
            asyncio.create_task(self._ask(peer, question)): node for node, peer in self._others().items()
        }
        waiting, in_grace = set(tasks), False
        try:
            while waiting:
                if not in_grace and satisfied():
                    in_grace = True
                    deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
                left_s = deadline_s - time.monotonic()
                done, waiting = await asyncio.wait(
                    waiting, timeout=max(left_s, 0.0), return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    yield tasks[task], task.result()
                if not done:
                    break
            for task in waiting:
                yield tasks[task], None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, peer: str, question: PeerFetch) -> PeerFetched | None:
        try:
            async with self._calls:
                answer = await call(
                    peer, question, token=self._token, node=self._node, timeout_s=DEADLINE_S, tls=self._tls
                )
        except CALL_FAILURES:
            return None
        return answer if isinstance(answer, PeerFetched) else None

    def _explain(self, fetch: Fetch, search: _Search) -> str:
        if not self._announcements.players(fetch.rank):
            return f"rank {fetch.rank} was never played in this world"
        where = "on any node" if self._others() else "on this node"
        kept = f"kept are steps {sorted(search.steps)}" if search.steps else f"none is kept {where}"
        unheard = f" (no answer from {', '.join(sorted(search.silent))})" if search.silent else ""
        lineage = fetch.lineage or "of the start"
        return f"no record of rank {fetch.rank} fits the lineage {lineage}: {kept}{unheard}"


@dataclass
class _Search:
    """The best record so far, and what else was seen."""

    best: Found | None
    steps: set[int]
    silent: list[str] = field(default_factory=list)

    def successful(self) -> bool:
        return self.best is not None

    def ended(self, predecessor: int | None) -> bool:
        """Whether the best is all that the asking worker's predecessor can have left anywhere."""
        return self.best is not None and self.best.final and self.best.worker == predecessor

    def take(self, node: str, answer: PeerFetched | None) -> None:
        if answer is None:
            self.silent.append(node)
            return
        self.steps.update(answer.steps)
        if answer.data is None:
            return
        found = Found(
            kind=answer.kind,
            step=answer.step,
            worker=answer.worker,
            played=answer.played,
            sequence=0,
            final=answer.final,
            data=answer.data,
            node=node,
        )
        if self.best is None or found.order < self.best.order:
            self.best = found

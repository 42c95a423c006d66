"""What ranks heard from their peers during setup, kept for whoever takes the rank; a copy lies on another node.

The journals of this node's ranks are handed to the agent that keeps their records, and again when that is
another one. It does not know what a journal says.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import ssl
from dataclasses import dataclass
from pathlib import Path

from keepstep.agent.announcements import Announcements
from keepstep.agent.peer_call import CALL_FAILURES, call
from keepstep.wire.messages import PeerFetch, PeerFetched, PeerJournal

HAND_OVER_TIMEOUT_S = 5.0
ATTEMPTS = 5
FIRST_BACKOFF_S = 0.2
MAX_JOURNALS = 65_536
_FILE = "journal-"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Kept:
    data: bytes
    fresh_since: int
    own: bool  # of a rank that lives (or lived) on this node: to be handed over


class Journals:
    """The journals on one node. `run` hands them over until cancelled."""

    def __init__(
        self, node: str, token: str, announcements: Announcements, tls: ssl.SSLContext | None = None
    ) -> None:
        self._node = node
        self._token = token
        self._announcements = announcements
        self._tls = tls
        self._kept: dict[int, _Kept] = {}
        self._handed: dict[int, tuple[str, int]] = {}  # rank -> keeper's address, hash of what it was given
        self._changed = asyncio.Event()
        self._folder: Path | None = None

    def keep_in(self, folder: Path) -> None:
        """Keep them in this folder too, for the agent after this one; those that lie there are taken up."""
        for file in folder.glob(f"{_FILE}*"):
            head, _, data = file.read_bytes().partition(b"\n")
            self._kept[int(file.name.removeprefix(_FILE))] = _Kept(data, **json.loads(head))
        self._folder = folder
        self._changed.set()

    def keep(self, rank: int, data: bytes) -> None:
        """A worker of this node tells its rank's journal; the newest replaces the one before."""
        self._put(rank, _Kept(data, self._announcements.fresh_since, own=True))
        self._changed.set()

    def adopt(self, rank: int, data: bytes) -> None:
        """A rank is about to be taken over by a worker of this node."""
        self.keep(rank, data)

    def take(self, handed: PeerJournal) -> None:
        """Another node's agent hands one over."""
        old = self._kept.get(handed.rank)
        if old is not None and (old.own or old.fresh_since > handed.fresh_since):
            return
        if old is not None or len(self._kept) < MAX_JOURNALS:
            self._put(handed.rank, _Kept(handed.data, handed.fresh_since, own=False))

    def get(self, rank: int) -> bytes | None:
        """The journal of a rank of this world."""
        kept = self._kept.get(rank)
        return None if kept is None or kept.fresh_since < self._announcements.fresh_since else kept.data

    def answer(self, fetch: PeerFetch) -> PeerFetched:
        """To another agent."""
        kept = self._kept.get(fetch.rank)
        fits = kept is not None and kept.fresh_since >= fetch.fresh_since
        return PeerFetched(data=kept.data if kept is not None and fits else None)

    def announced(self) -> None:
        """Who keeps what may have changed."""
        self._changed.set()

    def _put(self, rank: int, kept: _Kept) -> None:
        if self._kept.get(rank) == kept:
            return
        self._kept[rank] = kept
        if self._folder is None:
            return
        draft = self._folder / f".{_FILE}{rank}"
        head = json.dumps({"fresh_since": kept.fresh_since, "own": kept.own}).encode()
        try:
            with open(draft, "wb", opener=_private) as file:
                file.write(head + b"\n" + kept.data)
            draft.rename(self._folder / f"{_FILE}{rank}")
        except OSError as error:
            log.error("the journal of rank %s will not outlive this agent: %s", rank, error)

    async def run(self) -> None:
        """Hand over what the keeper does not have yet, whenever something changes."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            backoff_s = FIRST_BACKOFF_S
            for _ in range(ATTEMPTS):
                if await self._hand_over() or self._changed.is_set():
                    break
                await asyncio.sleep(backoff_s)
                backoff_s *= 2

    async def _hand_over(self) -> bool:
        """Whether the keeper has everything."""
        newest = self._announcements.newest
        keeper = "" if newest is None else newest.keepers.get(self._node, "")
        peer = "" if newest is None else newest.peers.get(keeper, "")
        if not peer or keeper == self._node:
            return True
        for rank, kept in list(self._kept.items()):
            given = (peer, hash((kept.data, kept.fresh_since)))
            if not kept.own or self._handed.get(rank) == given:
                continue
            message = PeerJournal(rank=rank, fresh_since=kept.fresh_since, data=kept.data)
            try:
                await call(
                    peer,
                    message,
                    token=self._token,
                    node=self._node,
                    timeout_s=HAND_OVER_TIMEOUT_S,
                    tls=self._tls,
                )
            except CALL_FAILURES as error:
                log.debug("the journal of rank %s could not be handed to %s: %s", rank, keeper, error)
                return False
            self._handed[rank] = given
        return True


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)

"""This agent among the others: what it does for other nodes, and what it asks of them.

For others: the store of a generation, records and journals kept in memory, questions about both. Of others:
records and journals of ranks that move here, and whether they can be reached at all (`Probe`). One listener,
bound to the advertised address; who is who is proved by the job's token (`keepstep.wire.handshake`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from keepstep.agent import limits
from keepstep.agent.announcements import Announcements
from keepstep.agent.config import AgentConfig
from keepstep.agent.fetching import Fetching
from keepstep.agent.journals import Journals
from keepstep.agent.kept import KeptRecords
from keepstep.agent.peer_call import probe
from keepstep.agent.peer_listener import PeerListener, Role, Send
from keepstep.agent.peer_roles import AgentRole, KeepRole, StoreRole
from keepstep.agent.records import Records
from keepstep.agent.store import GenerationStore
from keepstep.core.actions import Announce, Probe
from keepstep.core.events import ProbeAnswered
from keepstep.errors import WireError
from keepstep.wire.address import parse_address
from keepstep.wire.messages import Fetch, Fetched, PeerFetch, PeerFetched, PeerHello, PeerJournal
from keepstep.wire.page import Page

MAX_PROBES = 32
MAX_PROBE_S = 30.0
MAX_FETCHES = 256

log = logging.getLogger(__name__)


class Peers:
    """Everything between nodes, of one agent."""

    def __init__(
        self,
        config: AgentConfig,
        announcements: Announcements,
        store: GenerationStore,
        page_of: Callable[[int], Page | None],
        published: Callable[[], int],
    ) -> None:
        self._node = config.node
        self._announcements = announcements
        self._store = store
        self._published = published
        self.world_size = 1 << 31  # until the controller's welcome
        self.kept = KeptRecords()
        self.records = Records(announcements, page_of, self.kept)
        client_tls = config.peer_client_tls
        self.journals = Journals(config.node, config.token, announcements, client_tls)
        self._fetching = Fetching(
            config.node, config.token, announcements, self.records, self.journals, client_tls
        )
        self._listener = PeerListener(
            config.advertise,
            config.token,
            config.node,
            self,
            port=config.peer_port,
            tls=config.peer_server_tls,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Where other nodes reach this agent."""
        return self._listener.address

    def prefer(self, address: str) -> None:
        """Where the agent before this one listened: others still look there."""
        with contextlib.suppress(ValueError):
            self._listener.preferred_port = parse_address(address)[1]

    async def open(self) -> None:
        """Listen. Raises UsageError."""
        limits.raise_open_files()
        await self._listener.open()
        self._spawn(self.journals.run())

    async def close(self) -> None:
        """Cut everything; nothing listens afterwards."""
        self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def announce(self, announce: Announce) -> None:
        """A new generation counts: those that it fences may speak no more."""
        generation = announce.generation
        self.kept.announce(generation.number, generation.fresh, self._published())
        self._listener.cut(lambda hello: self._announcements.fenced(hello.worker) is not None)
        self.journals.announced()

    def fetch(self, worker: int, fetch: Fetch, answer: Callable[[Fetched], None]) -> None:
        """Find it, here or elsewhere, and answer later."""
        if len(self._tasks) > MAX_FETCHES:
            answer(
                Fetched(request=fetch.request, data=None, detail="this agent has too many questions at once")
            )
            return

        async def work() -> None:
            answer(await self._fetching.fetch(worker, fetch))

        self._spawn(work())

    def probe(self, action: Probe, answer: Callable[[ProbeAnswered], None]) -> None:
        """Try to reach another node's agent, and answer later."""
        if len(self._tasks) > MAX_FETCHES + MAX_PROBES:
            return

        async def work() -> None:
            outcome = await probe(action.peer, min(action.timeout_s, MAX_PROBE_S))
            answer(ProbeAnswered(node=action.node, by=self._node, outcome=outcome))

        self._spawn(work())

    # ---- what the listener asks -----------------------------------------------------------------

    def refusal(self, hello: PeerHello) -> str | None:
        """Why this peer may not stay; None when it may."""
        if hello.role == "agent":
            return None
        return self._announcements.fenced(hello.worker)

    def role_for(self, hello: PeerHello, send: Send) -> Role:
        """What an authenticated connection does."""
        match hello.role:
            case "store":
                return StoreRole(self._store, send)
            case "keep":
                return KeepRole(hello.worker, self.kept, send, lambda: self.world_size)
            case "agent":
                return AgentRole(self._answer, self._take, self._node, send)

    def _answer(self, fetch: PeerFetch) -> PeerFetched:
        return self.journals.answer(fetch) if fetch.what == "journal" else self.records.answer(fetch)

    def _take(self, journal: PeerJournal) -> None:
        if not 0 <= journal.rank < self.world_size:
            raise WireError(f"there is no rank {journal.rank} to keep a journal for")
        self.journals.take(journal)

    # ---- tasks ----------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a question between nodes failed", exc_info=task.exception())

"""What an authenticated connection from another node does: a worker's store, a worker's records, an agent's
question. Frames in, frames out; who may connect was decided before."""

from __future__ import annotations

from collections.abc import Callable

from keepstep.agent.kept import KeptRecords
from keepstep.agent.peer_listener import Send
from keepstep.agent.store import GenerationStore
from keepstep.agent.store_session import StoreSession
from keepstep.errors import WireError
from keepstep.wire.codec import decode, encode
from keepstep.wire.keeping import pack_ack, unpack_record
from keepstep.wire.messages import PeerFetch, PeerFetched, PeerJournal, PeerWelcome


class StoreRole:
    """A worker of another node connects its groups through this node's store."""

    def __init__(self, store: GenerationStore, send: Send) -> None:
        self._session = StoreSession(store, lambda reply: send(encode(reply)))

    def received(self, data: bytes) -> None:
        self._session.received(data)

    def closed(self) -> None:
        self._session.closed()


class KeepRole:
    """A worker of another node hands over its records, each acknowledged when it is kept."""

    def __init__(self, worker: int, kept: KeptRecords, send: Send, world_size: Callable[[], int]) -> None:
        self._worker = worker
        self._kept = kept
        self._send = send
        self._world_size = world_size
        self._last = b""

    def received(self, data: bytes) -> None:
        record = unpack_record(data, self._last)
        if record.rank >= self._world_size():
            raise WireError(
                f"worker {self._worker} sends the record of a rank {record.rank} that there is not"
            )
        self._last = record.payload
        self._send(pack_ack(record.sequence, self._kept.keep(self._worker, record)))

    def closed(self) -> None:
        pass


class AgentRole:
    """Another node's agent asks for a record or a journal, or hands a journal over."""

    def __init__(
        self,
        fetch: Callable[[PeerFetch], PeerFetched],
        take: Callable[[PeerJournal], None],
        node: str,
        send: Send,
    ) -> None:
        self._fetch = fetch
        self._take = take
        self._node = node
        self._send = send

    def received(self, data: bytes) -> None:
        message = decode(data)
        match message:
            case PeerFetch():
                self._send(encode(self._fetch(message)))
            case PeerJournal():
                self._take(message)
                self._send(encode(PeerWelcome(node=self._node)))
            case _:
                raise WireError(f"{type(message).__name__} is nothing that agents ask each other")

    def closed(self) -> None:
        pass

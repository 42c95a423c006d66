"""One worker's connection to a generation's store: requests in, answers out as they can be given.

The same for a worker of this node (Unix socket) and of another (TCP). A blocked `get` does not hold up the
next request; the connection's end gives up what still waits.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.agent.store import GenerationStore
from keepstep.errors import WireError
from keepstep.wire.codec import decode
from keepstep.wire.messages import StoreReply, StoreRequest


class StoreSession:
    """`send` takes each answer."""

    def __init__(self, store: GenerationStore, send: Callable[[StoreReply], None]) -> None:
        self._store = store
        self._send = send
        self._waiting: dict[int, Callable[[], None]] = {}

    def received(self, data: bytes) -> None:
        """One frame. Raises WireError for what does not belong on a store's connection."""
        request = decode(data)
        if not isinstance(request, StoreRequest):
            raise WireError(f"{type(request).__name__} does not belong on a store connection")
        if request.request in self._waiting:
            raise WireError(f"store request {request.request} is still unanswered")
        give_up = self._store.serve(request, self._answer)
        if give_up is not None:
            self._waiting[request.request] = give_up

    def closed(self) -> None:
        """Nobody is left to be answered."""
        for give_up in self._waiting.values():
            give_up()
        self._waiting.clear()

    def _answer(self, reply: StoreReply) -> None:
        self._waiting.pop(reply.request, None)
        self._send(reply)

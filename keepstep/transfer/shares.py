"""Which stripes are still to come, and from whom: shared by the threads of one copy, one per source.

Every stripe is in exactly one place: queued for a source, in flight from it, or arrived. An idle source
takes work from the one with most left, so that a slow or late source delays nobody.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from keepstep.core.transfer_plan import Stripe, replan

MAX_SPOILT = 3  # chunks with a wrong checksum until a source is no longer trusted


class Shares:
    """Thread-safe. Ends when all has arrived, when no source is left, or by `stop`."""

    def __init__(self, stripes: Sequence[Stripe], sources: Sequence[int]) -> None:
        self._changed = threading.Condition()
        self._queues: dict[int, deque[Stripe]] = {source: deque() for source in sources}
        self._in_flight: dict[int, list[Stripe]] = {source: [] for source in sources}
        self._spoilt = dict.fromkeys(sources, 0)
        self._left = len(stripes)
        self._stopped = False
        self.arrived_bytes = dict.fromkeys(sources, 0)
        self.failures: dict[int, str] = {}
        self.replanned = 0
        for stripe in stripes:
            self._queues[stripe.source].append(stripe)

    @property
    def complete(self) -> bool:
        """Everything has arrived."""
        return self._left == 0

    @property
    def over(self) -> bool:
        """Nothing more will arrive."""
        return self._stopped or self._left == 0 or not self._queues

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is over, at most so long; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.over, timeout=timeout_s)

    def stop(self) -> None:
        """Hand out nothing more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def take(self, source: int, *, wait: bool) -> Stripe | None:
        """The next stripe to ask `source` for. None: it is over, or (not `wait`) nothing is queued now."""
        with self._changed:
            while not self.over and source in self._queues:
                stripe = self._pop(source)
                if stripe is not None:
                    self._in_flight[source].append(stripe)
                    return stripe
                if not wait:
                    return None
                self._changed.wait()
            return None

    def arrived(self, source: int, stripe: Stripe) -> None:
        """The stripe is in place, its checksum right."""
        with self._changed:
            self._in_flight[source].remove(stripe)
            self.arrived_bytes[source] += stripe.length
            self._left -= 1
            if self._left == 0:
                self._changed.notify_all()

    def spoilt(self, source: int, stripe: Stripe) -> bool:
        """The stripe came with a wrong checksum: it is to come again. False: `source` is to be given up."""
        with self._changed:
            self._in_flight[source].remove(stripe)
            self._spoilt[source] += 1
            others = [other for other in self._queues if other != source]
            self._queues[others[0] if others else source].appendleft(stripe)
            self._changed.notify_all()
            return self._spoilt[source] < MAX_SPOILT

    def lost(self, source: int, reason: str) -> None:
        """The source sends no more: what it still owed goes to the others. After the end: no news."""
        with self._changed:
            if source not in self._queues or self._stopped:
                return
            owed = [*self._in_flight.pop(source), *self._queues.pop(source)]
            self.failures[source] = reason
            if owed and self._queues:
                queued = [
                    Stripe(other, stripe.piece, stripe.offset, stripe.length)
                    for other, queue in self._queues.items()
                    for stripe in queue
                ]
                for queue in self._queues.values():
                    queue.clear()
                for stripe in replan(queued + owed, list(self._queues)):
                    self._queues[stripe.source].append(stripe)
                self.replanned += len(owed)
            self._changed.notify_all()

    def _pop(self, source: int) -> Stripe | None:
        if self._queues[source]:
            return self._queues[source].popleft()
        richest = max(self._queues.values(), key=len)
        return richest.pop() if richest else None

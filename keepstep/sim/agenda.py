"""Virtual time: what is to happen when, in an order that the seed alone decides."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Errand = Callable[[], None]


class Agenda:
    """A queue of errands by time; equal times run in the order of their entry."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Errand]] = []
        self._entries = 0

    def at(self, time_s: float, errand: Errand) -> None:
        self._entries += 1
        heapq.heappush(self._queue, (max(time_s, self.now_s), self._entries, errand))

    def after(self, delay_s: float, errand: Errand) -> None:
        self.at(self.now_s + delay_s, errand)

    def run_next(self) -> bool:
        """Run the earliest errand; False when there is none."""
        if not self._queue:
            return False
        self.now_s, _, errand = heapq.heappop(self._queue)
        errand()
        return True


class Channel:
    """Messages of one sender to one receiver: delayed at random, never out of order."""

    __slots__ = ("_agenda", "_last_s")

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._last_s = 0.0

    def send(self, delay_s: float, errand: Errand) -> None:
        self._last_s = max(self._last_s, self._agenda.now_s + delay_s)
        self._agenda.at(self._last_s, errand)

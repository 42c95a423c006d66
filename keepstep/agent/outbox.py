"""Events on their way to the controller: bounded, and what matters is never dropped for want of room.

A newer progress of the node takes in its older one; when the box is full the oldest progress goes
first, then the oldest event that only informs. Exits, complaints and failures always stay.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from dataclasses import replace

from keepstep.core.events import (
    Event,
    FingerprintTaken,
    NodeProgressed,
    Resumed,
    StateReceived,
    VerdictReached,
    WorkerExited,
)
from keepstep.core.together import alike, joined
from keepstep.wire.messages import Answer

LIMIT = 10_000
JOIN_S = 0.005  # ranks of one node come back from a failure together
_INFORM = (Answer, FingerprintTaken, Resumed, StateReceived, VerdictReached)


class Outbox:
    """First in, first out. `dropped`: how many events had to go."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.dropped = 0
        self._limit = limit
        self._events: OrderedDict[int, Event | Answer] = OrderedDict()
        self._progress: int | None = None  # the ticket of the one progress that waits
        self._next = 0
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Event | Answer) -> None:
        if isinstance(event, NodeProgressed):
            event = self._with_older(event)
            self._progress = self._next
        self._events[self._next] = event
        self._next += 1
        if len(self._events) > self._limit:
            self._make_room()
        self._filled.set()

    def exits(self) -> set[int]:
        """Workers whose end still waits to be told."""
        return {event.worker for event in self._events.values() if isinstance(event, WorkerExited)}

    async def first(self) -> tuple[int, Event | Answer]:
        """The oldest event and its ticket, when there is one; it stays until `done(ticket)`."""
        while not self._events:
            self._filled.clear()
            await self._filled.wait()
        return next(iter(self._events.items()))

    async def next(self, node: str, others_s: float = JOIN_S) -> tuple[list[int], Event | Answer]:
        """The oldest event, as one with those behind it that say the same of other workers.

        For these it waits `others_s` at most, and never while something else waits.
        """
        ticket, event = await self.first()
        kind = alike(event)
        if kind is None:
            return [ticket], event
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(others_s):
                while all(alike(other) == kind for other in self._events.values()):
                    self._filled.clear()
                    await self._filled.wait()
        tickets, events = [], []
        for ticket, event in self._events.items():
            if isinstance(event, Answer) or alike(event) != kind:
                break
            tickets.append(ticket)
            events.append(event)
        return tickets, joined(node, events)

    def done(self, *tickets: int) -> None:
        """These events were sent."""
        for ticket in tickets:
            self._forget(ticket)

    def _with_older(self, event: NodeProgressed) -> NodeProgressed:
        """The newer progress with what only the waiting older one says."""
        if self._progress is None:
            return event
        older = self._events[self._progress]
        assert isinstance(older, NodeProgressed)
        self._forget(self._progress)
        if older.generation != event.generation:
            return event
        return replace(event, steps={**older.steps, **event.steps})

    def _make_room(self) -> None:
        victim = self._progress
        if victim is None:
            victim = next(
                (ticket for ticket, event in self._events.items() if isinstance(event, _INFORM)), None
            )
        if victim is not None:
            self._forget(victim)
            self.dropped += 1

    def _forget(self, ticket: int | None) -> None:
        event = None if ticket is None else self._events.pop(ticket, None)
        if isinstance(event, NodeProgressed) and self._progress == ticket:
            self._progress = None

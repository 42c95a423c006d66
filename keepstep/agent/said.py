"""What workers said last, kept for a controller that may not have heard it: told again when it is back.

A message that was on its way when the connection broke is lost, and nobody knows which. So the newest of
each kind and worker is kept, and said again in the old order; the controller hears some things twice.
"""

from __future__ import annotations

from collections import OrderedDict

from keepstep.core.events import (
    Complained,
    Event,
    Resumed,
    ScriptFailed,
    StateReceived,
    UsageRefused,
    VerdictReached,
)
from keepstep.wire.messages import TOLD_AGAIN

_OF_A_GENERATION = (Complained, Resumed, StateReceived, VerdictReached)


# What still matters when the worker has ended, and of how many such workers it is kept.
_LAST_WORDS = (ScriptFailed, UsageRefused)
_KEPT_OF_THE_DEAD = 64


class Said:
    """At most one event of each kind and worker."""

    def __init__(self) -> None:
        self._events: OrderedDict[tuple[int, type], Event] = OrderedDict()

    def note(self, event: Event) -> None:
        """Keep an event of a worker, if its loss would matter."""
        if isinstance(event, TOLD_AGAIN):
            key = (event.worker, type(event))
            self._events[key] = event
            self._events.move_to_end(key)

    def again(self, generation: int | None) -> list[Event]:
        """What to repeat, oldest first: of a generation's events only those of the newest."""
        return [
            event
            for event in self._events.values()
            if not isinstance(event, _OF_A_GENERATION) or event.generation == generation
        ]

    def ended(self, worker: int) -> None:
        """A worker is gone: only why it failed still matters."""
        for key in [key for key in self._events if key[0] == worker]:
            if not issubclass(key[1], _LAST_WORDS):
                del self._events[key]
        for key in [key for key in self._events if issubclass(key[1], _LAST_WORDS)][:-_KEPT_OF_THE_DEAD]:
            del self._events[key]

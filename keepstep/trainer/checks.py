"""Checks of this rank on itself: what fails is told to the controller, which ends protection, never training.

It does not know what a failing check means for the job: see `keepstep.core.protection`.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep.core.events import SelfCheckFailed, SelfCheckPassed

# How often a check must have held in a row before it is believed again.
HELD_BEFORE_PASSED = 10


class Checks:
    """What fails at this moment. `send` takes the event for the controller, `say` one line for the log."""

    def __init__(
        self,
        worker: int,
        send: Callable[[SelfCheckFailed | SelfCheckPassed], object],
        say: Callable[[str], None],
    ) -> None:
        self._worker = worker
        self._send = send
        self._say = say
        self._held: dict[str, int] = {}  # check that fails -> how often it held since

    @property
    def failing(self) -> bool:
        return bool(self._held)

    def failed(self, check: str, reason: str, step: int) -> None:
        """Told once, until it passes."""
        if check not in self._held:
            self._say(f"not protected any more: {reason}")
            self._send(SelfCheckFailed(worker=self._worker, check=check, reason=reason, step=step))
        self._held[check] = 0

    def held(self, check: str) -> None:
        """It held this time; call only while something fails."""
        if check not in self._held:
            return
        self._held[check] += 1
        if self._held[check] >= HELD_BEFORE_PASSED:
            del self._held[check]
            self._say(f"its {check} is kept again")
            self._send(SelfCheckPassed(worker=self._worker, check=check))

"""What a spare's loop serves before it plays a rank: steps in the sandbox, then the one in which it follows a source."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from keepstep.errors import StepInterrupted
from keepstep.trainer.data import Cursor
from keepstep.trainer.shadow import Shadow
from keepstep.trainer.step import Step

if TYPE_CHECKING:
    from keepstep.trainer.loop import Loop

REHEARSED_STEPS = 2  # DDP broadcasts its bucket order in the second iteration: one is not enough


class Rehearsal:
    """The sandbox's steps. `become_rank`: park until there is a rank; False: first follow its living player."""

    def __init__(
        self, loop: Loop, cursor: Cursor | None, become_rank: Callable[[Cursor | None], bool]
    ) -> None:
        self._loop = loop
        self._cursor = cursor
        self._become_rank = become_rank
        self._shadow = Shadow(loop.session)
        self._done = 0
        self._micro = 0
        self._step: Step | None = None

    def next_step(self) -> Step | None:
        """The next step of the sandbox; None once the worker plays a rank."""
        self._shadow.conclude()
        while self._done >= REHEARSED_STEPS and not self._shadow.due:
            self._micro = 0
            if self._cursor is not None:
                self._cursor.restart()
            self._loop.reports.drop()
            if self._become_rank(self._cursor):
                self._shadow.settle(self._loop)
                return None
        batch = None
        if self._cursor is not None:
            try:
                batch = self._cursor.next_batch()
            except StopIteration:
                self._cursor.restart()
                batch = self._cursor.next_batch()
        micro = self._micro
        self._micro += 1
        self._step = Step(self._loop, number=self._done, micro=micro, index=micro, batch=batch)
        return self._step

    def at_gate(self) -> None:
        """In the step that follows a source: its gradients come in here. Raises StepInterrupted."""
        assert self._step is not None
        if self._done >= REHEARSED_STEPS and not self._shadow.stand_in(self._step):
            raise StepInterrupted("this worker was given a rank meanwhile")

    def committed(self) -> None:
        """A block with an update has ended."""
        self._done += 1
        self._micro = 0

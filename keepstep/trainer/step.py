"""What the script holds of one step: the block, and the aside before it.

`with step as batch:` swallows an interrupted step, and the loop serves the same batch again. An
exception of the user's own code passes through in a healthy step, and is swallowed in a poisoned
one, where forward and backward run on rubbish.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from keepstep.errors import StepInterrupted, UsageError
from keepstep.trainer.elastic import Place
from keepstep.wire.page import Phase

if TYPE_CHECKING:
    from keepstep.trainer.loop import Loop


class Step:
    """One iteration. `number`: index of the update under way; `micro`: of the batch within it;
    `index`: of the batch within the training. All of them survive failures, unlike enumerate()."""

    def __init__(self, loop: Loop, *, number: int, micro: int, index: int, batch: Any) -> None:
        self._loop = loop
        self.number = number
        self.micro = micro
        self.index = index
        self.batch = batch
        self._entered = False

    def aside(self) -> Aside:
        """For evaluation, reductions for logs and checkpoints, before the block: served again after a
        failure, together with the step."""
        return Aside(self._loop)

    def __enter__(self) -> Any:
        if self._entered:
            raise UsageError("`with step:` twice in one iteration: take the next step from run.steps().")
        self._entered = True
        self._loop.enter_block()
        return self.batch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._loop.leave_block(error)


class Aside:
    """Collectives in here raise while the job recovers; the aside swallows that."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def __enter__(self) -> None:
        loop = self._loop
        if loop.in_block:
            raise UsageError("step.aside() inside `with step:`: it stands before the block.")
        if loop.session.rehearsing:
            return
        loop.session.page.enter(Phase.ASIDE)
        loop.session.groups.settle(place=Place.ASIDE)
        loop.session.faults.at("aside")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._loop.session.rehearsing:
            return False
        groups = self._loop.session.groups
        groups.settle(place=Place.OUTSIDE)
        if error is None or isinstance(error, StepInterrupted):
            return True
        if isinstance(error, Exception) and (groups.poisoned or groups.find_failure() is not None):
            groups.poison(f"aside: {error}")
            return True
        return False

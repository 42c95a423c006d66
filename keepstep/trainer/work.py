"""Handles of collectives: the guarded one, whose failure poisons instead of raising, and the done one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from keepstep.trainer.elastic import ElasticGroup

_Work = dist.distributed_c10d.Work


class DoneWork(_Work):
    """A collective that was answered on the spot (rehearsal, or a poisoned step)."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class GuardedWork(_Work):
    """A running collective of the inner group. `wait()` never raises in a step: it poisons."""

    def __init__(
        self,
        work: Any,
        group: ElasticGroup,
        name: str,
        arguments: tuple[Any, ...],
        journalled: bool,
        place: int = 0,
    ) -> None:
        super().__init__()
        self._work = work
        self._group = group
        self._name = name
        self._arguments: tuple[Any, ...] = arguments
        self._journalled = journalled
        self._place = place  # in the group's ring

    def wait(self, timeout: Any = None) -> bool:
        work = self._work
        if work is None:
            return True
        try:
            work.wait()
        except Exception as error:
            self._settle_failed(error)
        else:
            if (ring := self._group.ring) is not None:
                ring.ended(self._place)
            if self._journalled:
                self._group.keep_in_journal(self._name, self._arguments)
        self._forget()
        return True

    def _settle_failed(self, error: Exception) -> None:
        arguments = self._arguments
        self._forget()
        self._group.noted_failure(self._place)
        self._group.collective_failed(self._name, arguments, error)

    def _forget(self) -> None:
        # Tensors must not live longer than the collective: FSDP counts on their memory.
        self._work = None
        self._arguments = ()

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())

    def is_success(self) -> bool:
        return self.failure() is None

    def get_future(self) -> Any:
        """The inner group's own future: no Python runs on gloo's thread. When it fails, DDP raises
        out of backward; the step's block swallows that and DDP is reset."""
        if self._work is None:
            done: torch.futures.Future[Any] = torch.futures.Future()
            done.set_result(None)
            return done
        return self._work.get_future()

    # ---- for the registry: nothing of these raises or answers --------------------------------

    def failure(self) -> str | None:
        """Why it failed, when it has ended in failure; None while it runs or when it succeeded."""
        work = self._work
        if work is None or not work.is_completed():
            return None
        try:
            work.wait()
        except Exception as error:
            self._group.noted_failure(self._place)
            return f"{self._name}: {error}"
        if (ring := self._group.ring) is not None:
            ring.ended(self._place)
        return None

    def drain(self) -> None:
        """Wait for the end of a cut collective, whatever it is."""
        work = self._work
        self._forget()
        if work is not None:
            try:
                work.wait()
            except Exception:
                pass

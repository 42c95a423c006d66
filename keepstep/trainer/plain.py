"""The same script without Keepstep: under torchrun, plain python, or KEEPSTEP_DISABLE=1.

Nothing is protected and nothing changes: the loop serves batches, the blocks let exceptions pass.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook


def start(backend: str | None, reason: str) -> None:
    """Initialise torch.distributed as torchrun's environment says, or alone; says once that it is unprotected."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend or "gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_rank() == 0:
        sys.stderr.write(f"keepstep: {reason}: the script runs unprotected.\n")
        sys.stderr.flush()


class PlainStep:
    """One iteration of an unprotected loop."""

    def __init__(self, number: int, micro: int, index: int, batch: Any) -> None:
        self.number = number
        self.micro = micro
        self.index = index
        self.batch = batch

    def aside(self) -> AbstractContextManager[None]:
        """Nothing has to be repeated here."""
        return nullcontext()

    def __enter__(self) -> Any:
        return self.batch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Exceptions pass."""


class PlainLoop:
    """Counts updates through the same optimizer hook, so that step.number and `until` mean the same."""

    def __init__(self, loader: Any, epochs: int | None, until: int | None) -> None:
        self._batches = self._walk(loader, epochs)
        self._until = until
        self._updates = 0
        self._seen = 0
        self._micro = 0
        self._index = 0
        self._in_iteration = False
        self._hook = register_optimizer_step_post_hook(self._after_update)

    def _walk(self, loader: Any, epochs: int | None) -> Iterator[Any]:
        epoch = 0
        while epochs is None or epoch < epochs:
            if loader is None:
                yield None
                continue
            set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
            yield from loader
            epoch += 1

    def _after_update(self, *_: Any) -> None:
        self._updates += 1

    def __iter__(self) -> Iterator[PlainStep]:
        number = 0
        while self._until is None or number < self._until:
            try:
                batch = next(self._batches)
            except StopIteration:
                break
            before = self._updates
            yield PlainStep(number, self._micro, self._index, batch)
            self._index += 1
            if self._updates > before:
                number, self._micro = number + 1, 0
            else:
                self._micro += 1
        self._hook.remove()

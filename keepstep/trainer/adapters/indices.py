"""The indices of one epoch: passed on as the loader's sampler makes them, after a skip, and watched.

A running digest (`trail`) tells whether a sampler repeats itself; random draws amid the iteration are
refused, since they would mix with those of training. Data is never touched here.
"""

from __future__ import annotations

import collections
import zlib
from collections.abc import Iterator
from typing import Any

from keepstep.errors import UsageError
from keepstep.trainer.adapters import rng
from keepstep.trainer.adapters.loader_workers import SeededIndices

_WATCHED_BATCHES = 8  # how many batches of an epoch are checked for random draws by the sampler
_TRAIL_MASK = 2**63 - 1


class _Indices:
    """One pass of the loader's own (batch) sampler, which can first skip what was already served."""

    def __init__(self, source: IndexSource, inner: Iterator[Any], skip: int) -> None:
        self._source = source
        self._inner = inner
        self._skip = skip
        self._drawn = 0
        self._trail = 0

    def __iter__(self) -> _Indices:
        return self

    def __next__(self) -> Any:
        self.prime()
        if self._source.last_allowed is not None and self._drawn > self._source.last_allowed:
            raise StopIteration  # PyTorch's prefetch takes it for "nothing now" and asks again later
        indices = self._next_inner()
        self._source.trails.append(self._trail)
        return self._source.dressed(indices, self._drawn - 1)

    def prime(self) -> None:
        """Make the skip now (idempotent). Raises UsageError when the sampler ends before it."""
        skip, self._skip = self._skip, 0
        for done in range(skip):
            try:
                self._next_inner()
            except StopIteration:
                raise UsageError(
                    f"the sampler ended after {done} batches, but {skip} of this epoch were already served: "
                    "dataset and sampler must be the same in every process"
                ) from None
        if skip:
            self._source.check_trail(self._trail)

    def _next_inner(self) -> Any:
        watched = self._drawn > 0 and self._source.still_watched(self._drawn)
        before = rng.capture() if watched else b""
        indices = next(self._inner)
        self._drawn += 1
        self._trail = _extended(self._trail, indices)
        if watched and rng.capture() != before:
            raise UsageError(
                f"sampler {self._source.name} draws from the global random generator while it is "
                "iterated, mixed with the draws of training, so its order cannot be repeated after a failure: "
                "draw once at the start of its __iter__, or give it a torch.Generator of its own"
            )
        return indices


class IndexSource:
    """Stands in for the loader's (batch) sampler. `trails` holds one digest per batch not yet served."""

    def __init__(self, sampler: Any, name: str) -> None:
        self.sampler = sampler
        self.name = name  # for messages: the innermost sampler, which decides the order
        self.current: _Indices | None = None
        self.skip = 0
        self.expected_trail: int | None = None
        self.idle_iters = 0  # calls of iter() that the undisturbed run did not make
        self.fixed_seed: int | None = None
        self.seed: int | None = None  # of the batches' tags; None: no worker processes, no tags
        self.epoch = 0
        self.trails: collections.deque[int] = collections.deque()
        self.last_allowed: int | None = None  # no index beyond this batch is handed out yet
        self._watch_until = _WATCHED_BATCHES

    def __iter__(self) -> Iterator[Any]:
        if self.idle_iters:
            self.idle_iters -= 1
            return iter(())
        self.trails.clear()
        self.current = _Indices(self, iter(self.sampler), self.skip)
        return self.current

    def __len__(self) -> int:
        return len(self.sampler)

    def still_watched(self, drawn: int) -> bool:
        if drawn > self._watch_until:
            self._watch_until = 0
            return False
        return True

    def seed_drawn(self, seed: int) -> None:
        self.seed = seed if self.fixed_seed is None else self.fixed_seed

    def dressed(self, indices: Any, batch: int) -> Any:
        return indices if self.seed is None else SeededIndices(self.seed, self.epoch, batch, indices)

    def check_trail(self, trail: int) -> None:
        if self.expected_trail is not None and trail != self.expected_trail:
            raise UsageError(
                f"sampler {self.name} did not repeat its order of epoch {self.epoch} after a failure: "
                "it must depend on nothing but its arguments, set_epoch() and random generators that are seeded alike"
            )


def _extended(trail: int, indices: Any) -> int:
    """A running digest of the indices served in this epoch; ints hash alike in every process."""
    if type(indices) is list and indices and type(indices[0]) is int:
        return hash((trail, tuple(indices))) & _TRAIL_MASK
    if type(indices) is int:
        return hash((trail, indices)) & _TRAIL_MASK
    return hash((trail, zlib.crc32(repr(indices).encode()))) & _TRAIL_MASK

"""A cursor over a DataLoader that another process can take over in mid-epoch.

It serves what `for batch in loader` would, epoch after epoch, and can stand at any batch again: the
samplers run from the epoch's start with the random state of that moment, skipping indices, not data.
It does not know steps, ranks' records or who restores the current random state: the session does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from keepstep.errors import UsageError
from keepstep.trainer.adapters import rng
from keepstep.trainer.adapters.batches import clone, mutated, snapshot_versions
from keepstep.trainer.adapters.indices import IndexSource
from keepstep.trainer.adapters.loader_workers import (
    LoaderWorkerDeath,
    WatchedIterator,
    children_ended,
    take_over_sigchld,
)
from keepstep.trainer.adapters.samplers import (
    lone_sampler_warning,
    own_generators,
    sampler_chain,
    set_epoch,
    set_sampler_rank,
)

__all__ = ["Cursor", "clone", "mutated", "snapshot_versions"]

MAX_REBUILDS = 3  # of one batch, after deaths of loader workers


class Cursor:
    """Serves the batches of `epochs` passes over a map-style DataLoader (None: without end).

    `on_worker_death` is told in one sentence when a loader worker died and was replaced.
    Raises UsageError for data that cannot be served again by another process.
    """

    def __init__(
        self, loader: Any, epochs: int | None = 1, *, on_worker_death: Callable[[str], None] | None = None
    ) -> None:
        _refuse_unrepeatable(loader)
        self.loader = loader
        self.epochs = epochs
        self.epoch = 0
        self.batch = 0
        self.batches_served = 0
        self._on_worker_death = on_worker_death or (lambda text: None)
        self._samplers = sampler_chain(loader)
        _refuse_one_shot(self._samplers)
        self._generators = own_generators(loader, self._samplers)
        self._initial = rng.capture_each(self._generators)
        self._source = IndexSource(loader._index_sampler, type((self._samplers or [loader])[-1]).__name__)
        self._view = self._made_view()
        self._iterator: Any = None
        self._started = False  # the iterator of `epoch` was made (its random draws have happened)
        self._origin = b""  # random state at the epoch's start, before iter()
        self._trail = 0
        self._seed: int | None = None
        self._seed_is_older = False  # persistent workers: no seed was drawn at this epoch's start
        self._deaths_seen = children_ended()

    @property
    def batches_per_epoch(self) -> int | None:
        """Length of one epoch in batches; None when the sampler has no length."""
        try:
            return len(self._source)
        except TypeError:
            return None

    # ---- serving --------------------------------------------------------------------------------

    def next_batch(self) -> Any:
        """The next batch. Raises StopIteration after the last epoch; waits as long as the loader does."""
        rebuilds = 0
        while True:
            try:
                if not self._started:
                    self._start_epoch()
                batch = self._fetch()
            except StopIteration:
                if self._ended():
                    raise
                self._end_epoch()
                continue
            except LoaderWorkerDeath as death:
                rebuilds += 1
                if rebuilds > MAX_REBUILDS:
                    self.close()
                    self._source.last_allowed = None
                    raise
                self._on_worker_death(f"{death}; its batches are loaded again, from batch {self.batch} on")
                self._rebuild_in_place()
                continue
            if rebuilds:
                self._prefetch_again()
            self._trail = self._source.trails.popleft()
            self.batch += 1
            self.batches_served += 1
            return batch

    def _ended(self) -> bool:
        return self.epochs is not None and self.epoch >= self.epochs

    def _fetch(self) -> Any:
        if self._deaths_seen != children_ended() and isinstance(self._iterator, WatchedIterator):
            self._deaths_seen = children_ended()
            self._iterator.raise_if_dead()
        return next(self._iterator)

    def _start_epoch(self) -> None:
        if self._ended():
            raise StopIteration
        set_epoch(self._samplers, self.epoch)
        self._origin = rng.capture(self._generators)
        self._trail = 0
        self._source.skip = 0
        self._source.expected_trail = None
        self._seed_is_older = self._view.persistent_workers and self._seed is not None
        self._make_iterator()
        self._started = True

    def _end_epoch(self) -> None:
        if self.batch == 0:
            raise UsageError(
                "the data loader yields no batch at all: is the dataset empty, or drop_last too strict?"
            )
        self.epoch += 1
        self.batch = 0
        self._started = False
        if self._view._iterator is None:
            self._iterator = None

    # ---- standing somewhere again ---------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Where the cursor stands: ints, bools and bytes; under 10 us without generators of the loader's own."""
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "served": self.batches_served,
            "started": self._started,
            "seed": self._seed,
            "seed_is_older": self._seed_is_older,
            "trail": self._trail,
            "origin": self._origin,
            "generators": rng.capture_each(self._generators),
        }

    def restore(self, state: Mapping[str, Any], *, verify: bool = True) -> None:
        """Stand where `state` was taken, without loading what was served before.

        Leaves the global random state at the sampler's: restore the current one afterwards.
        `verify=False` accepts the state of another rank (when no record of the own one exists).
        Raises UsageError when the samplers do not repeat their order.
        """
        self.close()
        self.epoch, self.batch = state["epoch"], state["batch"]
        self.batches_served = state["served"]
        self._origin = state["origin"]
        self._seed, self._seed_is_older = state["seed"], state["seed_is_older"]
        self._trail = state["trail"]
        self._started = state["started"]
        if self._started:
            self._rebuild(verify)
        # Others may draw from the loader's generators too: what they hold now is not only the samplers' doing.
        rng.restore_each(state["generators"], self._generators)

    def restart(self) -> None:
        """Begin anew, as if nothing had been served (after a rehearsal); leaves global random state alone."""
        self.close()
        self.epoch = self.batch = self.batches_served = self._trail = 0
        self._seed, self._origin = None, b""
        rng.restore_each(self._initial, self._generators)

    def set_rank(self, old: int, new: int, world: int) -> None:
        """Make the samplers serve rank `new`'s part; then `restore()`, or the cursor begins anew.

        Raises UsageError when a sampler's share cannot be told from the rank.
        """
        set_sampler_rank(self._samplers, old, new, world)
        self.restart()

    def warnings(self, world_size: int) -> tuple[str, ...]:
        """What looks wrong but is allowed, one sentence each."""
        text = lone_sampler_warning(self._samplers, world_size)
        return (text,) if text else ()

    def close(self) -> None:
        """End the loader's workers at once; idempotent. The next use begins with new ones."""
        if isinstance(self._iterator, WatchedIterator):
            self._iterator.discard()
        self._iterator = None
        self._view._iterator = None
        self._started = False

    def _rebuild(self, verify: bool) -> None:
        """Make the iterator of the current epoch anew, `batch` batches in. Changes all random states."""
        set_epoch(self._samplers, self.epoch)
        rng.restore(self._origin, self._generators)
        self._source.skip = self.batch
        self._source.expected_trail = self._trail if verify else None
        self._make_iterator()
        if self._source.current is not None:
            self._source.current.prime()  # without worker processes nothing else asks before the next fetch
        self._source.skip = 0
        self._started = True

    def _rebuild_in_place(self) -> None:
        """Rebuild in the middle of a step; what the epoch's start draws is drawn only there."""
        started, current = self._started, rng.capture(self._generators)
        self.close()
        # One batch at a time, so that a sample that kills its worker is charged to its own batch.
        self._source.last_allowed = self.batch
        self._rebuild(verify=True)
        if started:
            rng.restore(current, self._generators)

    def _prefetch_again(self) -> None:
        self._source.last_allowed = None
        iterator = self._iterator
        ahead = iterator._send_idx - iterator._rcvd_idx
        for _ in range(iterator._prefetch_factor * iterator._num_workers - ahead):
            iterator._try_put_index()

    def _make_iterator(self) -> None:
        """One `iter(loader)`, with exactly the random draws that the undisturbed run made at this point."""
        view, source = self._view, self._source
        source.current = None
        source.epoch = self.epoch
        if view.num_workers == 0:
            self._iterator = iter(view)
            return
        take_over_sigchld()
        self._deaths_seen = children_ended()
        generator = view.generator
        if self._seed_is_older and view._iterator is None:
            # Persistent workers were started in an earlier epoch, and their seed drawn there; and
            # PyTorch asks the sampler twice when it starts them, once when it keeps them.
            source.idle_iters = 1
            view.generator = torch.Generator()
        source.fixed_seed = self._seed if view.persistent_workers else None
        try:
            self._iterator = iter(view)
        finally:
            view.generator = generator
        self._seed = source.seed

    def _made_view(self) -> Any:
        """The user's loader with our index source: it shares everything else, and the user's stays as it is."""
        view = copy.copy(self.loader)
        name = "batch_sampler" if self.loader.batch_sampler is not None else "sampler"
        view.__dict__[name] = self._source
        view.__dict__["_iterator"] = None
        if self.loader.num_workers > 0:
            view.__dict__["_get_iterator"] = lambda: WatchedIterator(view)
        return view


def _refuse_unrepeatable(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"run.steps() got a {type(loader).__name__}, of which a replacement could not find its place: "
            "pass a torch.utils.data.DataLoader over a map-style dataset, or write run.steps(until=N) and make "
            "the batch from step.index inside the block"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            f"dataset {type(loader.dataset).__name__} is iterable-style: its place cannot be found again without "
            "reading everything before it; use a map-style dataset (__getitem__ and __len__)"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"{type(loader).__name__} makes iterators of its own: pass the plain torch DataLoader, and move "
            "what its __iter__ adds into the step or the collate_fn"
        )
    if loader.num_workers > 0 and not loader.in_order:
        raise UsageError(
            "a DataLoader with in_order=False serves its batches in an order of chance: leave it out"
        )


def _refuse_one_shot(samplers: list[Any]) -> None:
    for sampler in samplers:
        if hasattr(sampler, "__next__"):
            raise UsageError(
                f"the loader's sampler is a {type(sampler).__name__}, which can be read only once: "
                "pass an object whose __iter__ starts anew"
            )

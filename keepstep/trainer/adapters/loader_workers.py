"""Loader worker processes: their death is noticed by whoever waits for their data, nowhere else.

PyTorch's SIGCHLD handler raises in the main thread, wherever the user's code then stands: in
backward, in the optimizer. Here the handler only counts; the one place where it raises is the read
that would otherwise wait for the dead. Batches travel with their seed, so that augmentation in a
worker process can be repeated by any other one.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

_PINNED_POLL_S = 0.05  # a pinning thread's queue has no file descriptor to wait on
_JOIN_S = 1.0
_DEATH_GRACE_S = 5.0  # from a broken read to the end of the process that broke it, on a busy machine


class LoaderWorkerDeath(RuntimeError):  # noqa: N818 - an event, told as an exception
    """A loader worker ended by itself; the message is the one that PyTorch would have raised."""


class _Watch:
    """What the SIGCHLD handler knows: how many children ended, and who waits for data right now."""

    def __init__(self) -> None:
        self.children_ended = 0
        self.receiving: WatchedIterator | None = None
        self.installed = False


_watch = _Watch()


def children_ended() -> int:
    """How many SIGCHLDs came so far: compare with an earlier value to see whether to look closer."""
    return _watch.children_ended


def take_over_sigchld() -> None:
    """Replace PyTorch's SIGCHLD handler, and keep it from being set later; other handlers still run.

    Does nothing outside the main thread (PyTorch's own does not either).
    """
    if threading.current_thread() is not threading.main_thread():
        return
    current = signal.getsignal(signal.SIGCHLD)
    if _watch.installed and getattr(current, "_keepstep", False):
        return
    previous = _beneath_torch(current)

    def count_child(signum: int, frame: Any) -> None:
        _watch.children_ended += 1
        if callable(previous):
            previous(signum, frame)
        iterator = _watch.receiving
        if iterator is not None:
            iterator.raise_if_dead()

    count_child._keepstep = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGCHLD, count_child)
    _utils.signal_handling._SIGCHLD_handler_set = True
    _watch.installed = True


def _beneath_torch(handler: Any) -> Any:
    """The handler that PyTorch's own wraps, or `handler` itself when it is not PyTorch's."""
    if getattr(handler, "__module__", None) != _utils.signal_handling.__name__:
        return handler
    for cell in getattr(handler, "__closure__", None) or ():
        return cell.cell_contents
    return None


class SeededIndices:
    """The indices of one batch on their way to a worker: unpickling them there seeds its generators."""

    __slots__ = ("batch", "epoch", "indices", "seed")

    def __init__(self, seed: int, epoch: int, batch: int, indices: Any) -> None:
        self.seed, self.epoch, self.batch, self.indices = seed, epoch, batch, indices

    def __reduce__(self) -> Any:
        return _seed_and_unwrap, (self.seed, self.epoch, self.batch, self.indices)


def _seed_and_unwrap(seed: int, epoch: int, batch: int, indices: Any) -> Any:
    """Runs in the worker, right before the fetch of these indices."""
    mixed = hash((seed, epoch, batch)) & (2**63 - 1)  # hashes of ints are the same in every process
    torch.default_generator.manual_seed(mixed)
    random.seed(mixed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed([mixed & 0xFFFFFFFF, mixed >> 32])
    return indices


class WatchedIterator(_MultiProcessingDataLoaderIter):
    """PyTorch's iterator over worker processes; raises LoaderWorkerDeath as soon as one is gone."""

    def raise_if_dead(self) -> None:
        """Raises LoaderWorkerDeath when a worker of this iterator is gone."""
        if self._shutdown:
            return
        dead = [str(worker.pid) for worker in self._workers if not worker.is_alive()]
        if dead:
            raise LoaderWorkerDeath(f"DataLoader worker (pid(s) {', '.join(dead)}) exited unexpectedly")

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """PyTorch prefetches in here: the index source learns the seed of the batches' tags before."""
        self._index_sampler.seed_drawn(self._base_seed)
        super()._reset(loader, first_iter)

    def _try_get_data(self, timeout: float = _utils.MP_STATUS_CHECK_INTERVAL) -> Any:
        if self._pin_memory:
            return self._try_get_pinned(timeout)
        sources: list[Any] = [
            self._worker_result_queue._reader,  # type: ignore[attr-defined]
            *(worker.sentinel for worker in self._workers),
        ]
        ready = multiprocessing.connection.wait(sources, timeout)
        if ready and sources[0] not in ready:
            self.raise_if_dead()
        if not ready:
            return False, None
        try:
            with self._told_of_deaths():
                return super()._try_get_data(timeout)
        except (RuntimeError, OSError, EOFError):
            # What a dead worker sent cannot be opened any more, and its end may be seen a moment later;
            # PyTorch also replaces an exception raised inside its read by one of its own.
            multiprocessing.connection.wait(sources[1:], _DEATH_GRACE_S)
            self.raise_if_dead()
            raise

    def _try_get_pinned(self, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            got, data = super()._try_get_data(min(_PINNED_POLL_S, timeout))
            if got or time.monotonic() >= deadline:
                return got, data
            self.raise_if_dead()

    @contextlib.contextmanager
    def _told_of_deaths(self) -> Iterator[None]:
        """A worker killed in mid-write leaves half a message: only an exception ends that read."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        _watch.receiving = self
        try:
            self.raise_if_dead()
            yield
        finally:
            _watch.receiving = None

    def discard(self) -> None:
        """End the workers at once. PyTorch's own shutdown may wait for the lock of a dead one."""
        if self._shutdown:
            return
        self._shutdown = True
        _utils.signal_handling._remove_worker_pids(id(self))
        self._worker_pids_set = False
        if hasattr(self, "_pin_memory_thread"):
            self._pin_memory_thread_done_event.set()
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join(timeout=_JOIN_S)
        queues = list(self._index_queues)
        if not hasattr(self, "_pin_memory_thread"):  # else that thread may still read it, for 5 s at most
            queues.append(self._worker_result_queue)
        for queue in queues:
            queue.cancel_join_thread()
            queue.close()

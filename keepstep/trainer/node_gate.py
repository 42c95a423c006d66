"""The gate of ranks that share a node: an all-reduce (largest value) over words of their shared-memory pages.

Each rank writes one word into its own page and waits for those of the others. A word says generation,
number of the gate within it, and the value, so that one aligned store tells all of it: nobody is ever
seen half-way, and a word of an older generation passes for nothing. A rank can be one gate ahead of
another, never two, since the next gate needs everybody: two words a page, used by turns, are enough.
What a passed gate means is decided elsewhere.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Sequence

from keepstep.trainer import futex
from keepstep.wire.page import GATE_WORDS

_GENERATION_BITS, _COUNT_BITS, _VALUE_BITS = 24, 24, 16  # count and value in the half that the kernel sees
_COUNT_MASK = (1 << _COUNT_BITS) - 1
_HEAD_BYTES = mmap.PAGESIZE
# Ranks that all have a core of their own meet within this time mostly: cheaper than to fall asleep.
_SPIN_NS = 150_000
# A cut wakes the sleepers; one that was just falling asleep looks again after this time.
_NAP = futex.limit(0.01)


class _Words:
    """The gate's words of one page, mapped on their own: a page's records are nobody else's business."""

    def __init__(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(descriptor, _HEAD_BYTES)
        finally:
            os.close(descriptor)
        self._array = (ctypes.c_uint64 * (_HEAD_BYTES // 8)).from_buffer(self._map)
        self.values = memoryview(self._map).cast("Q")
        base = ctypes.addressof(self._array)
        self.addresses = tuple(base + 8 * word for word in GATE_WORDS)

    def close(self) -> None:
        self.values.release()
        del self._array
        self._map.close()


class NodeGate:
    """This rank's gate in one generation. `own`: path of its page; `others`: those of all other ranks.

    Raises OSError when a page cannot be mapped.
    """

    def __init__(self, generation: int, own: str, others: Sequence[str]) -> None:
        self._tag = generation & ((1 << _GENERATION_BITS) - 1)
        self._base = generation
        self._count = 0
        self._own = _Words(own)
        self._others = [_Words(path) for path in others]
        self._spin_ns = _SPIN_NS if len(os.sched_getaffinity(0)) > len(self._others) else 0

    def reduce(self, value: int, interrupted: Callable[[], bool]) -> int | None:
        """Contribute, wait for all; the largest contribution, or None once `interrupted()`.

        `value`: 0, or the number of a generation that comes after this one.
        """
        count = self._count = self._count + 1
        turn = count & 1
        key = (self._tag << _COUNT_BITS | (count & _COUNT_MASK)) << _VALUE_BITS
        ahead = min(value - self._base, (1 << _VALUE_BITS) - 1) if value else 0
        word = GATE_WORDS[turn]
        self._own.values[word] = key | ahead
        futex.wake(self._own.addresses[turn])

        spin_until_ns = time.monotonic_ns() + self._spin_ns
        for other in self._others:
            values = other.values
            while (seen := values[word]) >> _VALUE_BITS != key >> _VALUE_BITS:
                if interrupted():
                    return None
                if time.monotonic_ns() >= spin_until_ns:
                    futex.wait(other.addresses[turn], seen, _NAP)
            ahead = max(ahead, seen & ((1 << _VALUE_BITS) - 1))
        return self._base + ahead if ahead else 0

    def wake(self) -> None:
        """Let this rank look whether it is interrupted, wherever it sleeps. From any thread."""
        for other in self._others:
            for address in other.addresses:
                futex.wake(address)

    def close(self) -> None:
        """Unmap. Nobody may be inside `reduce`."""
        for words in (self._own, *self._others):
            words.close()

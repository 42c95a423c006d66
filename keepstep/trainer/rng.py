"""The random number generators of one process: taken and put back, bit for bit.

torch (CPU and this rank's GPU), Python's random, and numpy when the script has imported it. Taken
several times a step, so a generator that has not moved is not copied again: between two steps the
caches are full of the model's data, and little code that touches little memory is what costs little.
"""

from __future__ import annotations

import ctypes
import os
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import torch

from keepstep.trainer import values

_WORDS = 624  # of a Mersenne Twister's state, beside one position
_TWISTER_BYTES = _WORDS * 4 + 4
_OBJECT_HEAD_BYTES = object.__basicsize__
# A draw moves the position, and the last of a block makes all words anew: the position and the first words tell
# every state that a program can come to by drawing or seeding.
_LOOKED_AT_BYTES = 64
# torch's CPU generator: seed, words left, seeded, next word, the words, and the half of a Gaussian pair that is
# held back, as float and as double, each with a flag (CPUGeneratorImpl.h, MT19937RNGEngine.h).
_BEFORE_WORDS_BYTES, _AFTER_WORDS_BYTES = 20, 28
_SEARCHED_BYTES = 1024
_LEGACY_WORDS_AT = 24  # in get_rng_state()'s bytes, 8 each


def _packed(part: Any) -> bytes:
    if isinstance(part, torch.Tensor):
        return ctypes.string_at(part.data_ptr(), part.nbytes)
    return values.to_bytes(part)


class _Watch:
    """Copies a generator's state only when its memory has moved.

    `held_back`: whether a state keeps a value of its own beside that memory (the second of a pair of
    Gaussians): such a state is always copied, since using that value up moves no memory. `tail`: offset
    and size of what else tells its state, beside the first bytes.
    """

    def __init__(
        self, copy: Callable[[], Any], held_back: Callable[[Any], bool], tail: tuple[int, int] | None = None
    ) -> None:
        self._copy = copy
        self._held_back = held_back
        self._tail = tail
        self._address = 0
        self._looked_at: tuple[Any, ...] = ()  # arrays over the memory: a look costs no foreign call
        self._memory: list[bytes] = []
        self._state: Any = None

    def capture(self, address: int) -> Any:
        """The state of the generator whose memory begins at `address` (0: unknown, always copied)."""
        if not address:
            return self._copy()
        if address != self._address:
            self._address, self._state = address, None
            head, tail = (0, _LOOKED_AT_BYTES), self._tail
            parts = (head,) if tail is None else (head, tail)
            self._looked_at = tuple([(ctypes.c_char * size).from_address(address + at) for at, size in parts])
        memory = [part.raw for part in self._looked_at]
        kept = self._state
        if kept is None or memory != self._memory or self._held_back(kept):
            self._memory, self._state = memory, self._copy()
        return self._state


def _python_address() -> int:
    """Where CPython keeps random's twister (position, then words); 0 when it does not look like that."""
    if sys.implementation.name != "cpython":
        return 0
    address = id(random._inst) + _OBJECT_HEAD_BYTES
    found = struct.unpack(f"={_WORDS + 1}I", ctypes.string_at(address, _TWISTER_BYTES))
    expected = random.getstate()[1]
    return address if (*found[1:], found[0]) == expected else 0


def _torch_address() -> int:
    """Where torch keeps its CPU generator's engine; 0 when it does not look like that.

    Read through the kernel: a pointer that is none, in another version of torch, is then an error, not a crash.
    """
    generator = torch.default_generator
    wide = struct.unpack_from(f"={_WORDS}Q", _packed(torch.get_rng_state()), _LEGACY_WORDS_AT)
    try:
        words = struct.pack(f"={_WORDS}I", *wide)
        holder = struct.unpack("=Q", ctypes.string_at(id(generator) + _OBJECT_HEAD_BYTES, 8))[0]
        descriptor = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = os.pread(descriptor, _SEARCHED_BYTES + len(words), holder)
        finally:
            os.close(descriptor)
    except (OSError, OverflowError, struct.error):
        return 0
    at = memory.find(words)
    return holder + at - _BEFORE_WORDS_BYTES if at >= _BEFORE_WORDS_BYTES else 0


class _NumpyTwister:
    """Where numpy keeps its global twister; the answer is kept, since to ask costs more than to copy."""

    def __init__(self) -> None:
        self._generator: Any = None
        self._address = 0

    def address(self, numpy: Any) -> int:
        """0 when the global generator is another one."""
        generator: Any = getattr(numpy.random.mtrand._rand, "_bit_generator", None)
        if generator is not self._generator:
            twister = type(generator).__name__ == "MT19937"
            self._generator, self._address = generator, int(generator.ctypes.state_address) if twister else 0
        return self._address


_torch = _Watch(
    torch.get_rng_state, lambda state: False, (_BEFORE_WORDS_BYTES + _WORDS * 4, _AFTER_WORDS_BYTES)
)
_torch_at = _torch_address()
_python = _Watch(random.getstate, lambda state: state[2] is not None)
_python_at = _python_address()
_numpy_twister = _NumpyTwister()
_numpy = _Watch(
    lambda: sys.modules["numpy"].random.get_state(), lambda state: bool(state[3]), (_WORDS * 4, 4)
)


def capture() -> dict[str, Any]:
    """The state of every generator. What has not moved since the last call is the same object."""
    state: dict[str, Any] = {"torch": _torch.capture(_torch_at), "random": _python.capture(_python_at)}
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        state["numpy"] = _numpy.capture(_numpy_twister.address(numpy))
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` took. A generator that was not there is left alone."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["random"])
    numpy = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class Packer:
    """Captured states as bytes; one that has not moved since the last call is not packed again."""

    def __init__(self) -> None:
        self._parts: dict[str, Any] = {}
        self._packed: dict[str, bytes] = {}

    def pack(self, state: dict[str, Any]) -> dict[str, bytes]:
        """The parts of what `capture` returned, each by its name; the same object when nothing has moved."""
        known = self._parts
        moved = [name for name, part in state.items() if known.get(name) is not part]
        if moved or len(state) != len(known):
            packed = {name: self._packed[name] for name in state if name not in moved}
            self._packed = {name: packed.get(name) or _packed(part) for name, part in state.items()}
            self._parts = dict(state)
        return self._packed


def unpacked(name: str, data: bytes) -> Any:
    """One part as `restore` takes it. Raises WireError when the bytes are malformed."""
    if name in ("torch", "cuda"):
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return values.from_bytes(data)

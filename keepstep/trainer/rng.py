"""The random number generators of one process: taken and put back, bit for bit.

torch (CPU and this rank's GPU), Python's random, and numpy when the script has imported it. Taken
several times a step, so a generator that has not moved is not copied again: a look at its memory
costs 1 us, its public state 10 to 30 us.
"""

from __future__ import annotations

import ctypes
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


class _Watch:
    """Copies a generator's state only when its memory has moved.

    `held_back`: whether a state keeps a value of its own beside that memory (the second of a pair of
    Gaussians): such a state is always copied, since using that value up moves no memory.
    """

    def __init__(self, copy: Callable[[], Any], held_back: Callable[[Any], bool]) -> None:
        self._copy = copy
        self._held_back = held_back
        self._address = 0
        self._memory = b""
        self._state: Any = None

    def capture(self, address: int) -> Any:
        """The state of the generator whose memory begins at `address` (0: unknown, always copied)."""
        if not address:
            return self._copy()
        memory = ctypes.string_at(address, _TWISTER_BYTES)
        kept = self._state
        if address != self._address or memory != self._memory or kept is None or self._held_back(kept):
            self._address, self._memory, self._state = address, memory, self._copy()
        return self._state


def _python_address() -> int:
    """Where CPython keeps random's twister (position, then words); 0 when it does not look like that."""
    if sys.implementation.name != "cpython":
        return 0
    address = id(random._inst) + _OBJECT_HEAD_BYTES
    found = struct.unpack(f"={_WORDS + 1}I", ctypes.string_at(address, _TWISTER_BYTES))
    expected = random.getstate()[1]
    return address if (*found[1:], found[0]) == expected else 0


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


_python = _Watch(random.getstate, lambda state: state[2] is not None)
_python_at = _python_address()
_numpy_twister = _NumpyTwister()
_numpy = _Watch(lambda: sys.modules["numpy"].random.get_state(), lambda state: bool(state[3]))


def capture() -> dict[str, Any]:
    """The state of every generator. What has not moved since the last call is the same object."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "random": _python.capture(_python_at)}
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
        self._packed: dict[str, tuple[Any, bytes]] = {}

    def pack(self, state: dict[str, Any]) -> dict[str, bytes]:
        """The parts of what `capture` returned, each by its name."""
        packed: dict[str, bytes] = {}
        for name, part in state.items():
            if isinstance(part, torch.Tensor):
                packed[name] = ctypes.string_at(part.data_ptr(), part.nbytes)
                continue
            kept = self._packed.get(name)
            if kept is None or kept[0] is not part:
                kept = self._packed[name] = (part, values.to_bytes(part))
            packed[name] = kept[1]
        return packed


def unpacked(name: str, data: bytes) -> Any:
    """One part as `restore` takes it. Raises WireError when the bytes are malformed."""
    if name in ("torch", "cuda"):
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return values.from_bytes(data)

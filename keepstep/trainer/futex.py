"""Sleeping on a word of shared memory until another process changes it: Linux's futex, without a library.

A word is 64 bits wide here; the kernel looks at its low half. It knows nothing of what the words mean.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable

_WAIT, _WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: the word is shared between processes
_EVERYBODY = 0x7FFF_FFFF
_LOW_HALF = 0 if sys.byteorder == "little" else 4

# The number of the system call differs by machine (each architecture's unistd.h).
_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_CALL = _CALLS.get(platform.machine()) if sys.platform == "linux" else None


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _syscall() -> Callable[..., int] | None:
    if _CALL is None:
        return None
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    pointer, word = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes = (ctypes.c_long, pointer, ctypes.c_int, word, pointer, pointer, word)
    return function


_call = _syscall()


def available() -> bool:
    """Whether this machine's call is known."""
    return _call is not None


def limit(seconds: float) -> _Timespec:
    """A span of time for `wait`, made once and used often."""
    whole = int(seconds)
    return _Timespec(whole, int((seconds - whole) * 1e9))


def wait(address: int, seen: int, at_most: _Timespec) -> None:
    """Sleep while the word at `address` is still `seen`, at most so long. May return early for no reason."""
    assert _call is not None
    _call(_CALL, address + _LOW_HALF, _WAIT, seen & 0xFFFF_FFFF, ctypes.addressof(at_most), None, 0)


def wake(address: int) -> None:
    """Wake everybody who sleeps on the word at `address`, in any process."""
    assert _call is not None
    _call(_CALL, address + _LOW_HALF, _WAKE, _EVERYBODY, None, None, 0)

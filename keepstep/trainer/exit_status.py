"""How this process ended, left in its page for an agent that was not there to be told by the kernel.

Python tells nobody with which status it exits (`raise SystemExit(3)` passes no hook), but the C library
does: functions registered by `on_exit` receive it. One of the library's own, `putw`, writes it where the
page keeps it, after the interpreter is gone. What ends by a signal writes nothing.
"""

from __future__ import annotations

import ctypes
import os

from keepstep.wire.page import EXIT_STATUS_AT

_UNBUFFERED = 2


def leave_status(page_path: str) -> bool:
    """From now on an orderly exit, whatever its way, writes its status. False where that is not possible."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "on_exit") or not hasattr(libc, "putw"):
        return False  # not glibc: the status stays unknown
    libc.fopen.restype = ctypes.c_void_p
    libc.fopen.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    libc.setvbuf.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    libc.fseek.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int]
    libc.fileno.argtypes = [ctypes.c_void_p]
    libc.on_exit.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    file = libc.fopen(os.fsencode(page_path), b"r+e")  # e: closed on exec
    if not file:
        return False
    libc.setvbuf(file, None, _UNBUFFERED, 0)
    libc.fseek(file, EXIT_STATUS_AT, os.SEEK_SET)
    descriptor = int(libc.fileno(file))

    def forget_in_child() -> None:
        """A forked child inherits the handler, and its end is not this worker's."""
        nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)

    os.register_at_fork(after_in_child=forget_in_child)
    return bool(libc.on_exit(ctypes.cast(libc.putw, ctypes.c_void_p), file) == 0)

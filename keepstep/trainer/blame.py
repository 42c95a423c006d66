"""Whose fault an exception is: a lost peer's, the machine's, or the script's own.

A table, because at three in the morning one wants to know why: CUDA, NCCL and I/O errors go to the
hardware, a broken connection of gloo to the peer, everything else is the script's.
"""

from __future__ import annotations

import errno
import re

HARDWARE_ERRNO = frozenset({errno.EIO, errno.EREMOTEIO, errno.ENXIO, errno.ENODEV, errno.ESTALE})
HARDWARE_TEXT = re.compile(
    r"CUDA error|CUBLAS_STATUS|CUDNN_STATUS|NCCL|uncorrectable ECC|device-side assert", re.I
)
# An assertion inside a kernel is the script's index error, and running out of memory its batch size.
SCRIPT_TEXT = re.compile(r"device-side assert|out of memory", re.I)
PEER_TEXT = re.compile(
    r"gloo.*(Connection closed by peer|Connection reset|Broken pipe|Read error|Write error|Socket closed|Timed out)",
    re.I | re.S,
)


def lost_peer(error: BaseException) -> str | None:
    """Why `error` means that a peer was lost, or None."""
    if isinstance(error, RuntimeError) and PEER_TEXT.search(str(error)):
        return str(error).splitlines()[0][:200]
    return None


def is_hardware(error: BaseException) -> bool:
    """Whether the table sends `error` to the machine."""
    if isinstance(error, OSError):
        return error.errno in HARDWARE_ERRNO
    text = str(error)
    if isinstance(error, RuntimeError) and HARDWARE_TEXT.search(text):
        return not SCRIPT_TEXT.search(text)
    return False

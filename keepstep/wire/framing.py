"""Messages on a byte stream: a 4-byte big-endian length, then the payload. Blocking and asyncio forms.

It does not know what a payload means. A peer that announces too much, or stops in mid-frame, is a
WireError; a peer that closes between two frames is simply gone (None).
"""

from __future__ import annotations

import asyncio
import socket
import struct

from keepstep.errors import WireError

MAX_FRAME_BYTES = 16 << 20
_HEADER = struct.Struct(">I")


def frame(payload: bytes) -> bytes:
    """The payload with its length before it. Raises WireError when it is larger than MAX_FRAME_BYTES."""
    if len(payload) > MAX_FRAME_BYTES:
        raise WireError(f"message of {len(payload)} bytes is larger than the limit of {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(payload)) + payload


def _payload_length(header: bytes) -> int:
    (length,) = _HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise WireError(f"peer announces {length} bytes, the limit is {MAX_FRAME_BYTES}")
    return int(length)


# ---- blocking sockets -----------------------------------------------------------------------------


def send_frame(sock: socket.socket, payload: bytes) -> None:
    """Send one frame whole. Raises WireError (too large) or OSError (TimeoutError: the stream is unusable)."""
    sock.sendall(frame(payload))


def recv_frame(sock: socket.socket) -> bytes | None:
    """The next frame, None at the end of the stream. Raises WireError, or OSError as the socket does."""
    header = _recv_exactly(sock, _HEADER.size, at_boundary=True)
    if header is None:
        return None
    return _recv_exactly(sock, _payload_length(header), at_boundary=False)


def _recv_exactly(sock: socket.socket, count: int, *, at_boundary: bool) -> bytes | None:
    buffer = bytearray(count)
    view, got = memoryview(buffer), 0
    while got < count:
        received = sock.recv_into(view[got:])
        if received == 0:
            if at_boundary and got == 0:
                return None
            raise WireError("peer closed the connection in the middle of a message")
        got += received
    return bytes(buffer)


# ---- asyncio streams ------------------------------------------------------------------------------


async def write_frame(writer: asyncio.StreamWriter, payload: bytes) -> None:
    """Queue one frame and wait until the peer keeps up. Raises WireError (too large) or OSError."""
    writer.write(frame(payload))
    await writer.drain()


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next frame, None at the end of the stream. Raises WireError, or OSError as the stream does."""
    try:
        header = await reader.readexactly(_HEADER.size)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise WireError("peer closed the connection in the middle of a message") from None
    try:
        return await reader.readexactly(_payload_length(header))
    except asyncio.IncompleteReadError:
        raise WireError("peer closed the connection in the middle of a message") from None

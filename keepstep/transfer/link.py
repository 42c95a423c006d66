"""The bytes between target and source: greeting, request, chunk header. Both ends use this one file.

A connection: greeting (magic and the token's hash, of fixed length, so that a stranger is never parsed);
one question as a JSON frame and its answer; then, for a stream, fixed-size requests and chunks.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import ssl
import struct
from typing import Any

from keepstep.errors import WireError
from keepstep.transfer.checksum import BLOCK_BYTES
from keepstep.wire.framing import recv_frame, send_frame

CHUNK_BYTES = 4 * BLOCK_BYTES  # 896 KiB: stays in the cache between the copy and its checksum
GREETING_BYTES = 36
REFUSED_PIECE = 0xFFFF_FFFF
MAX_REFUSAL_BYTES = 1000
_MAGIC = b"KST1"

REQUEST = struct.Struct(">IQI")  # piece, offset, length
CHUNK = struct.Struct(
    ">IQIQ"
)  # piece, offset, length, checksum; piece REFUSED_PIECE: `length` bytes of reason


def greeting(token: str) -> bytes:
    """What a target says first."""
    return _MAGIC + hashlib.sha256(token.encode()).digest()


def is_greeting(received: bytes, token: str) -> bool:
    """Whether the greeting carries this token; takes the same time however much of it is right."""
    return hmac.compare_digest(received, greeting(token))


def ask(sock: socket.socket, question: dict[str, Any]) -> None:
    """Send a question. Raises OSError."""
    send_frame(sock, json.dumps(question).encode())


def answer(sock: socket.socket) -> dict[str, Any] | None:
    """Read a JSON object, None at the end of the stream. Raises WireError and OSError."""
    payload = recv_frame(sock)
    if payload is None:
        return None
    try:
        body = json.loads(payload)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise WireError("a message between target and source is no JSON object")
    return body


def be_patient(sock: socket.socket, limit_s: float) -> None:
    """Let the kernel itself wait, at most `limit_s` without any progress: then BlockingIOError is raised.

    Python's own timeouts make the socket non-blocking and poll before every call, which costs a bulk
    stream many wake-ups.
    """
    if isinstance(sock, ssl.SSLSocket):  # it reads ahead by itself, so the kernel cannot wait for it
        sock.settimeout(limit_s)
        return
    seconds = int(limit_s)
    limit = struct.pack("@ll", seconds, max(int((limit_s - seconds) * 1e6), 1))
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def shut(sock: socket.socket) -> None:
    """End a connection now: whoever is blocked in it returns. From any thread, hence below TLS."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def read_into(sock: socket.socket, view: memoryview) -> None:
    """Fill `view` from the stream. Raises ConnectionError when it ends before, and OSError."""
    flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
    while len(view):
        received = sock.recv_into(view, len(view), flags)
        if received == 0:
            raise ConnectionResetError("closed the connection")
        view = view[received:]

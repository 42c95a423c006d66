"""How fast this node reaches another one: a listener for one connection, and the sender to it.

The controller brings the two together: it asks one agent to listen ("link.listen", with a secret of its own for
this one measurement) and another to send ("link.send"). Both end within seconds, whatever the other does. The
port is any free one, as the ports of the ranks' own groups are.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from keepstep.agent.questions import Questions
from keepstep.errors import UsageError

CONNECT_TIMEOUT_S = 3.0
LISTEN_TIMEOUT_S = 8.0
MAX_BYTES = 64 << 20
MAX_SECONDS = 5.0
MAX_LISTENERS = 4
PINGS = 16
SECRET_BYTES = 32
_CHUNK = bytes(1 << 18)
_COUNT = struct.Struct("<Q")


class Measuring:
    """Answers the questions of measurement for one node. `advertise`: the address that it listens on."""

    def __init__(self, advertise: str) -> None:
        self._advertise = advertise
        self._open = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, questions: Questions) -> None:
        """Offer the answers."""
        questions.add("link.listen", self._listen)
        questions.add("link.send", self._send)
        questions.add("clock", self._clock)

    async def _clock(self, about: Mapping[str, Any]) -> bytes:
        return json.dumps({"ns": time.time_ns()}).encode()

    async def _listen(self, about: Mapping[str, Any]) -> bytes:
        secret = bytes.fromhex(about["secret"])
        if len(secret) != SECRET_BYTES:
            raise UsageError(f"the secret has {len(secret)} bytes, not {SECRET_BYTES}")
        if self._open >= MAX_LISTENERS:
            raise UsageError("this node is being measured already")
        family = socket.AF_INET6 if ":" in self._advertise else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((self._advertise, 0))
            listener.listen(4)
        except OSError:
            listener.close()
            raise
        self._open += 1
        task = asyncio.create_task(self._serve(listener, secret))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return json.dumps({"host": self._advertise, "port": listener.getsockname()[1]}).encode()

    async def _serve(self, listener: socket.socket, secret: bytes) -> None:
        try:
            await asyncio.to_thread(_receive, listener, secret, time.monotonic() + LISTEN_TIMEOUT_S)
        finally:
            self._open -= 1
            listener.close()

    async def _send(self, about: Mapping[str, Any]) -> bytes:
        count = min(int(about["bytes"]), MAX_BYTES)
        seconds = min(float(about["seconds"]), MAX_SECONDS)
        place, secret = (str(about["host"]), int(about["port"])), bytes.fromhex(about["secret"])
        return json.dumps(await asyncio.to_thread(_send, place, secret, count, seconds)).encode()


def _receive(listener: socket.socket, secret: bytes, deadline_s: float) -> None:
    """Serve the first connection that knows the secret; strangers are hung up on."""
    while (left_s := deadline_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                if _serve_one(connection, secret, deadline_s):
                    return


def _serve_one(connection: socket.socket, secret: bytes, deadline_s: float) -> bool:
    connection.settimeout(max(0.1, min(CONNECT_TIMEOUT_S, deadline_s - time.monotonic())))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not hmac.compare_digest(_exactly(connection, SECRET_BYTES), secret):
        return False
    for _ in range(PINGS):
        connection.sendall(_exactly(connection, 1))
    count, buffer = 0, bytearray(1 << 20)
    while time.monotonic() < deadline_s and (length := connection.recv_into(buffer)):
        count += length
    connection.sendall(_COUNT.pack(count))
    return True


def _send(place: tuple[str, int], secret: bytes, most: int, seconds: float) -> dict[str, float]:
    """Latency as the fastest of PINGS round trips, halved by nobody; throughput until the last byte is confirmed."""
    with socket.create_connection(place, CONNECT_TIMEOUT_S) as connection:
        connection.settimeout(seconds + CONNECT_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(secret)
        latency_s = seconds
        for _ in range(PINGS):
            sent_s = time.perf_counter()
            connection.sendall(b".")
            _exactly(connection, 1)
            latency_s = min(latency_s, time.perf_counter() - sent_s)
        started_s, count = time.perf_counter(), 0
        while count < most and time.perf_counter() - started_s < seconds:
            connection.sendall(_CHUNK[: most - count])
            count += min(len(_CHUNK), most - count)
        connection.shutdown(socket.SHUT_WR)
        (arrived,) = _COUNT.unpack(_exactly(connection, _COUNT.size))
        took_s = time.perf_counter() - started_s
        if arrived != count:
            raise UsageError(f"of {count} bytes {arrived} arrived")
        return {"bytes": count, "seconds": took_s, "latency_s": latency_s}


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the other side hung up")
        data += part
    return data

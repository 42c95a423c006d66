"""The Unix socket on which this node's workers speak: who may, frames in, frames out.

A connection is believed when it carries the job's token *and* the kernel says that the peer belongs
to the worker's own process group. What a message means is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import socket
import struct
from pathlib import Path
from typing import Any, Protocol

from keepstep.agent.store import GenerationStore
from keepstep.agent.store_session import StoreSession
from keepstep.errors import WireError
from keepstep.wire.codec import decode, encode
from keepstep.wire.framing import MAX_FRAME_BYTES, frame, read_frame
from keepstep.wire.messages import PROTOCOL_VERSION, Fenced, Hello

HELLO_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 1024
# A worker that does not read (stopped, hung) must not fill the agent's memory.
MAX_UNSENT_BYTES = 4 * MAX_FRAME_BYTES

log = logging.getLogger(__name__)


class Link:
    """One worker's control connection. Sending never waits."""

    def __init__(self, writer: asyncio.StreamWriter, worker: int, pid: int) -> None:
        self.worker = worker
        self.pid = pid
        self._writer = writer

    def send(self, message: object) -> None:
        """Queue a message; a peer that stopped reading long ago is cut instead."""
        _write(self._writer, message)

    def close(self) -> None:
        self._writer.close()


class Service(Protocol):
    """Whoever decides about workers' connections and messages."""

    def refusal(self, hello: Hello, pid: int) -> str | None:
        """Why this peer may not speak as that worker; None when it may."""

    def connected(self, link: Link) -> None: ...

    def received(self, link: Link, message: Any) -> None:
        """Raises WireError for a message that no worker may send."""

    def lied(self, worker: int, reason: str) -> None:
        """A worker sent what cannot be."""

    def disconnected(self, link: Link) -> None: ...


class WorkerSocket:
    """Listens at `path` (its folder must be the owner's alone) until `close`."""

    def __init__(self, path: Path, token: str, desk: Service, store: GenerationStore) -> None:
        self.path = path
        self._token = token.encode()
        self._desk = desk
        self._store = store
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def open(self) -> None:
        """Raises OSError, for instance when the path is longer than the kernel takes (107 bytes)."""
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        os.chmod(self.path, 0o600)

    async def close(self) -> None:
        """Cut every connection and remove the socket."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._writers) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._writers.add(writer)
        try:
            hello, pid = await self._greet(reader, writer)
            if hello is not None:
                await (self._control if hello.role == "control" else self._serve_store)(
                    hello, pid, reader, writer
                )
        except WireError as error:
            log.warning("a worker's connection was cut: %s", error)
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            pass  # the peer went away, or the agent closes: nobody is left to be told
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _greet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Hello | None, int]:
        """The peer's Hello and its pid as the kernel tells it; None instead of a refused Hello."""
        data = await asyncio.wait_for(read_frame(reader), HELLO_TIMEOUT_S)
        hello = None if data is None else decode(data)
        if not isinstance(hello, Hello):
            raise WireError("the first message was no Hello")
        pid, uid = _peer(writer)
        reason = self._refusal(hello, pid, uid)
        if reason is None:
            return hello, pid
        log.warning("refused a connection as worker %s from process %s: %s", hello.worker, pid, reason)
        _write(writer, Fenced(reason=reason))
        await writer.drain()
        return None, pid

    def _refusal(self, hello: Hello, pid: int, uid: int) -> str | None:
        if not hmac.compare_digest(hello.token.encode(), self._token):
            return "the token does not match this job's"
        if hello.version != PROTOCOL_VERSION:
            return f"the worker speaks protocol {hello.version}, this agent {PROTOCOL_VERSION}"
        if uid != os.getuid():
            return f"the peer runs as user {uid}, not {os.getuid()}"
        return self._desk.refusal(hello, pid)

    async def _control(
        self, hello: Hello, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        link = Link(writer, hello.worker, pid)
        self._desk.connected(link)
        try:
            while (data := await read_frame(reader)) is not None:
                try:
                    self._desk.received(link, decode(data))
                except WireError as error:  # a stream that breaks off in mid-message is none: that is a death
                    self._desk.lied(hello.worker, str(error))
                    raise
        finally:
            self._desk.disconnected(link)

    async def _serve_store(
        self, hello: Hello, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        session = StoreSession(self._store, lambda reply: _write(writer, reply))
        try:
            while (data := await read_frame(reader)) is not None:
                session.received(data)
        finally:
            session.closed()


def _peer(writer: asyncio.StreamWriter) -> tuple[int, int]:
    """Process and user at the other end, from the kernel."""
    sock = writer.get_extra_info("socket")
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


def _write(writer: asyncio.StreamWriter, message: object) -> None:
    if writer.transport.is_closing():
        return
    if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
        log.warning("a worker's connection was cut: it does not read what it is sent")
        writer.transport.abort()
        return
    try:
        writer.write(frame(encode(message)))
    except WireError as error:  # larger than a frame: only this peer is to suffer, not who caused the answer
        log.warning("a worker's connection was cut: %s", error)
        writer.transport.abort()

"""The TCP listener for the workers and agents of other nodes: one address, and nobody without the token.

A stranger costs one small frame, one HMAC and at most HELLO_TIMEOUT_S of one connection; it is never parsed.
What an authenticated peer may do is decided elsewhere (`Service`). TLS, where wanted, lies under all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol

from keepstep.errors import UsageError, WireError
from keepstep.wire import handshake
from keepstep.wire.address import format_address
from keepstep.wire.codec import decode, encode
from keepstep.wire.framing import MAX_FRAME_BYTES, frame
from keepstep.wire.messages import PROTOCOL_VERSION, Fenced, PeerHello, PeerWelcome

HELLO_TIMEOUT_S = 10.0
# Every worker of a job connects to the agent that holds a generation's store, and all at the same moment.
MAX_CONNECTIONS = 32_768
MAX_STRANGERS = 4096
BACKLOG = 4096
MAX_UNSENT_BYTES = 4 * MAX_FRAME_BYTES
WARNING_INTERVAL_S = 10.0

log = logging.getLogger(__name__)

Send = Callable[[bytes], None]


class Role(Protocol):
    """What an authenticated connection does."""

    def received(self, data: bytes) -> None:
        """One frame. Raises WireError for what this peer may not say."""

    def closed(self) -> None: ...


class Service(Protocol):
    """Whoever decides what peers may do."""

    def refusal(self, hello: PeerHello) -> str | None:
        """Why this peer may not stay; None when it may."""

    def role_for(self, hello: PeerHello, send: Send) -> Role:
        """What the connection does from now on; `send` queues one frame."""


class PeerListener:
    """Listens on `host` only, from `open` to `close`. `address` is what other nodes are told."""

    def __init__(
        self,
        host: str,
        token: str,
        node: str,
        service: Service,
        *,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.address = ""
        self.token = token
        self.node = node
        self.service = service
        self.connections: set[PeerConnection] = set()
        self.strangers = 0
        self.preferred_port = 0  # when any port would do
        self._host = host
        self._port = port
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._warned_s = float("-inf")

    async def open(self) -> None:
        """Raises UsageError, in one line, when the address is not this machine's or the port is taken."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, local = found[0]
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self._bind(sock, local)
                sock.setblocking(False)
                host, port = sock.getsockname()[:2]
                self.address = format_address(host, port)
                self._server = await loop.create_server(
                    lambda: PeerConnection(self), sock=sock, backlog=BACKLOG, ssl=self._tls
                )
            except BaseException:
                sock.close()
                raise
        except OSError as error:
            where = format_address(self._host, self._port) if self._port else self._host
            raise UsageError(
                f"this agent cannot listen on {where} for other nodes ({error.strerror or error}): "
                "advertise an address of this machine that they reach"
            ) from None

    def _bind(self, sock: socket.socket, local: tuple[Any, ...]) -> None:
        if self._port == 0 and self.preferred_port:
            with contextlib.suppress(OSError):  # somebody else has it by now
                sock.bind((local[0], self.preferred_port, *local[2:]))
                return
        sock.bind(local)

    def close(self) -> None:
        """Cut every connection; the port is free afterwards."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.cut()

    def cut(self, unwanted: Callable[[PeerHello], bool]) -> None:
        """End the connections of those who may not speak any more."""
        for connection in list(self.connections):
            if connection.hello is not None and unwanted(connection.hello):
                connection.cut()

    def warn(self, text: str) -> None:
        """Said now and then only: whoever can connect can also fill a log."""
        if time.monotonic() - self._warned_s > WARNING_INTERVAL_S:
            self._warned_s = time.monotonic()
            log.warning("a connection from another node was cut: %s", text)


class PeerConnection(asyncio.Protocol):
    """One connection: a stranger first, then what its hello said that it is for."""

    def __init__(self, listener: PeerListener) -> None:
        self.hello: PeerHello | None = None
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._role: Role | None = None
        self._buffer = bytearray()
        self._banner = handshake.make_banner()
        self._deadline: asyncio.TimerHandle | None = None
        self._peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        listener = self._listener
        self._transport = transport
        listener.connections.add(self)
        listener.strangers += 1
        if listener.strangers > MAX_STRANGERS or len(listener.connections) > MAX_CONNECTIONS:
            self.cut()
            return
        name = transport.get_extra_info("peername")
        self._peer = format_address(*name[:2]) if name else "nowhere"
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(HELLO_TIMEOUT_S, self.cut)
        transport.write(self._banner)

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.connections.discard(self)
        if self.hello is None:
            self._listener.strangers -= 1
        if self._deadline is not None:
            self._deadline.cancel()
        if self._role is not None:
            self._role.closed()

    def cut(self) -> None:
        """End it now."""
        if self._transport is not None:
            self._transport.abort()

    def send(self, data: bytes) -> None:
        """Queue one frame; a peer that stopped reading long ago is cut instead."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self._listener.warn(f"{self._peer} does not read what it is sent")
            transport.abort()
            return
        transport.write(frame(data))

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        try:
            while self._transport is not None and not self._transport.is_closing():
                if len(buffer) < 4:
                    return
                length = int.from_bytes(buffer[:4], "big")
                limit = MAX_FRAME_BYTES if self._role is not None else handshake.MAX_GREETING_BYTES
                if length > limit:
                    raise WireError(f"it announces {length} bytes, the limit is {limit}")
                if len(buffer) < 4 + length:
                    return
                payload = bytes(memoryview(buffer)[4 : 4 + length])
                del buffer[: 4 + length]
                if self._role is not None:
                    self._role.received(payload)
                else:
                    self._greeted(payload)
        except WireError as error:
            self._listener.warn(f"{self._peer}: {error}")
            self.cut()

    def _greeted(self, greeting: bytes) -> None:
        listener = self._listener
        data = handshake.hello_of(listener.token, self._banner, greeting)
        if data is None:
            raise WireError("it does not have this job's token")
        hello = decode(data)
        if not isinstance(hello, PeerHello):
            raise WireError("the first message was no PeerHello")
        reason = self._refusal(hello)
        message = PeerWelcome(node=listener.node) if reason is None else Fenced(reason=reason)
        self.send(handshake.reply(listener.token, self._banner, greeting, encode(message)))
        if reason is not None:
            listener.warn(f"{self._peer} (worker {hello.worker} of {hello.node}): {reason}")
            assert self._transport is not None
            self._transport.close()  # after what was written
            return
        listener.strangers -= 1
        if self._deadline is not None:
            self._deadline.cancel()
        self.hello = hello
        self._role = listener.service.role_for(hello, self.send)

    def _refusal(self, hello: PeerHello) -> str | None:
        if hello.version != PROTOCOL_VERSION:
            return f"the peer speaks protocol {hello.version}, this agent {PROTOCOL_VERSION}"
        if hello.to != self._listener.address:
            return f"the call was for {hello.to}, this is {self._listener.address}: somebody passes it on"
        return self._listener.service.refusal(hello)

"""The controller's listener: one socket, plain or TLS, served by uvicorn without its signal handling."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Generator

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

from keepstep.errors import UsageError
from keepstep.wire.address import format_address
from keepstep.wire.framing import MAX_FRAME_BYTES
from keepstep.wire.tls import TlsFiles

BACKLOG = 1024
READ_AHEAD = 16  # messages of one connection
_STOP_TIMEOUT_S = 3


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on the first address of `host` that is this machine's, loopback last.

    Raises UsageError, in one line, when there is none or the port cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        raise UsageError(
            f"cannot listen on {host}: neither an address nor a name that is known here"
        ) from None
    candidates = dict.fromkeys((family, address) for family, _, _, _, address in found)
    for family, address in sorted(candidates, key=lambda one: _is_loopback(str(one[1][0]))):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRNOTAVAIL:
                continue  # another machine's: a name may stand for several
            if error.errno == errno.EADDRINUSE:
                raise UsageError(
                    f"port {port} on {host} is in use: choose another, or 0 for any free one"
                ) from None
            raise UsageError(f"cannot listen on {host} port {port}: {error.strerror}") from None
        return sock
    shown = ", ".join(str(address[0]) for _, address in candidates)
    what = f"{host} ({shown})" if shown != host else host
    raise UsageError(f"cannot listen on {what}: not an address of this machine")


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


class _ReadingAhead(WebSocketsSansIOProtocol):
    """uvicorn stops reading a connection after every message until it is taken, at two system calls each time:
    thousands of agents would make it the dearest part of a message. Here some may wait."""

    def send_receive_event_to_app(self) -> None:
        ahead = not self.read_paused and self.queue.qsize() < READ_AHEAD
        if ahead:
            self.read_paused = True  # so it need not be done
        super().send_receive_event_to_app()
        if ahead:
            self.read_paused = False


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the command's affair: a Ctrl-C must end workers first, the listener last."""
        yield


class Server:
    """Serves one application on one bound socket until `stop`.

    `name`: what others call this host, where that is not the socket's address. Raises UsageError (`tls`).
    """

    def __init__(
        self, app: Starlette, sock: socket.socket, *, name: str | None = None, tls: TlsFiles | None = None
    ) -> None:
        self._sock = sock
        host, port = sock.getsockname()[:2]
        if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
            host = "localhost"
        self.url = f"{'https' if tls else 'http'}://{format_address(name or host, port)}"
        context = tls.server() if tls is not None else None
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws=_ReadingAhead,
            ws_max_size=MAX_FRAME_BYTES,
            ws_max_queue=64,
            ws_per_message_deflate=False,
            h11_max_incomplete_event_size=64 << 10,
            timeout_graceful_shutdown=_STOP_TIMEOUT_S,
            ssl_context_factory=None if context is None else lambda *_: context,
        )
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to serve; connections made before the first turn of the loop wait in the backlog."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._sock]), name="controller-server")

    async def stop(self) -> None:
        """Close the listener and what is still connected, within a few seconds."""
        self._server.should_exit = True
        if self._task is not None:
            # uvicorn says farewell also to a connection that is closing already, and stumbles over it.
            with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError, InvalidState):
                await asyncio.wait_for(self._task, _STOP_TIMEOUT_S + 2)
        self._sock.close()

"""The controller's listener: one loopback socket, served by uvicorn without its signal handling."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Generator

import uvicorn
from starlette.applications import Starlette

from keepstep.errors import UsageError
from keepstep.wire.framing import MAX_FRAME_BYTES

_STOP_TIMEOUT_S = 3


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError, in one line, when the port cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError:
        raise UsageError(f"cannot listen on {host}: not an address of this machine") from None
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} on {host} is in use: choose another, or 0 for any free one"
            ) from None
        raise UsageError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return sock


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the command's affair: a Ctrl-C must end workers first, the listener last."""
        yield


class Server:
    """Serves one application on one bound socket until `stop`."""

    def __init__(self, app: Starlette, sock: socket.socket) -> None:
        self._sock = sock
        host, port = sock.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="websockets-sansio",
            ws_max_size=MAX_FRAME_BYTES,
            ws_max_queue=64,
            ws_per_message_deflate=False,
            h11_max_incomplete_event_size=64 << 10,
            timeout_graceful_shutdown=_STOP_TIMEOUT_S,
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
            with contextlib.suppress(asyncio.TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(self._task, _STOP_TIMEOUT_S + 2)
        self._sock.close()

"""An agent's small HTTP listener for Prometheus: GET /metrics, and nothing else. There only when it is asked for.

Requests are read within a deadline and a bound; a token of the job is shown, unless this machine's processes may
look without one. It does not know what the text says.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

from keepstep.errors import UsageError
from keepstep.wire.tokens import read_token, same_token

REQUEST_TIMEOUT_S = 5.0
MAX_REQUEST_BYTES = 16 << 10
MAX_CONNECTIONS = 16

_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAddress:
    """Where to listen. `open`: processes of this machine need no token."""

    port: int
    host: str = "127.0.0.1"
    open: bool = False


class MetricsListener:
    """Serves `text()`. `run` it in the agent's loop; `url` is known once it listens."""

    def __init__(
        self, address: MetricsAddress | None, token: str, text: Callable[[], bytes], content_type: str
    ) -> None:
        self._address = address
        self._token, self._read_token = token, read_token(token)
        self._text = text
        self._content_type = content_type
        self._connections = 0
        self.url = ""

    async def run(self) -> None:
        """Listen, if it was asked for, until cancelled. Raises UsageError when the port cannot be had."""
        if self._address is None:
            return
        host, port = self._address.host, self._address.port
        try:
            server = await asyncio.start_server(self._serve, host, port, limit=MAX_REQUEST_BYTES)
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror}"
            raise UsageError(f"--metrics-port {port} on {host} {why}") from None
        bound = server.sockets[0].getsockname()
        name = f"[{bound[0]}]" if ":" in bound[0] else bound[0]
        self.url = f"http://{name}:{bound[1]}/metrics"
        async with server:
            await server.serve_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self._connections >= MAX_CONNECTIONS:
                return
            self._connections += 1
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head, writer.get_extra_info("peername")))
                    await writer.drain()
            finally:
                self._connections -= 1
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # whoever does not ask properly gets no answer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _answer(self, head: bytes, peer: tuple[str, int]) -> bytes:
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return self._response(400, b"not HTTP\n")
        fields = {
            name.strip().lower(): value.strip() for name, _, value in (ln.partition(":") for ln in lines)
        }
        if not self._may_look(fields.get("authorization", ""), peer):
            return self._response(
                401, b"this job's token is missing or wrong\n", "WWW-Authenticate: Bearer\r\n"
            )
        if words[0] not in ("GET", "HEAD"):
            return self._response(405, b"only GET\n", "Allow: GET, HEAD\r\n")
        if words[1].partition("?")[0] != "/metrics":
            return self._response(404, b"only /metrics is here\n")
        answer = self._response(200, self._text())
        return answer if words[0] == "GET" else answer[: answer.index(b"\r\n\r\n") + 4]

    def _may_look(self, shown: str, peer: tuple[str, int]) -> bool:
        if (
            self._address is not None
            and self._address.open
            and ipaddress.ip_address(peer[0].partition("%")[0]).is_loopback
        ):
            return True
        scheme, _, token = shown.partition(" ")
        full, reader = same_token(token.strip(), self._token), same_token(token.strip(), self._read_token)
        return scheme.lower() == "bearer" and (full or reader)

    def _response(self, status: int, body: bytes, more: str = "") -> bytes:
        kind = self._content_type if status == 200 else "text/plain; charset=utf-8"
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            f"{more}Connection: close\r\n\r\n"
        )
        return head.encode("ascii") + body

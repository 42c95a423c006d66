"""Calling another node's agent: one connection, one question, one answer; or just: does it listen?

Every call has one deadline for all of it. It does not know what the questions mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

from keepstep.errors import WireError
from keepstep.wire import handshake
from keepstep.wire.address import parse_address
from keepstep.wire.codec import decode, encode
from keepstep.wire.framing import read_frame, write_frame
from keepstep.wire.messages import PROTOCOL_VERSION, Fenced, PeerHello, PeerWelcome

CALL_FAILURES = (OSError, TimeoutError, WireError, ValueError, asyncio.IncompleteReadError)


async def call(
    address: str,
    message: object,
    *,
    token: str,
    node: str,
    timeout_s: float,
    tls: ssl.SSLContext | None = None,
) -> Any:
    """The answer to `message`. Raises one of CALL_FAILURES."""
    async with asyncio.timeout(timeout_s):
        host, port = parse_address(address)
        reader, writer = await asyncio.open_connection(host, port, ssl=tls)
        try:
            banner = await reader.readexactly(handshake.BANNER_BYTES)
            handshake.check_banner(banner)
            hello = PeerHello(version=PROTOCOL_VERSION, node=node, to=address, role="agent")
            greeting = handshake.greet(token, banner, encode(hello))
            await write_frame(writer, greeting)
            welcome = decode(handshake.message_of(token, banner, greeting, await _frame(reader)))
            if isinstance(welcome, Fenced):
                raise WireError(welcome.reason)
            if not isinstance(welcome, PeerWelcome):
                raise WireError(f"{type(welcome).__name__} is no answer to a hello")
            await write_frame(writer, encode(message))
            return decode(await _frame(reader))
        finally:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                await writer.wait_closed()


async def probe(address: str, timeout_s: float) -> str:
    """ "reached" (its listener accepted), "refused" (the machine answers, no agent listens), or "silent"."""
    try:
        async with asyncio.timeout(timeout_s):
            host, port = parse_address(address)
            _, writer = await asyncio.open_connection(host, port)
    except (ConnectionRefusedError, ConnectionResetError):
        return "refused"
    except (OSError, TimeoutError, ValueError):  # no route, no answer, or nobody knows where it listens
        return "silent"
    writer.transport.abort()
    return "reached"


async def _frame(reader: asyncio.StreamReader) -> bytes:
    data = await read_frame(reader)
    if data is None:
        raise WireError("the peer closed the connection: does it have this job's token?")
    return data

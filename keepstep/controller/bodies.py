"""The bodies of requests to the API: bounded, and JSON; what they mean is the affair of who asks for them."""

from __future__ import annotations

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

MAX_BODY_BYTES = 64 << 10


async def body_of(request: Request) -> bytes:
    """The request's bytes. Raises HTTPException 413."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise HTTPException(413, "the request is too large")
    return bytes(data)


def parsed(data: bytes) -> Any:
    """The JSON value in it. Raises HTTPException 400."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the request is not JSON") from None


async def object_of(request: Request) -> dict[str, Any]:
    """The request's JSON object. Raises HTTPException 400 or 413 for anything else."""
    value = parsed(await body_of(request))
    if not isinstance(value, dict):
        raise HTTPException(400, "expected a JSON object")
    return value

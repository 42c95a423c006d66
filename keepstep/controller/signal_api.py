"""Health signals that somebody posts: checked here, judged by the policy in the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from keepstep.controller.bodies import object_of
from keepstep.core.health_events import NUMBERS, SEVERITIES, TEXTS, WHOLE, SignalSeen

if TYPE_CHECKING:
    from keepstep.controller.shell import Controller

MAX_TEXT = 500


def routes(controller: Controller) -> list[BaseRoute]:
    """`POST /api/signals`: one signal; 404 for a node that is not there."""

    async def signal(request: Request) -> Response:
        event = SignalSeen(**await _body(request))
        if event.node not in controller.nodes:
            raise HTTPException(
                404, f"there is no node {event.node}: {', '.join(controller.nodes) or 'none'}"
            )
        controller.report(event)
        return JSONResponse({"accepted": True}, status_code=202)

    return [Route("/api/signals", signal, methods=["POST"])]


async def _body(request: Request) -> dict[str, Any]:
    """The signal's fields. Raises HTTPException 400 or 413 for anything that it should not be."""
    body = await object_of(request)
    for name, value in body.items():
        if name in TEXTS:
            fine = isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable()
        elif name in WHOLE:
            fine = type(value) is int and 0 <= value < 1 << 31
        elif name in NUMBERS:
            fine = type(value) in (int, float) and abs(value) < 1e18
        else:
            raise HTTPException(400, f"unknown field {name[:40]!r}")
        if not fine:
            raise HTTPException(400, f"{name} makes no sense")
    for name in ("node", "source", "kind", "severity"):
        if not body.get(name):
            raise HTTPException(400, f"{name} is missing")
    if body["severity"] not in SEVERITIES:
        raise HTTPException(400, f"severity must be one of {', '.join(SEVERITIES)}")
    return body

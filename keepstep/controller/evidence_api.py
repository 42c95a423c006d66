"""What people fetch from nodes through the controller: evidence of incidents, lines of logs. It reads only."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

if TYPE_CHECKING:
    from keepstep.controller.shell import Controller

ANSWER_TIMEOUT_S = 20.0
MAX_ABOUT_BYTES = 48 << 10


def routes(controller: Controller) -> list[BaseRoute]:
    """`/api/incidents/N/evidence/NODE` and `/api/nodes/NODE/logs?about=JSON`."""

    async def evidence(request: Request) -> Response:
        number, node = request.path_params["number"], request.path_params["node"]
        if controller.incidents.get(number) is None:
            raise HTTPException(404, f"there is no incident {number}")
        return await _from(controller, node, "evidence-files", {"incident": number}, "application/gzip")

    async def logs(request: Request) -> Response:
        about = _about(request.query_params.get("about", "{}"))
        return await _from(controller, request.path_params["node"], "logs", about, "application/json")

    return [
        Route("/api/incidents/{number:int}/evidence/{node}", evidence),
        Route("/api/nodes/{node}/logs", logs),
    ]


async def _from(
    controller: Controller, node: str, what: str, about: dict[str, Any], media_type: str
) -> Response:
    answer = await controller.ask(node, what, about, ANSWER_TIMEOUT_S)
    if not answer.ok:
        raise HTTPException(404 if "there is no node" in answer.detail else 503, answer.detail)
    return Response(answer.data, media_type=media_type)


def _about(text: str) -> dict[str, Any]:
    if len(text) > MAX_ABOUT_BYTES:
        raise HTTPException(413, "the question is too large")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise HTTPException(400, "`about` is not JSON") from None
    if not isinstance(value, dict):
        raise HTTPException(400, "`about` must be an object")
    value.setdefault("cursors", {})
    return value

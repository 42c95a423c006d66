"""What `keepstep migrate`, `drain` and `undrain` ask for: requests about planned moves, refused with one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from keepstep.controller.bodies import object_of
from keepstep.core.move_events import DrainRequested, MoveRequested, UndrainRequested

if TYPE_CHECKING:
    from keepstep.controller.shell import Controller

MAX_TEXT = 500


def routes(controller: Controller) -> list[BaseRoute]:
    """`POST /api/moves`, `/api/drains` and `/api/undrains`; 409 with the reason when it cannot be done."""

    def put(event: MoveRequested | DrainRequested | UndrainRequested) -> Response:
        refusal = controller.request(event)
        if refusal is not None:
            raise HTTPException(409, refusal)
        return JSONResponse({"accepted": True}, status_code=202)

    async def move(request: Request) -> Response:
        body = await _body(request, required=("rank",), texts=("to", "reason", "by"))
        return put(MoveRequested(**body))

    async def drain(request: Request) -> Response:
        return put(DrainRequested(**await _body(request, required=("node",), texts=("node", "reason", "by"))))

    async def undrain(request: Request) -> Response:
        return put(UndrainRequested(**await _body(request, required=("node",), texts=("node",))))

    return [
        Route("/api/moves", move, methods=["POST"]),
        Route("/api/drains", drain, methods=["POST"]),
        Route("/api/undrains", undrain, methods=["POST"]),
    ]


async def _body(request: Request, *, required: tuple[str, ...], texts: tuple[str, ...]) -> dict[str, Any]:
    """The request's JSON object. Raises HTTPException 400 or 413 for anything that it should not be."""
    body = await object_of(request)
    for name, value in body.items():
        if name == "rank" and "rank" in required:
            if type(value) is not int:
                raise HTTPException(400, "rank must be a whole number")
        elif name not in texts:
            raise HTTPException(400, f"unknown field {name[:40]!r}")
        elif not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
            raise HTTPException(400, f"{name} must be a line of at most {MAX_TEXT} characters")
    for name in required:
        if name not in body:
            raise HTTPException(400, f"{name} is missing")
    return body

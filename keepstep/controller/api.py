"""The controller's HTTP API: read the job's state, ask it to stop. Every request shows a token."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from keepstep.controller import evidence_api, measure_api, move_api, signal_api
from keepstep.controller.agents import same_token
from keepstep.controller.bodies import body_of, parsed
from keepstep.controller.metrics import CONTENT_TYPE
from keepstep.wire.tokens import read_token

if TYPE_CHECKING:
    from keepstep.controller.shell import Controller


def build_app(controller: Controller, *, open_metrics: bool = False) -> Starlette:
    """All routes of one controller. `open_metrics`: this machine's processes need no token for /metrics."""

    async def status(request: Request) -> Response:
        return JSONResponse(controller.status())

    async def incidents(request: Request) -> Response:
        return JSONResponse({"job": controller.spec.job, "incidents": controller.incidents.all()})

    async def incident(request: Request) -> Response:
        number = request.path_params["number"]
        found = controller.incidents.get(number)
        if found is None:
            raise HTTPException(404, f"there is no incident {number}")
        return JSONResponse(found)

    async def replicas(request: Request) -> Response:
        return JSONResponse(controller.replicas())

    async def metrics(request: Request) -> Response:
        return Response(controller.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def stop(request: Request) -> Response:
        hard = await _hard(request)
        controller.request_stop("API", hard=hard)
        return JSONResponse({"stopping": True, "hard": hard}, status_code=202)

    app = Starlette(
        routes=[
            Route("/api/status", status),
            Route("/api/incidents", incidents),
            Route("/api/incidents/{number:int}", incident),
            Route("/api/replicas", replicas),
            Route("/metrics", metrics),
            Route("/api/stop", stop, methods=["POST"]),
            *evidence_api.routes(controller),
            *measure_api.routes(controller),
            *move_api.routes(controller),
            *signal_api.routes(controller),
            WebSocketRoute("/agent", controller.serve_agent),
        ],
        exception_handlers={HTTPException: _error},
    )
    app.add_middleware(_RequireToken, token=controller.token, open_metrics=open_metrics)
    return app


async def _hard(request: Request) -> bool:
    """`{"hard": true}` or nothing. Anything else is refused with 400."""
    body = await body_of(request)
    if not body:
        return False
    value = parsed(body)
    if not isinstance(value, dict) or set(value) - {"hard"} or not isinstance(value.get("hard", False), bool):
        raise HTTPException(400, 'expected {"hard": true or false}')
    return bool(value.get("hard", False))


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code, headers=error.headers)


class _RequireToken:
    """Answers 401 without a token of this job, 403 when the reader's token asks for more than to read.

    Agents show theirs in their first message.
    """

    def __init__(self, app: ASGIApp, token: str, open_metrics: bool) -> None:
        self._app = app
        self._open_metrics = open_metrics
        self._token = token
        self._read_token = read_token(token)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(Request(scope))) is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        if self._open_metrics and request.url.path == "/metrics" and _is_of_this_machine(request):
            return None
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        # Both are always compared, so that the time taken tells nothing.
        full = same_token(shown.strip(), self._token)
        reader = same_token(shown.strip(), self._read_token)
        if scheme.lower() != "bearer" or not (full or reader):
            headers = {"WWW-Authenticate": "Bearer"}
            return JSONResponse({"error": "this job's token is missing or wrong"}, 401, headers)
        if not full and request.method not in ("GET", "HEAD"):
            return JSONResponse({"error": "this token may only read: changes need the job's own token"}, 403)
        return None


def _is_of_this_machine(request: Request) -> bool:
    """By the address it comes from: loopback has no strangers but other users of the machine."""
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False

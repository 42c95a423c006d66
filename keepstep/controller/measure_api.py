"""What `keepstep doctor --join` asks: the controller's clock, and clocks and network of the nodes."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from keepstep.controller.measuring import measure_clocks, measure_network

if TYPE_CHECKING:
    from keepstep.controller.shell import Controller

TIMEOUT_S = 15.0


def routes(controller: Controller) -> list[BaseRoute]:
    """`GET /api/clock`; `POST /api/network`, which keeps the network busy for a few seconds, one at a time."""
    measuring = asyncio.Lock()

    async def clock(request: Request) -> Response:
        return JSONResponse({"ns": time.time_ns()})

    async def network(request: Request) -> Response:
        if measuring.locked():
            raise HTTPException(409, "the network is being measured already: ask again in a few seconds")
        async with measuring:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    clocks = await measure_clocks(controller)
                    links = await measure_network(controller)
            except TimeoutError:
                raise HTTPException(503, f"the nodes did not answer within {TIMEOUT_S:g} s") from None
        return JSONResponse({"nodes": sorted(controller.nodes), "clocks": clocks, "links": links})

    return [Route("/api/clock", clock), Route("/api/network", network, methods=["POST"])]

"""Clocks and network between the nodes, measured through their agents when somebody asks.

It brings agents together and takes their answers; whether a figure is good is judged elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from keepstep.core.actions import MeasureLink
from keepstep.core.events import LinkMeasured
from keepstep.wire.messages import Answer

BYTES = 64 << 20
SECONDS = 1.5
ANSWER_TIMEOUT_S = 10.0
CLOCK_TIMEOUT_S = 2.0
CLOCK_TRIES = 5
SECRET_BYTES = 32


class Asking(Protocol):
    """What is needed of the controller."""

    @property
    def nodes(self) -> tuple[str, ...]: ...

    async def ask(self, node: str, what: str, about: Mapping[str, Any], timeout_s: float) -> Answer: ...


async def link_measured(controller: Asking, order: MeasureLink) -> LinkMeasured:
    """What came of the core's order, as an event. Never raises."""
    link = await measure_link(controller, order.node, order.to)
    return LinkMeasured(
        node=order.node,
        to=order.to,
        bytes_per_s=int(link["bytes_per_s"] or 0),
        latency_s=link["latency_s"] or 0.0,
        detail=link["detail"],
    )


async def measure_link(
    controller: Asking, node: str, to: str, *, most_bytes: int = BYTES, seconds: float = SECONDS
) -> dict[str, Any]:
    """How fast `node` sends to `to`: `bytes_per_s`, `latency_s` of a round trip; or `detail`, why not. Never raises."""
    link: dict[str, Any] = {"from": node, "to": to, "bytes_per_s": None, "latency_s": None, "detail": ""}
    secret = secrets.token_hex(SECRET_BYTES)
    place = await controller.ask(to, "link.listen", {"secret": secret}, ANSWER_TIMEOUT_S)
    if not place.ok:
        return {**link, "detail": f"{to} cannot be measured: {place.detail}"}
    about = {**json.loads(place.data), "secret": secret, "bytes": most_bytes, "seconds": seconds}
    answer = await controller.ask(node, "link.send", about, ANSWER_TIMEOUT_S)
    if not answer.ok:
        return {
            **link,
            "detail": f"cannot send to {to} ({about['host']} port {about['port']}): {answer.detail}",
        }
    found = json.loads(answer.data)
    rate = found["bytes"] / found["seconds"] if found["seconds"] else 0.0
    return {**link, "bytes_per_s": rate, "latency_s": found["latency_s"]}


async def measure_network(controller: Asking) -> list[dict[str, Any]]:
    """Each node to the next one, in a ring: every node sends once and receives once, few at the same time."""
    nodes = sorted(controller.nodes)
    if len(nodes) < 2:
        return []
    pairs = [(node, nodes[(index + 1) % len(nodes)]) for index, node in enumerate(nodes)]
    found: list[dict[str, Any]] = []
    for round_ in _rounds(pairs):
        found += await asyncio.gather(*(measure_link(controller, *pair) for pair in round_))
    return found


def _rounds(pairs: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """No node sends and receives in one round, so that no measurement disturbs another."""
    rounds = [list(pairs[0::2]), list(pairs[1::2])]
    if len(pairs) % 2:  # the last one shares a node with the first
        rounds.append([rounds[0].pop()])
    return [round_ for round_ in rounds if round_]


async def measure_clocks(controller: Asking) -> list[dict[str, Any]]:
    """By node: how far its clock is ahead of this machine's, at most `error_s` wrong. Never raises."""
    return list(await asyncio.gather(*(_clock(controller, node) for node in sorted(controller.nodes))))


async def _clock(controller: Asking, node: str) -> dict[str, Any]:
    best: dict[str, Any] = {"node": node, "ahead_s": None, "error_s": None, "detail": ""}
    for _ in range(CLOCK_TRIES):
        before_ns = time.time_ns()
        answer = await controller.ask(node, "clock", {}, CLOCK_TIMEOUT_S)
        after_ns = time.time_ns()
        if not answer.ok:
            return {**best, "detail": answer.detail}
        error_s = (after_ns - before_ns) / 2e9
        if best["error_s"] is None or error_s < best["error_s"]:
            ahead_s = (json.loads(answer.data)["ns"] - (before_ns + after_ns) // 2) / 1e9
            best.update(ahead_s=ahead_s, error_s=error_s)
    return best

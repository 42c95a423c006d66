"""The rings of this node's workers, as the agent reads them: copies of memory first, sense later.

A worker that made no ring (an old library, no shared memory left) has none here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from keepstep.errors import WireError
from keepstep.wire.ring import Call, GroupLog, Ring, read, ring_path

# Of each group the newest calls travel to the controller, and those whose end nobody has seen.
TOLD_CALLS = 16
TOLD_OPEN_CALLS = 16


class Rings:
    """Opened when first asked for. `page_path`: where the page of a worker lies, None when it is gone."""

    def __init__(self, page_path: Callable[[int], str | None]) -> None:
        self._page_path = page_path
        self._opened: dict[int, Ring] = {}

    def copy(self, worker: int) -> bytes:
        """The ring's memory at this moment; empty when there is none."""
        ring = self._opened.get(worker) or self._open(worker)
        return ring.copy() if ring is not None else b""

    def forget_all_but(self, workers: set[int]) -> None:
        """Unmap the rings of workers that are not known any more."""
        for number in [number for number in self._opened if number not in workers]:
            self._opened.pop(number).close()

    def _open(self, worker: int) -> Ring | None:
        path = self._page_path(worker)
        if path is None:
            return None
        try:
            ring = Ring.open(ring_path(path))
        except (OSError, WireError):
            return None
        self._opened[worker] = ring
        return ring


def monotonic_offset_s() -> float:
    """Add it to a time of CLOCK_MONOTONIC to have Unix time."""
    return time.time() - time.monotonic()


def in_full(copied: bytes, offset_s: float) -> list[dict[str, Any]]:
    """Every group with its kept calls, for a file that people read."""
    return [
        {
            "group": log.label,
            "size": log.size,
            "rank_in_group": log.group_rank,
            "identity": log.identity,
            "calls": [_call_in_full(call, offset_s) for call in log.calls],
        }
        for log in read(copied)
    ]


def for_comparison(copied: bytes, generation: int) -> list[dict[str, Any]]:
    """What the controller compares between ranks: counts, and the newest calls of one generation."""
    return [_group_brief(log, generation) for log in read(copied)]


def _group_brief(log: GroupLog, generation: int) -> dict[str, Any]:
    calls = [call for call in log.calls if call.generation == generation]
    newest = calls[-TOLD_CALLS:]
    unended = [call for call in calls[:-TOLD_CALLS] if _is_open(call)][:TOLD_OPEN_CALLS]
    return {
        "identity": log.identity,
        "label": log.label,
        "size": log.size,
        "group_rank": log.group_rank,
        "entered": log.entered(generation),
        "calls": [
            [call.sequence, call.operation, call.bytes, _is_open(call), call.peer]
            for call in (*unended, *newest)
        ],
    }


def _is_open(call: Call) -> bool:
    return call.failed or not call.ended_ns


def _call_in_full(call: Call, offset_s: float) -> dict[str, Any]:
    told: dict[str, Any] = {
        "sequence": call.sequence,
        "operation": call.operation,
        "bytes": call.bytes,
        "generation": call.generation,
        "entered_s": round(call.entered_ns / 1e9 + offset_s, 6),
        "state": "failed" if call.failed else "ended" if call.ended_ns else "not seen to end",
    }
    if call.ended_ns:
        told["lasted_s"] = round((call.ended_ns - call.entered_ns) / 1e9, 6)
    if call.peer is not None:
        told["peer"] = call.peer
    return told

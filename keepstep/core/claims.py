"""What a report claims and cannot be true: a rank that does not exist, a generation of the future, a negative size.

Pure; who sent it, and what follows, is the caller's affair. What is merely unlikely is believed.
"""

from __future__ import annotations

from typing import Any

MOST_STEPS = 1 << 53  # as far as JSON's numbers are whole everywhere
MOST_BYTES = 1 << 60
MOST_SECONDS = 1e9
_COUNTS = {"step": MOST_STEPS, "published": MOST_STEPS, "recomputed": MOST_STEPS, "target": MOST_STEPS}
_SIZES = {"bytes": MOST_BYTES, "free_bytes": MOST_BYTES}
_OF_SEVERAL: dict[str, float] = {"steps": MOST_STEPS, "connected_s": MOST_SECONDS, "voted_s": MOST_SECONDS}
_SPANS = ("connect_s", "vote_s", "transfer_s", "seconds")


def doubt(report: Any, *, world_size: int, newest: int | None) -> str | None:
    """Why the report cannot be true; None: it can. `newest`: the newest generation that was announced, if known."""
    generation = getattr(report, "generation", None)
    if generation is not None and generation < 0:
        return f"there is no generation {generation}"
    if generation is not None and newest is not None and generation > newest:
        return f"generation {generation} was never announced, the newest is {newest}"
    rank = getattr(report, "rank", None)
    if rank is not None and not 0 <= rank < world_size:
        return f"there is no rank {rank} in a world of {world_size}"
    for name, most in (*_COUNTS.items(), *_SIZES.items()):
        value = getattr(report, name, None)
        if value is not None and not 0 <= value <= most:
            return f"{name} cannot be {value}"
    for name, limit in _OF_SEVERAL.items():
        for worker, value in (getattr(report, name, None) or {}).items():
            if not 0 <= value <= limit:
                return f"{name} of worker {worker} cannot be {value}"
    for name in _SPANS:
        seconds = getattr(report, name, None)
        if seconds is not None and not 0 <= seconds <= MOST_SECONDS:
            return f"{name} cannot be {seconds}"
    return None

"""Which source sends which bytes: stripes over all live sources, planned again when one dies.

Pure arithmetic. It knows neither tensors nor sockets: a piece is a number and a size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Stripe:
    """`length` bytes of piece number `piece`, from byte `offset`, to come from source number `source`."""

    source: int
    piece: int
    offset: int
    length: int


def plan_stripes(sizes_bytes: Sequence[int], sources: Sequence[int], chunk_bytes: int) -> list[Stripe]:
    """Every byte of every piece exactly once, in stripes of at most `chunk_bytes`.

    Each source gets one run of neighbours, and no two differ by more than one chunk. Raises ValueError
    (no source although there are bytes, a source named twice, a size or `chunk_bytes` out of range).
    """
    _check_sources(sources)
    if chunk_bytes <= 0 or any(size < 0 for size in sizes_bytes):
        raise ValueError(f"sizes must not be negative and chunks not empty: {chunk_bytes=}")
    total = sum(sizes_bytes)
    if total and not sources:
        raise ValueError(f"{total} bytes to copy and no source")
    stripes: list[Stripe] = []
    before = 0
    for piece, size in enumerate(sizes_bytes):
        for offset in range(0, size, chunk_bytes):
            length = min(chunk_bytes, size - offset)
            share = (2 * before + length) * len(sources) // (2 * total)  # where the stripe's middle falls
            stripes.append(Stripe(sources[share], piece, offset, length))
            before += length
    return stripes


def replan(remaining: Iterable[Stripe], sources: Sequence[int]) -> list[Stripe]:
    """The same stripes for the `sources` still alive: orphans go, largest first, to whoever has least to send.

    A stripe whose source lives keeps it. Raises ValueError when stripes remain and no source does.
    """
    _check_sources(sources)
    stripes = list(remaining)
    if stripes and not sources:
        raise ValueError(f"{len(stripes)} stripes remain and no source")
    load = dict.fromkeys(sources, 0)
    for stripe in stripes:
        if stripe.source in load:
            load[stripe.source] += stripe.length
    orphans = [index for index, stripe in enumerate(stripes) if stripe.source not in load]
    for index in sorted(orphans, key=lambda index: -stripes[index].length):
        heir = min(load, key=lambda source: load[source])  # ties: the first in `sources`
        load[heir] += stripes[index].length
        stripes[index] = replace(stripes[index], source=heir)
    return stripes


def _check_sources(sources: Sequence[int]) -> None:
    if len(set(sources)) != len(sources):
        raise ValueError(f"a source is named twice: {list(sources)}")

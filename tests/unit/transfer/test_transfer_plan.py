"""The plan's promises: every byte exactly once, from a live source, evenly."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.transfer_plan import Stripe, plan_stripes, replan

sizes = st.lists(st.integers(0, 5000), max_size=12)
source_sets = st.sets(st.integers(0, 50), min_size=1, max_size=6).map(list)
chunks = st.integers(50, 3000)


def covered(stripes: list[Stripe]) -> dict[int, int]:
    """Bytes per piece; fails on a byte that comes twice, or is left out in the middle."""
    ends: Counter[int] = Counter()
    for stripe in sorted(stripes, key=lambda stripe: (stripe.piece, stripe.offset)):
        assert stripe.offset == ends[stripe.piece] and stripe.length > 0
        ends[stripe.piece] += stripe.length
    return dict(ends)


def loads(stripes: list[Stripe], sources: list[int]) -> dict[int, int]:
    load = dict.fromkeys(sources, 0)
    for stripe in stripes:
        load[stripe.source] += stripe.length
    return load


@settings(max_examples=50)
@given(sizes, source_sets, chunks)
def test_every_byte_is_planned_exactly_once_in_bounded_chunks(
    sizes_bytes: list[int], sources: list[int], chunk: int
) -> None:
    stripes = plan_stripes(sizes_bytes, sources, chunk)
    assert covered(stripes) == {piece: size for piece, size in enumerate(sizes_bytes) if size}
    assert all(stripe.length <= chunk and stripe.source in sources for stripe in stripes)


@settings(max_examples=50)
@given(sizes, source_sets, chunks)
def test_sources_share_evenly_and_in_runs(sizes_bytes: list[int], sources: list[int], chunk: int) -> None:
    stripes = plan_stripes(sizes_bytes, sources, chunk)
    load = loads(stripes, sources)
    assert max(load.values()) - min(load.values()) <= 2 * chunk
    order = list(dict.fromkeys(stripe.source for stripe in stripes))
    assert [stripe.source for stripe in stripes] == sorted(
        (stripe.source for stripe in stripes), key=lambda source: order.index(source)
    )


@settings(max_examples=50)
@given(sizes, source_sets, chunks, st.data())
def test_after_deaths_the_remaining_bytes_come_exactly_once_from_the_living(
    sizes_bytes: list[int], sources: list[int], chunk: int, data: st.DataObject
) -> None:
    plan = plan_stripes(sizes_bytes, sources, chunk)
    remaining = [stripe for stripe in plan if data.draw(st.booleans())]
    living = data.draw(st.lists(st.sampled_from(sources), min_size=1, unique=True))
    again = replan(remaining, living)
    place = [(stripe.piece, stripe.offset, stripe.length) for stripe in remaining]
    assert [(stripe.piece, stripe.offset, stripe.length) for stripe in again] == place
    assert all(stripe.source in living for stripe in again)
    kept = [(old, new) for old, new in zip(remaining, again, strict=True) if old.source in living]
    assert all(old == new for old, new in kept)
    before, after = loads([old for old, _ in kept], living), loads(again, living)
    gained = [source for source in living if after[source] > before[source]]
    if gained:  # whoever took over was not busier than the least busy afterwards, up to one chunk
        assert max(after[source] for source in gained) - min(after.values()) <= chunk


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ValueError, match="no source"):
        plan_stripes([1], [], 10)
    with pytest.raises(ValueError, match="twice"):
        plan_stripes([1], [3, 3], 10)
    for sizes_bytes, chunk in (([-1], 10), ([1], 0)):
        with pytest.raises(ValueError, match="negative"):
            plan_stripes(sizes_bytes, [0], chunk)
    with pytest.raises(ValueError, match="1 stripes remain"):
        replan([Stripe(0, 0, 0, 1)], [])
    assert plan_stripes([], [], 10) == plan_stripes([0, 0], [1], 10) == replan([], []) == []

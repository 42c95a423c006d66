"""A change is the announcement it stands for, and never fits another generation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.actions import Announce
from keepstep.core.types import Generation
from keepstep.errors import WireError
from keepstep.wire.changes import change_between, changed
from keepstep.wire.codec import decode, encode
from keepstep.wire.messages import AnnounceChange

NAMES = st.sampled_from(["a", "b", "c", "d"])
MAPS = st.dictionaries(NAMES, NAMES)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Announce, Announce]:
    size = draw(st.integers(1, 5))
    workers = st.lists(st.integers(0, 20), min_size=size, max_size=size, unique=True)
    made = []
    for number in (3, draw(st.integers(3, 6))):
        generation = Generation(
            number=number,
            ranks=tuple(draw(workers)),
            donors=draw(st.dictionaries(st.integers(30, 33), st.just(0))),
            store=draw(NAMES),
        )
        made.append(Announce(generation=generation, reason=draw(NAMES), peers=draw(MAPS), keepers=draw(MAPS)))
    return made[0], made[1]


@given(pairs())
def test_a_change_over_the_wire_is_the_whole_announcement(pair: tuple[Announce, Announce]) -> None:
    old, new = pair
    change = change_between(old, new)
    assert change is not None
    assert changed(old, decode(encode(change))) == new


def test_another_world_is_told_whole() -> None:
    old = Announce(generation=Generation(number=1, ranks=(1, 2)), reason="")
    assert (
        change_between(old, Announce(generation=Generation(number=2, ranks=(3, 4), fresh=True), reason=""))
        is None
    )
    assert change_between(old, Announce(generation=Generation(number=2, ranks=(3,)), reason="")) is None


@pytest.mark.parametrize("known", [None, 4])
def test_a_change_of_an_unknown_generation_is_refused(known: int | None) -> None:
    change = AnnounceChange(base=5, number=6, ranks={}, donors={}, planned=False, store="", reason="")
    old = None if known is None else Announce(generation=Generation(number=known, ranks=(1,)), reason="")
    with pytest.raises(WireError, match="does not fit"):
        changed(old, change)


def test_a_rank_that_does_not_exist_is_refused() -> None:
    old = Announce(generation=Generation(number=5, ranks=(1,)), reason="")
    change = AnnounceChange(base=5, number=6, ranks={1: 9}, donors={}, planned=False, store="", reason="")
    with pytest.raises(WireError, match="rank 1 of 1"):
        changed(old, change)

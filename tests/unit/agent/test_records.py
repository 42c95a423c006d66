"""Which record a replacement gets, and why it gets none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.agent.announcements import Announcements
from keepstep.agent.records import Records
from keepstep.core.actions import Announce
from keepstep.core.types import Generation
from keepstep.wire.messages import Fetch, Fetched
from keepstep.wire.page import Page

A, B = "a" * 32, "b" * 32


class Kept:
    def __init__(self, folder: Path) -> None:
        self.known = Announcements()
        self.pages: dict[int, Page] = {}
        self.records = Records(self.known, self.pages.get)
        self._folder = folder

    def announce(self, number: int, *ranks: int, **fields: Any) -> None:
        self.known.accept(
            Announce(generation=Generation(number=number, ranks=ranks, **fields), reason="test")
        )
        for worker in ranks:
            if worker not in self.pages:
                self.pages[worker] = Page.create(str(self._folder / f"{worker}"), worker, 1 << 16)

    def fetch(self, rank: int, lineage: str) -> Fetched:
        return self.records.fetch(Fetch(request=1, what="record", rank=rank, lineage=lineage))


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    made = Kept(tmp_path)
    yield made
    for page in made.pages.values():
        page.close()


def test_the_newest_player_of_the_rank_is_asked_first(kept: Kept) -> None:
    kept.announce(0, 0, 1)
    kept.announce(1, 0, 2)
    kept.pages[1].write_record("start", 3, A, b"old")
    kept.pages[2].write_record("start", 3, A, b"new")
    assert kept.fetch(1, A).data == b"new"


def test_a_record_of_a_start_is_preferred_wherever_it_lies(kept: Kept) -> None:
    kept.announce(0, 0, 1)
    kept.announce(1, 0, 2)
    kept.pages[1].write_record("start", 3, A, b"start")
    kept.pages[2].write_record("gate", 3, A, b"gate")
    found = kept.fetch(1, A)
    assert found.data == b"start" and found.detail == "start of step 3, kept by worker 1"


def test_another_ranks_record_or_lineage_is_never_given(kept: Kept) -> None:
    kept.announce(0, 0, 1)
    kept.pages[0].write_record("start", 3, A, b"rank 0")
    kept.pages[1].write_record("start", 3, B, b"other lineage")
    found = kept.fetch(1, A)
    assert found.data is None and "kept are steps [3]" in found.detail
    assert kept.fetch(5, A).detail == "rank 5 was never played in this world"


def test_a_fresh_world_does_not_see_the_records_of_the_one_before(kept: Kept) -> None:
    kept.announce(0, 0, 1)
    kept.pages[1].write_record("start", 0, "", b"first world")
    kept.announce(1, 2, 3, fresh=True)
    assert kept.fetch(1, "").data is None

"""Which record a replacement gets, and why it gets none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.agent.announcements import Announcements
from keepstep.agent.kept import KeptRecords
from keepstep.agent.records import Found, Records
from keepstep.core.actions import Announce
from keepstep.core.types import Generation
from keepstep.wire.keeping import RecordSent
from keepstep.wire.messages import PeerFetch
from keepstep.wire.page import Page

A, B = "a" * 32, "b" * 32


class Kept:
    def __init__(self, folder: Path) -> None:
        self.known = Announcements()
        self.pages: dict[int, Page] = {}
        self.kept = KeptRecords()
        self.records = Records(self.known, self.pages.get, self.kept)
        self._folder = folder

    def announce(self, number: int, *ranks: int, **fields: Any) -> None:
        self.known.accept(
            Announce(generation=Generation(number=number, ranks=ranks, **fields), reason="test")
        )
        for worker in ranks:
            if worker not in self.pages:
                self.pages[worker] = Page.create(str(self._folder / f"{worker}"), worker, 1 << 16)

    def find(self, rank: int, lineage: str) -> Found:
        found = self.records.find(rank, lineage)
        assert found is not None
        return found

    def send(self, worker: int, rank: int, kind: str, step: int, lineage: str, **fields: Any) -> None:
        """A worker of another node hands a record over."""
        values = {"sequence": 1, "generation": self.known.generation or 0, "payload": b"sent"} | fields
        record = RecordSent(rank=rank, kind=kind, step=step, lineage=lineage, **values)
        assert self.kept.keep(worker, record)


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
    assert kept.find(1, A).data == b"new"


def test_a_record_of_a_start_is_preferred_wherever_it_lies(kept: Kept) -> None:
    kept.announce(0, 0, 1)
    kept.announce(1, 0, 2)
    kept.pages[1].write_record("start", 3, A, b"start")
    kept.pages[2].write_record("gate", 3, A, b"gate")
    found = kept.find(1, A)
    assert found.data == b"start" and found.describe() == "start of step 3, kept by worker 1"


def test_another_ranks_record_or_lineage_is_never_given(kept: Kept) -> None:
    kept.announce(0, 0, 1)
    kept.pages[0].write_record("start", 3, A, b"rank 0")
    kept.pages[1].write_record("start", 3, B, b"other lineage")
    kept.send(7, 0, "start", 4, A)
    assert kept.records.find(1, A) is None and kept.records.steps(1) == (3,)
    assert kept.records.find(5, A) is None and kept.records.steps(5) == ()


def test_a_fresh_world_does_not_see_the_records_of_the_one_before(kept: Kept) -> None:
    kept.announce(0, 0, 1)
    kept.pages[1].write_record("start", 0, "", b"first world")
    kept.send(1, 1, "start", 0, "")
    kept.announce(1, 2, 3, fresh=True)
    kept.kept.announce(1, fresh=True, published=0)
    assert kept.records.find(1, "") is None


def test_what_another_nodes_worker_sent_is_found_beside_the_pages(kept: Kept) -> None:
    kept.announce(0, 0, 1)
    kept.send(1, 1, "gate", 3, A, payload=b"kept")
    assert kept.find(1, A).data == b"kept" and not kept.find(1, A).final
    kept.send(1, 1, "gate", 4, B)
    assert kept.find(1, A).final  # it went on to the next step: nothing about this one can be missing
    kept.pages[0].write_record("gate", 3, A, b"page of rank 0")
    kept.send(1, 1, "start", 3, A, payload=b"kept start")
    assert kept.find(1, A).data == b"kept start"


def test_an_agent_that_is_behind_answers_nothing_about_a_newer_world(kept: Kept) -> None:
    kept.announce(0, 0, 1)
    kept.send(1, 1, "start", 0, "")
    ask = PeerFetch(what="record", rank=1, lineage="", fresh_since=0)
    assert kept.records.answer(ask).data == b"sent"
    newer = PeerFetch(what="record", rank=1, lineage="", fresh_since=2)
    assert kept.records.answer(newer).data is None

"""A record that cannot be kept costs protection, not the training; in the first steps it is refused."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from keepstep.core.events import SelfCheckFailed, SelfCheckPassed
from keepstep.errors import UsageError
from keepstep.trainer.adapters.protected import Protected
from keepstep.trainer.checks import HELD_BEFORE_PASSED, Checks
from keepstep.trainer.record import Recorder
from keepstep.wire.page import Page

LINEAGE = "0" * 32


class Rank:
    """A recorder with a dict of its own, and what its checks told."""

    def __init__(self, folder: Path, limit: int = 64 << 10) -> None:
        self.told: list[object] = []
        self.own = {"text": ""}
        protected = Protected()
        protected.add_per_rank(own=self.own)
        self.page = Page.create(str(folder / "page"), 7, 1 << 20)
        self.recorder = Recorder(self.page, protected, limit, Checks(7, self.told.append, lambda text: None))

    def step(self, number: int) -> None:
        self.recorder.write_gate(number, LINEAGE, None, 0)


def test_a_record_above_the_limit_is_refused_at_first_and_costs_protection_later(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.own["text"] = "x" * 100_000
    with pytest.raises(UsageError, match="--record-limit"):
        rank.step(2)
    rank.own["text"] = ""
    rank.step(9)
    assert rank.told == [] and rank.page.sums().record_bytes > 0
    rank.own["text"] = "x" * 100_000
    for number in range(10, 13):
        rank.step(number)
    [failed] = rank.told
    assert isinstance(failed, SelfCheckFailed) and failed.worker == 7 and failed.step == 10
    assert "the limit is 65536" in failed.reason and "per rank own" in failed.reason


def test_a_full_memory_is_told_once_and_again_when_records_are_kept_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(tmp_path)
    rank.step(1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(rank.page, "write_record", full)
        for number in (2, 3):
            rank.step(number)
    assert [type(event) for event in rank.told] == [SelfCheckFailed]
    for number in range(4, 4 + HELD_BEFORE_PASSED - 1):
        rank.step(number)
    assert len(rank.told) == 1, "not believed at once"
    rank.step(99)
    assert rank.told[1:] == [SelfCheckPassed(worker=7, check="record")]

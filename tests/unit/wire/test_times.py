"""Moments between machines: their clocks differ by years, and a liar cannot place evidence in the future."""

from __future__ import annotations

import pytest

from keepstep.core.events import Complained, WorkerExited
from keepstep.wire.times import aged, placed


def test_a_moment_keeps_its_age_whatever_the_two_clocks_say() -> None:
    event = WorkerExited(worker=1, status=-9, first_evidence_s=1_000_000.0)
    sent = aged(event, 1_000_002.5)
    assert sent.first_evidence_s == -2.5
    assert placed(sent, 40.0).first_evidence_s == pytest.approx(37.5)


def test_nothing_is_seen_before_it_happens() -> None:
    event = WorkerExited(worker=1, status=-9, first_evidence_s=7.0)
    assert aged(event, 3.0).first_evidence_s == 0.0
    assert placed(event, 3.0).first_evidence_s == 3.0


def test_messages_without_a_moment_stay_as_they_are() -> None:
    plain = Complained(worker=1, generation=0, reason="r")
    unknown = WorkerExited(worker=1, status=0)
    for message in (plain, unknown):
        assert aged(message, 5.0) is message is placed(message, 5.0)

"""A record arrives whole whatever changed, only the change travels, and no bytes can do harm."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import WireError
from keepstep.wire.keeping import RecordSent, changed_ranges, pack_ack, pack_record, unpack_ack, unpack_record


def record(payload: bytes, sequence: int = 1, **changed: object) -> RecordSent:
    values: dict = {"rank": 3, "generation": 2, "kind": "gate", "step": 7, "lineage": "ab" * 16}
    return RecordSent(sequence=sequence, payload=payload, **(values | changed))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=4000), st.binary(max_size=4000))
def test_any_record_after_any_other_arrives_as_it_was(before: bytes, after: bytes) -> None:
    sent = record(after, lineage="", kind="start")
    assert unpack_record(pack_record(sent, before), before) == sent


def test_only_what_changed_travels_though_the_front_grows() -> None:
    noise = random.Random(0).randbytes(1 << 20)
    before, changed = b"step 9" + noise, bytearray(b"step 10" + noise)
    changed[500_000] ^= 1
    frame = pack_record(record(bytes(changed)), before)
    assert len(frame) < 3 * (len(changed) // 512 + 100)
    assert unpack_record(frame, before).payload == changed
    assert changed_ranges(before, before) == []


def test_a_change_against_another_record_is_noticed() -> None:
    noise = random.Random(1).randbytes(5000)
    frame = pack_record(record(b"a" * 100 + noise), noise)
    for wrong in (b"", noise[:-1], noise[1:] + b"x", bytes(5000)):
        with pytest.raises(WireError):
            unpack_record(frame, wrong)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_bent_frames_end_as_one_error_or_as_the_record(data: st.DataObject) -> None:
    before = bytes(2000)
    sent = record(bytes(range(256)) * 8)
    frame = bytearray(pack_record(sent, before))
    for at in data.draw(st.lists(st.integers(0, len(frame) - 1), min_size=1, max_size=4)):
        frame[at] ^= data.draw(st.integers(1, 255))
    bent = bytes(frame[: data.draw(st.integers(0, len(frame)))])
    try:
        arrived = unpack_record(bent, before)
    except WireError:
        return
    assert arrived.payload == sent.payload


def test_an_acknowledgement_says_what_was_kept() -> None:
    assert unpack_ack(pack_ack(5, True)) == (5, True)
    assert unpack_ack(pack_ack(1 << 40, False)) == (1 << 40, False)
    with pytest.raises(WireError):
        unpack_ack(b"")

"""The codec's promises: every message survives the wire, and nothing but a message gets through."""

from __future__ import annotations

import dataclasses
import enum
import json
import random
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.core.actions import Announce, KillWorker
from keepstep.core.events import WorkerExited, WorkerParked, WorkerSuspected
from keepstep.core.types import Course, Generation, Lineage, Verdict, Vote
from keepstep.errors import WireError
from keepstep.wire.codec import MESSAGE_TYPES, decode, encode
from keepstep.wire.messages import Fetched, Hello, StoreReply, Welcome

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
INTS = st.integers(-(2**63), 2**63)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
PLAIN = st.recursive(
    st.none() | st.booleans() | INTS | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that the annotation allows."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    simple = {
        int: INTS,
        float: FLOATS,
        str: TEXT,
        bool: st.booleans(),
        bytes: st.binary(max_size=40),
        Any: PLAIN,
    }
    if hint in simple:
        return simple[hint]
    if hint is type(None):
        return st.none()
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values, args))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values(args[0]), max_size=4).map(tuple)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(list(hint))
    return messages_of(hint)


def messages_of(cls: type) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{field.name: values(hints[field.name]) for field in dataclasses.fields(cls)})


@pytest.mark.parametrize("name", sorted(MESSAGE_TYPES))
def test_every_message_survives_the_wire(name: str) -> None:
    @settings(max_examples=25, deadline=None, database=None)
    @given(messages_of(MESSAGE_TYPES[name]))
    def survives(message: object) -> None:
        assert decode(encode(message)) == message

    survives()


def test_events_actions_and_messages_are_all_known() -> None:
    for name in (
        "WorkerExited",
        "StopRequested",
        "Announce",
        "EndJob",
        "Vote",
        "Verdict",
        "Hello",
        "StoreReply",
    ):
        assert name in MESSAGE_TYPES


def test_nested_values_come_back_as_their_own_types() -> None:
    vote = Vote(worker=3, rank=1, shard="s", held_shard=None, step=4, lineage=Lineage("ab", 4, (0, 0, 1, 1)))
    verdict = Verdict(target=4, lineage=vote.lineage, courses={3: Course.KEEP}, checkpoint=None, reason="r")
    again = decode(encode(verdict))
    assert again == verdict and again.courses[3] is Course.KEEP and isinstance(again.lineage.tail, tuple)
    assert decode(encode(vote)) == vote


def test_an_enum_member_is_told_from_its_text_only_by_the_annotation() -> None:
    raw = json.loads(
        encode(Verdict(target=None, lineage=None, courses={1: Course.ROLL}, checkpoint=None, reason=""))
    )
    assert raw["courses"] == {"1": "roll"} and raw["type"] == "Verdict"


PARKED = {"type": "WorkerParked", "worker": 1, "readiness": "warm"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"type": "Nonsense"}, "unknown message type 'Nonsense'"),
        ({"type": None}, "unknown message type None"),
        ({"type": ["WorkerParked"]}, "unknown message type"),
        ({"type": "KeepstepError"}, "unknown message type"),
        ({"worker": "1"}, "WorkerParked.worker: expected a whole number, got text"),
        ({"worker": 1.0}, "expected a whole number"),
        ({"worker": True}, "expected a whole number"),
        ({"worker": None}, "got null"),
        ({"readiness": 7}, "WorkerParked.readiness: expected text"),
        ({"readiness": "\ud800"}, "not valid Unicode"),
        ({"extra": 1}, "has unknown field 'extra'"),
    ],
)
def test_a_wrong_field_is_one_clear_line(change: dict[str, Any], said: str) -> None:
    with pytest.raises(WireError) as caught:
        decode(json.dumps(PARKED | change).encode())
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_field_is_refused_even_when_it_has_a_default() -> None:
    raw = json.loads(encode(WorkerExited(worker=1, status=-9)))
    del raw["oom_killed"]
    with pytest.raises(WireError, match="WorkerExited lacks oom_killed"):
        decode(json.dumps(raw).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"3",
        b"{",
        b"null",
        b'{"type": "WorkerParked", "worker": 1, "worker": 2, "readiness": "warm"}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"type": "WorkerParked", "worker": ' + b"9" * 5000 + b', "readiness": "warm"}',
    ],
)
def test_what_is_no_message_is_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError) as caught:
        decode(data)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999"])
def test_a_number_that_is_not_finite_is_refused(number: str) -> None:
    text = encode(KillWorker(worker=1, reason="r", grace_s=0.25)).decode().replace("0.25", number)
    with pytest.raises(WireError):
        decode(text.encode())
    suspected = (
        encode(WorkerSuspected(worker=1, reason="r", evidence={"cpu": 0.25})).decode().replace("0.25", number)
    )
    with pytest.raises(WireError):
        decode(suspected.encode())


def test_the_sender_finds_its_own_mistake() -> None:
    with pytest.raises(WireError, match=r"WorkerParked\.worker: expected a whole number"):
        encode(WorkerParked(worker="1", readiness="warm"))  # type: ignore[arg-type]
    with pytest.raises(WireError, match="no message"):
        encode(object())
    with pytest.raises(WireError, match="not finite"):
        encode(KillWorker(worker=1, reason="", grace_s=float("nan")))
    with pytest.raises(WireError, match="JSON value"):
        encode(WorkerSuspected(worker=1, reason="", evidence={"what": object()}))
    with pytest.raises(WireError, match="whole number"):
        encode(Announce(generation=Generation(number=1, ranks=(None,)), reason=""))  # type: ignore[arg-type]


def test_text_of_the_machine_with_stray_surrogates_can_still_be_sent() -> None:
    message = decode(
        encode(WorkerSuspected(worker=1, reason="file caf\udce9.py", evidence={"log": "\udcff"}))
    )
    assert message.reason == "file caf\\udce9.py" and message.evidence == {"log": "\\udcff"}


def test_bytes_travel_as_base64_and_nothing_else_passes_for_it() -> None:
    assert decode(encode(Fetched(request=1, data=b"\x00\xff"))).data == b"\x00\xff"
    assert decode(encode(StoreReply(request=1, ok=True, values=(b"", b"a")))).values == (b"", b"a")
    for wrong in ("a", "!!!!", "é", 5, ["YQ=="]):
        raw = json.loads(encode(Fetched(request=1, data=b""))) | {"data": wrong}
        with pytest.raises(WireError):
            decode(json.dumps(raw).encode())


@pytest.mark.parametrize("key", ["01", "+1", " 1", "1_0", "x", "", "1.0", "９"])
def test_a_numbers_key_has_one_spelling(key: str) -> None:
    raw = json.loads(encode(Announce(generation=Generation(number=1, ranks=(1,), donors={5: 0}), reason="")))
    raw["generation"]["donors"] = {key: 0}
    with pytest.raises(WireError):
        decode(json.dumps(raw).encode())


def test_ten_thousand_random_inputs_give_a_message_or_a_wire_error() -> None:
    dice = random.Random(20261130)
    seeds = [
        encode(Hello(version=1, token="t", worker=3, pid=44, role="control")),
        encode(
            Welcome(job="j", world_size=4, record_bytes=4096, orphan_timeout_s=5.0, advertise="127.0.0.1")
        ),
        encode(Announce(generation=Generation(number=2, ranks=(0, 9), donors={4: 1}), reason="why")),
        encode(Verdict(target=1, lineage=Lineage(), courses={1: Course.KEEP}, checkpoint=None, reason="")),
        encode(WorkerSuspected(worker=1, reason="", evidence={"a": [1, {"b": None}]})),
    ]
    pieces = [
        b'"',
        b"{",
        b"}",
        b"[",
        b"null",
        b"-1",
        b"1e400",
        b"\\ud800",
        b"\xff",
        b"true",
        b",",
        b":",
        b"0",
    ]
    refused = 0
    for _ in range(10_000):
        if dice.random() < 0.2:
            data = dice.randbytes(dice.randrange(60))
        else:
            text = bytearray(dice.choice(seeds))
            for _ in range(dice.randrange(1, 5)):
                start = dice.randrange(len(text))
                text[start : start + dice.randrange(4)] = dice.choice(pieces)
            data = bytes(text)
        try:
            decode(data)
        except WireError:
            refused += 1
    assert refused > 5_000

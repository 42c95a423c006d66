"""Whatever bytes arrive, the decoders answer with a message or with one line that says what is wrong.

`KEEPSTEP_FUZZ=1000000 python -m pytest tests/unit/wire/test_fuzz.py --timeout 0` looks at a million inputs.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.core.actions import Announce
from keepstep.core.events import Complained, NodeProgressed, WorkerExited, WorkerSuspected
from keepstep.core.types import Generation
from keepstep.errors import WireError
from keepstep.wire.codec import MESSAGE_TYPES, decode, encode
from keepstep.wire.messages import AgentHello, Hello, StoreRequest

EXAMPLES = int(os.environ.get("KEEPSTEP_FUZZ", "10000"))
TIMEOUT_S = 0 if EXAMPLES > 10_000 else 300


def fuzz(share: float) -> settings:
    """So much of all inputs."""
    return settings(
        max_examples=int(share * EXAMPLES),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        derandomize=EXAMPLES <= 10_000,
    )


SEEDS: list[Any] = [
    Announce(generation=Generation(number=3, ranks=(4, 5), donors={7: 1}), reason="r", peers={"a": "b:1"}),
    AgentHello(version=2, token="t", node="n", slots=2, pid=3, advertise="127.0.0.1", exited={3: -9}),
    Hello(version=2, token="t", worker=1, pid=2, role="control"),
    StoreRequest(request=1, op="set", keys=("g1/a",), value=b"\x00\xff"),
    WorkerExited(worker=1, status=-9, first_evidence_s=1.5),
    WorkerSuspected(worker=1, reason="r", evidence={"a": [1, {"b": None}]}),
    NodeProgressed(node="n", generation=1, published=2, steps={1: 2}),
    Complained(worker=1, generation=2, reason="x"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def judged(data: bytes) -> None:
    """A message that can be told again, or a WireError of one line; never anything else."""
    try:
        message = decode(data)
    except WireError as error:
        complaint = str(error)
    else:
        assert type(message).__name__ in MESSAGE_TYPES
        assert decode(encode(message)) == message or message != message  # a NaN differs from itself
        return
    assert complaint and "\n" not in complaint and len(complaint) < 2000


@pytest.mark.timeout(TIMEOUT_S)
@fuzz(0.4)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    judged(data)


@pytest.mark.timeout(TIMEOUT_S)
@fuzz(0.5)
@given(
    st.sampled_from(SEEDS),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    st.integers(0, 400),
)
def test_a_message_with_bytes_changed_or_cut(seed: Any, changes: list[tuple[int, int]], length: int) -> None:
    data = bytearray(encode(seed))
    for at, value in changes:
        data[at % len(data)] = value
    judged(bytes(data[: max(1, length)] if length < len(data) else data))


@pytest.mark.timeout(TIMEOUT_S)
@fuzz(0.1)
@given(st.sampled_from(sorted(MESSAGE_TYPES)), st.data())
def test_a_message_whose_fields_are_anything(name: str, data: st.DataObject) -> None:
    fields = [field.name for field in dataclasses.fields(MESSAGE_TYPES[name])]
    body: dict[str, Any] = {"type": name}
    for field in data.draw(st.lists(st.sampled_from([*fields, "stranger"]), unique=True, max_size=6)):
        body[field] = data.draw(JSON)
    judged(json.dumps(body).encode())

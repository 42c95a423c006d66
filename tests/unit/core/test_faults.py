"""How faults are written and read."""

from __future__ import annotations

import pytest

from keepstep.core.faults import Fault, fault_from_mapping, parse_fault


@pytest.mark.parametrize(
    "text", ["rank=2,step=7,at=backward", "rank=0,step=0,at=random", "rank=1,step=3,at=gate,kind=stop"]
)
def test_a_fault_reads_back_as_it_is_written(text: str) -> None:
    assert str(parse_fault(text)) == text


def test_place_and_kind_have_defaults() -> None:
    assert parse_fault("rank=2, step=7") == Fault(rank=2, step=7, at="random", kind="kill")
    assert parse_fault("rank=2,step=7", kind="stop").kind == "stop"
    assert fault_from_mapping({"rank": 2, "step": 7, "kind": "stop"}).kind == "stop"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("rank=2", "step is missing"),
        ("step=2", "rank is missing"),
        ("rank=-1,step=2", "rank must be a whole number"),
        ("rank=1,step=x", "step must be a whole number"),
        ("rank=1,step=2,at=lunch", "no place of a step"),
        ("rank=1,step=2,kind=maim", "no fault"),
        ("rank=1,step=2,rank=3", "given twice"),
        ("rank=1,step=2,where=gate", "unknown name 'where'"),
        ("rank", "not NAME=VALUE"),
        ("", "not NAME=VALUE"),
    ],
)
def test_a_wrong_fault_is_refused_in_words(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_fault(text)

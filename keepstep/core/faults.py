"""Faults that tests, `prove` and benchmarks order: one vocabulary for virtual and real workers.

Only what a fault is and how it is written; who carries it out is no matter of this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PLACES = (
    "random",
    "forward",
    "backward",
    "gate",
    "after_gate",
    "update",
    "block_end",
    "between",
    "aside",
    "setup",
    "transfer_source",
    "transfer_target",
)
KINDS = ("kill", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Do `kind` to whoever plays `rank` in step `step` (0-based index) when it is `at` that place.

    `kind`: "kill" (SIGKILL) or "stop" (SIGSTOP). Raises ValueError, naming what is allowed.
    """

    rank: int
    step: int
    at: str = "random"
    kind: str = "kill"

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank must be 0 or more, not {self.rank}")
        if self.step < 0:
            raise ValueError(f"step must be 0 or more, not {self.step}")
        if self.at not in PLACES:
            raise ValueError(f"at={self.at!r} is no place of a step; one of: {', '.join(PLACES)}")
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is no fault; one of: {', '.join(KINDS)}")

    def __str__(self) -> str:
        tail = "" if self.kind == "kill" else f",kind={self.kind}"
        return f"rank={self.rank},step={self.step},at={self.at}{tail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFault:
    """The check of a spare finds its device bad: on a slot, or of one worker, from its `since`th check on.

    Written "slot=3,check=bad" or "worker=4,check=bad,since=2". Raises ValueError.
    """

    slot: int | None = None
    worker: int | None = None
    since: int = 1

    def __post_init__(self) -> None:
        if (self.slot is None) == (self.worker is None):
            raise ValueError("check=bad needs slot= or worker=, one of them")
        if self.since < 1:
            raise ValueError(f"since must be 1 or more, not {self.since}")

    def __str__(self) -> str:
        who = f"worker={self.worker}" if self.slot is None else f"slot={self.slot}"
        return f"{who},check=bad" + (f",since={self.since}" if self.since > 1 else "")

    def strikes(self, worker: int, slot: int, count: int) -> bool:
        """Whether the `count`th check of this worker on this slot is to fail."""
        return count >= self.since and (worker == self.worker if self.slot is None else slot == self.slot)


def is_check_fault(text: str) -> bool:
    """Whether an ordered fault concerns a spare's check."""
    return any(part.partition("=")[0].strip() == "check" for part in text.split(","))


def parse_check_fault(text: str) -> CheckFault:
    """Read "slot=3,check=bad[,since=2]". Raises ValueError."""
    numbers: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name == "check":
            if value != "bad":
                raise ValueError(f"fault {text!r}: check must be bad, not {value!r}")
        elif name not in ("slot", "worker", "since") or name in numbers or not value.isdecimal():
            raise ValueError(f"fault {text!r}: {part.strip()!r} is none of slot=N, worker=N, since=N")
        else:
            numbers[name] = int(value)
    try:
        return CheckFault(
            slot=numbers.get("slot"), worker=numbers.get("worker"), since=numbers.get("since", 1)
        )
    except ValueError as error:
        raise ValueError(f"fault {text!r}: {error}") from None


def parse_fault(text: str, *, kind: str = "kill") -> Fault:
    """Read "rank=2,step=7,at=backward[,kind=stop]"; `kind` is the default. Raises ValueError."""
    fields: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ValueError(f"fault {text!r}: {part.strip()!r} is not NAME=VALUE, as in rank=2,step=7")
        if name not in ("rank", "step", "at", "kind"):
            raise ValueError(f"fault {text!r}: unknown name {name!r}; known: rank, step, at, kind")
        if name in fields:
            raise ValueError(f"fault {text!r}: {name} is given twice")
        fields[name] = value
    return _from_fields(text, fields, kind)


def fault_from_mapping(fields: Mapping[str, object], *, kind: str = "kill") -> Fault:
    """Read one entry of a JSON list of faults, such as {"rank": 2, "step": 7}. Raises ValueError."""
    unknown = sorted(set(fields) - {"rank", "step", "at", "kind"})
    if unknown:
        raise ValueError(f"fault {dict(fields)!r}: unknown name {unknown[0]!r}; known: rank, step, at, kind")
    return _from_fields(str(dict(fields)), {name: str(value) for name, value in fields.items()}, kind)


def _from_fields(text: str, fields: Mapping[str, str], kind: str) -> Fault:
    numbers = {}
    for name in ("rank", "step"):
        if name not in fields:
            raise ValueError(f"fault {text!r}: {name} is missing, as in rank=2,step=7")
        if not fields[name].isdecimal():
            raise ValueError(f"fault {text!r}: {name} must be a whole number, not {fields[name]!r}")
        numbers[name] = int(fields[name])
    try:
        return Fault(
            rank=numbers["rank"],
            step=numbers["step"],
            at=fields.get("at", "random"),
            kind=fields.get("kind", kind),
        )
    except ValueError as error:
        raise ValueError(f"fault {text!r}: {error}") from None

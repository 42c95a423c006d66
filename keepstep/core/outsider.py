"""The rank that stood outside the collective in which the others waited: found by counting alone.

Every rank shows how many collectives it has entered in each of its groups, and which. A rank waits for
the members of a group that have not entered its newest open collective; whoever is waited for and waits
for nobody is the one. It does not know why that rank stayed away, and it decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GATE_PHASE = "GATE"
_BEFORE_GATE = frozenset({"SETUP", "STEP", "BETWEEN", "ASIDE", "BLOCK_END"})
# Operations whose tensors have the same size at every member; others (all-to-all, scatter) need not.
_SAME_SIZE = frozenset({"allreduce", "broadcast", "all_gather_single", "_allgather_base", "reduce"})
_NAMES = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
_NAMED = 4  # ranks named in a sentence; more are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """One collective that a rank entered. `open`: nobody has seen it end (or it failed)."""

    sequence: int
    operation: str
    bytes: int = 0
    open: bool = False
    peer: int | None = None  # of a send or receive: the other rank, within the group


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A rank's view of one group. `identity` is the same at every member; oldest call first."""

    identity: str
    label: str
    size: int
    group_rank: int
    entered: int
    calls: tuple[CallView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """What is known of one rank at the moment of failure. `at`: where its main thread was."""

    rank: int
    worker: int
    step: int = 0
    phase: str = ""
    state: str = ""
    at: str = ""
    died: bool = False
    groups: tuple[GroupView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`kind`: "outsider", "mismatch", "deadlock" or "nobody"; `ranks`: the guilty; `text`: one sentence."""

    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    group: str = ""
    operation: str = ""
    sequence: int = 0
    at: Mapping[int, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """As the ledger keeps it."""
        return {
            "kind": self.kind,
            "text": self.text,
            "ranks": list(self.ranks),
            "waiting": list(self.waiting),
            "group": self.group,
            "operation": self.operation,
            "sequence": self.sequence,
            "at": {str(rank): place for rank, place in self.at.items()},
        }


@dataclass(frozen=True, slots=True)
class _Wait:
    """`rank` is in `operation` number `sequence` of a group and waits for `missing`."""

    rank: int
    label: str
    operation: str
    sequence: int
    missing: tuple[int, ...]


def find_outsider(views: Iterable[RankView]) -> Finding:
    """Who stood outside. `views`: one of each rank that can be asked, all of one generation."""
    ranks = {view.rank: view for view in views}
    if len(ranks) < 2:
        return Finding(kind="nobody", text="too few ranks showed their collectives to compare them")
    if (mismatch := _mismatch(ranks)) is not None:
        return mismatch
    waits = _waits(ranks)
    waited_for = {rank for missing in {wait.missing for wait in waits} for rank in missing}
    waiting = {wait.rank for wait in waits}
    guilty = waited_for - waiting
    if guilty:
        return _outsider(ranks, waits, guilty)
    if waits:
        return _deadlock(ranks, waits)
    return _nobody(ranks)


# ---- who waits for whom -------------------------------------------------------------------------


def _waits(ranks: Mapping[int, RankView]) -> list[_Wait]:
    members = _members(ranks)
    absent = _Absent(ranks, members)
    found = [wait for view in ranks.values() if (wait := _gate_wait(view, absent)) is not None]
    for view in ranks.values():
        for group in view.groups:
            if (wait := _collective_wait(view, group, absent)) is not None:
                found.append(wait)
            found += _paired_waits(view, group, members[group.identity])
    return found


class _Absent:
    """Who is missing in one collective or gate: asked once by each rank that waits, worked out once."""

    def __init__(
        self, ranks: Mapping[int, RankView], members: Mapping[str, Mapping[int, tuple[int, GroupView]]]
    ) -> None:
        self._ranks = ranks
        self._members = members
        self._known: dict[tuple[str, int], tuple[int, ...]] = {}

    def in_collective(self, identity: str, sequence: int) -> tuple[int, ...]:
        key = (identity, sequence)
        if key not in self._known:
            entries = self._members[identity].values()
            self._known[key] = tuple(rank for rank, other in entries if other.entered < sequence)
        return self._known[key]

    def in_gate(self, step: int) -> tuple[int, ...]:
        key = ("", step)
        if key not in self._known:
            self._known[key] = tuple(
                other.rank
                for other in self._ranks.values()
                if other.step < step or (other.step == step and other.phase in _BEFORE_GATE)
            )
        return self._known[key]


def _members(ranks: Mapping[int, RankView]) -> dict[str, dict[int, tuple[int, GroupView]]]:
    """Group -> rank in the group -> (rank, its view)."""
    found: dict[str, dict[int, tuple[int, GroupView]]] = {}
    for view in ranks.values():
        for group in view.groups:
            found.setdefault(group.identity, {})[group.group_rank] = (view.rank, group)
    return found


def _gate_wait(view: RankView, absent: _Absent) -> _Wait | None:
    """The gate is a collective of all ranks, told by phase and step alone."""
    if view.phase != GATE_PHASE:
        return None
    missing = absent.in_gate(view.step)
    return _Wait(view.rank, "", "gate", view.step, missing) if missing else None


def _collective_wait(view: RankView, group: GroupView, absent: _Absent) -> _Wait | None:
    """The first open collective that not every member has entered."""
    for call in group.calls:
        if call.open and call.peer is None:
            missing = absent.in_collective(group.identity, call.sequence)
            if missing:
                return _Wait(view.rank, group.label, call.operation, call.sequence, missing)
    return None


def _paired_waits(
    view: RankView, group: GroupView, members: Mapping[int, tuple[int, GroupView]]
) -> list[_Wait]:
    """Open sends and receives whose other side has fewer of the answering kind."""
    found = []
    for kind, answer in (("recv", "send"), ("send", "recv")):
        open_calls = [call for call in group.calls if call.operation == kind and call.open]
        for call in open_calls[:1]:
            other = members.get(call.peer if call.peer is not None else -1)
            if other is None or other[0] == view.rank:
                continue
            done = sum(1 for c in other[1].calls if c.operation == answer and c.peer == group.group_rank)
            begun = sum(1 for c in group.calls if c.operation == kind and c.peer == call.peer)
            if done < begun:
                found.append(_Wait(view.rank, group.label, kind, call.sequence, (other[0],)))
    return found


# ---- what to say --------------------------------------------------------------------------------


def _outsider(ranks: Mapping[int, RankView], waits: Sequence[_Wait], guilty: set[int]) -> Finding:
    """Name those that the most waits lead to, in the collective in which the most stood."""
    direct = [wait for wait in waits if guilty.intersection(wait.missing)]
    places = Counter((wait.label, wait.operation, wait.sequence) for wait in direct)
    (label, operation, sequence), _ = max(places.items(), key=lambda entry: (entry[1], -entry[0][2]))
    here = [
        wait for wait in direct if (wait.label, wait.operation, wait.sequence) == (label, operation, sequence)
    ]
    named = tuple(sorted(guilty.intersection(*{wait.missing for wait in here}) or guilty))
    waiting = tuple(sorted({wait.rank for wait in here}))
    indirect = sorted({wait.rank for wait in waits} - set(waiting))
    text = f"{_ranks(named)} had not entered {_name(label, operation, sequence)}, in which {_count(waiting)} waited"
    if indirect:
        text += f" ({_count(indirect)} more waited for those)"
    at = {rank: ranks[rank].at for rank in named if ranks[rank].at}
    return Finding(
        kind="outsider",
        text=text + _where(ranks, named),
        ranks=named,
        waiting=waiting,
        group=label,
        operation=operation,
        sequence=sequence,
        at=at,
    )


def _where(ranks: Mapping[int, RankView], named: Sequence[int]) -> str:
    told = []
    for rank in named[:_NAMED]:
        view = ranks[rank]
        whose = "its" if len(named) == 1 else f"rank {rank}'s"
        if view.died:
            told.append(f"{whose} process had died")
        elif view.state == "T":
            told.append(f"{whose} process was stopped")
        if view.at:
            told.append(f"{whose} main thread was in {view.at}")
    return "".join(f"; {part}" for part in told)


def _mismatch(ranks: Mapping[int, RankView]) -> Finding | None:
    """The lowest number of a group at which the members called different things."""
    for members in _members(ranks).values():
        by_sequence: dict[int, dict[int, CallView]] = {}
        for rank, group in members.values():
            for call in group.calls:
                if call.peer is None:
                    by_sequence.setdefault(call.sequence, {})[rank] = call
        label = next(iter(members.values()))[1].label
        for sequence in sorted(by_sequence):
            calls = by_sequence[sequence]
            stuck = len(calls) > 1 and any(call.open for call in calls.values())
            if stuck and (finding := _differing(label, sequence, calls, ranks)):
                return finding
    return None


def _differing(
    label: str, sequence: int, calls: Mapping[int, CallView], ranks: Mapping[int, RankView]
) -> Finding | None:
    kinds = Counter(_kind(call) for call in calls.values())
    if len(kinds) < 2:
        return None
    usual = max(kinds, key=lambda kind: (kinds[kind], kind))
    odd = tuple(sorted(rank for rank, call in calls.items() if _kind(call) != usual))
    others = tuple(sorted(set(calls) - set(odd)))
    theirs = calls[odd[0]]
    text = (
        f"the ranks do not call the same: as number {sequence} of group {label} {_ranks(odd)} called "
        f"{_describe(_kind(theirs))}, {_ranks(others)} {_describe(usual)}: a mistake of the script"
    )
    return Finding(
        kind="mismatch",
        text=text + _where(ranks, odd),
        ranks=odd,
        waiting=others,
        group=label,
        operation=theirs.operation,
        sequence=sequence,
        at={rank: ranks[rank].at for rank in odd if ranks[rank].at},
    )


def _kind(call: CallView) -> tuple[str, int]:
    return call.operation, call.bytes if call.operation in _SAME_SIZE else -1


def _describe(kind: tuple[str, int]) -> str:
    operation, size = kind
    name = _NAMES.get(operation, operation)
    return name if size < 0 else f"{name} of {size} bytes"


def _deadlock(ranks: Mapping[int, RankView], waits: Sequence[_Wait]) -> Finding:
    told = [
        f"rank {wait.rank} waits in {_name(wait.label, wait.operation, wait.sequence)} for {_ranks(wait.missing)}"
        for wait in sorted(waits, key=lambda wait: wait.rank)
    ]
    involved = tuple(sorted({wait.rank for wait in waits}))
    more = f" (and {len(told) - _NAMED} more)" if len(told) > _NAMED else ""
    return Finding(
        kind="deadlock",
        text=f"the ranks wait for each other: {'; '.join(told[:_NAMED])}{more}",
        ranks=involved,
        waiting=involved,
        at={rank: ranks[rank].at for rank in involved[:_NAMED] if ranks[rank].at},
    )


def _nobody(ranks: Mapping[int, RankView]) -> Finding:
    in_gate = [view for view in ranks.values() if view.phase == GATE_PHASE]
    if len(in_gate) == len(ranks):
        return Finding(
            kind="nobody", text=f"nobody stood outside: every rank was in the gate of step {in_gate[0].step}"
        )
    return Finding(kind="nobody", text="nobody stood outside a collective in which others waited")


def _name(label: str, operation: str, sequence: int) -> str:
    if operation == "gate":
        return f"the gate of step {sequence}"
    name = _NAMES.get(operation, operation)
    if operation in ("send", "recv"):
        return f"{'receive' if operation == 'recv' else 'send'} in group {label}"
    return f"{name} #{sequence} of group {label}"


def _ranks(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) <= _NAMED:
        return f"ranks {', '.join(map(str, numbers))}"
    return f"{len(numbers)} ranks ({', '.join(map(str, numbers[:_NAMED]))}, ...)"


def _count(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} ranks"

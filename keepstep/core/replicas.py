"""Which bytes of a job's state lie where: from what each rank said of its own, once, to a table.

Ranks that must hold the same bytes are told by structure (`StatePart.identity`, the shard), and what they
really hold is compared by the digests that they took after the same step. It knows nothing of processes
that live or die: who holds what at this moment is asked as an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keepstep.core.events import FingerprintTaken, StateDescribed
from keepstep.core.types import StatePart

PER_RANK = "per rank"  # the part that is one rank's own by nature: its records keep it
VERIFIED, DIFFERS, UNCHECKED, ALONE = "verified", "differs", "not checked", "no twin"
NAMED_HOLDINGS = 64  # so many different holdings keep the names of their tensors
MOST_NAMES = 32
MOST_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Holder:
    """The live worker that holds a rank's state, and where it runs."""

    worker: int
    node: str
    rack: str = ""


@dataclass(slots=True)
class Holding:
    """What the ranks of one kind hold, all of it alike: one object for all of them."""

    shard: str
    place: str
    parts: tuple[StatePart, ...]
    ranks: set[int] = field(default_factory=set)


class ReplicaBook:
    """What every rank said of its state. Complete when all have spoken."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.step = 0
        self._holdings: dict[tuple[Any, ...], Holding] = {}
        self._of_rank: dict[int, Holding] = {}
        self._digests: dict[int, Mapping[str, str]] = {}
        self._digest_step = -1
        self._checks: dict[
            tuple[str, str], tuple[str, tuple[int, ...]]
        ] = {}  # part, identity -> word, odd ones

    @property
    def complete(self) -> bool:
        return len(self._of_rank) == self.world_size

    def largest_bytes(self) -> int:
        """The most that a rank holds, its record left out; 0 before anybody has spoken."""
        return max((sum(p.bytes for p in _shared(h)) for h in self._holdings.values() if h.ranks), default=0)

    # ---- what ranks say ---------------------------------------------------------------------------

    def describe(self, event: StateDescribed) -> bool:
        """Take in what a rank holds. True when this made the book complete."""
        if not 0 <= event.rank < self.world_size:
            return False
        before = self.complete
        self.step = max(self.step, event.step)
        self._put(event.rank, event.shard, event.place, event.parts)
        if self.complete and not before:
            self._compare()
            return True
        return False

    def fingerprint(self, event: FingerprintTaken) -> None:
        """Keep a rank's digests until all of one step can be compared."""
        if self.complete or event.step < self._digest_step:
            return
        if event.step > self._digest_step:
            self._digests, self._digest_step = {}, event.step
        self._digests[event.rank] = event.parts

    def _put(self, rank: int, shard: str, place: str, parts: Iterable[StatePart]) -> None:
        parts = tuple(parts)
        key = (shard, *((part.part, part.identity) for part in parts))
        older = self._of_rank.get(rank)
        if older is not None:
            older.ranks.discard(rank)
        holding = self._holdings.get(key)
        if holding is None:
            if len(self._holdings) >= NAMED_HOLDINGS:
                parts = tuple(_without_names(part) for part in parts)
            holding = self._holdings[key] = Holding(shard, place, parts)
        holding.ranks.add(rank)
        self._of_rank[rank] = holding

    def _compare(self) -> None:
        """Twins by structure must have equal digests: part by part, over all ranks that hold it."""
        found: dict[tuple[str, str], dict[str, list[int]]] = {}
        for rank, holding in self._of_rank.items():
            digests = self._digests.get(rank, {})
            for part in _shared(holding):
                seen = found.setdefault((part.part, part.identity), {})
                seen.setdefault(digests.get(part.part, ""), []).append(rank)
        for key, by_digest in found.items():
            self._checks[key] = _judged(by_digest)
        self._digests = {}

    # ---- for the ledger ---------------------------------------------------------------------------

    def body(self) -> dict[str, Any]:
        """All of it as JSON takes it; `load` reads it."""
        holdings = []
        for holding in self._holdings.values():
            if holding.ranks:
                parts = []
                for part in holding.parts:
                    word, odd = self._checks.get((part.part, part.identity), (UNCHECKED, ()))
                    parts.append({**_part_body(part), "check": word, "differing": list(odd)})
                row = {"shard": holding.shard, "place": holding.place, "ranks": sorted(holding.ranks)}
                holdings.append({**row, "parts": parts})
        return {"step": self.step, "world_size": self.world_size, "holdings": holdings}

    @classmethod
    def load(cls, body: Mapping[str, Any]) -> ReplicaBook:
        """The book that `body` was taken of. Raises KeyError, TypeError or ValueError for another body."""
        book = cls(int(body["world_size"]))
        book.step = int(body["step"])
        for row in body["holdings"]:
            parts = []
            for one in row["parts"]:
                fields = {name: one[name] for name in _PART_FIELDS}
                parts.append(StatePart(**fields))
                checked = (str(one["check"]), tuple(int(rank) for rank in one["differing"]))
                book._checks[(parts[-1].part, parts[-1].identity)] = checked
            for rank in row["ranks"]:
                book._put(int(rank), str(row["shard"]), str(row["place"]), parts)
        return book

    # ---- the table --------------------------------------------------------------------------------

    def table(self, holders: Mapping[int, Holder]) -> dict[str, Any]:
        """Who holds what now. `holders`: by rank, those that live and have their state."""
        by_shard: dict[str, list[Holding]] = {}
        for holding in self._holdings.values():
            if holding.ranks:
                by_shard.setdefault(holding.shard, []).append(holding)
        shards = [self._shard_row(shard, of_it, holders) for shard, of_it in by_shard.items()]
        shards.sort(key=lambda row: (row["copies"], row["ranks"][:1]))
        parts = self._part_rows(holders)
        alone = self._alone(holders)
        return {
            "complete": self.complete,
            "described_ranks": len(self._of_rank),
            "world_size": self.world_size,
            "step": self.step,
            "bytes": sum(row["bytes"] for row in parts if row["part"] != PER_RANK),
            "nodes": len({holder.node for holder in holders.values()}),
            "racks": len({holder.rack for holder in holders.values() if holder.rack}),
            "parts": parts,
            "shards": shards[:MOST_ROWS],
            "shards_left_out": max(0, len(shards) - MOST_ROWS),
            "shard_count": len(shards),
            "least_copies": min((row["copies"] for row in shards), default=0),
            "least_nodes": min((len(row["nodes"]) for row in shards), default=0),
            "without_twin": sorted(rank for row in shards if row["copies"] < 2 for rank in row["ranks"]),
            "alone": alone[:MOST_NAMES],
            "alone_left_out": max(0, len(alone) - MOST_NAMES),
            "records": self._records(),
        }

    def _shard_row(
        self, shard: str, holdings: Iterable[Holding], holders: Mapping[int, Holder]
    ) -> dict[str, Any]:
        holdings = list(holdings)
        ranks = sorted(rank for holding in holdings for rank in holding.ranks)
        live = [holders[rank] for rank in ranks if rank in holders]
        parts = {part.part: part for holding in holdings for part in _shared(holding)}
        return {
            "shard": shard[:12],
            "place": holdings[0].place,
            "bytes": sum(part.bytes for part in parts.values()),
            "tensors": sum(part.tensors for part in parts.values()),
            "ranks": ranks,
            "copies": len(live),
            "workers": [holder.worker for holder in live],
            "nodes": sorted({holder.node for holder in live}),
            "racks": sorted({holder.rack for holder in live if holder.rack}),
            "check": self._word(((part.part, part.identity) for part in parts.values()), len(ranks)),
        }

    def _part_rows(self, holders: Mapping[int, Holder]) -> list[dict[str, Any]]:
        """One row for each part: over all its identities, those bytes once each, and the fewest copies."""
        found: dict[str, dict[str, tuple[StatePart, set[int]]]] = {}
        for holding in self._holdings.values():
            for part in holding.parts if holding.ranks else ():
                _, ranks = found.setdefault(part.part, {}).setdefault(part.identity, (part, set()))
                ranks |= holding.ranks
        return [self._part_row(name, pieces, holders) for name, pieces in found.items()]

    def _part_row(
        self, name: str, pieces: Mapping[str, tuple[StatePart, set[int]]], holders: Mapping[int, Holder]
    ) -> dict[str, Any]:
        own = name == PER_RANK
        dtypes: Counter[str] = Counter()
        for part, ranks in pieces.values():
            dtypes.update({kind: size * (len(ranks) if own else 1) for kind, size in part.dtypes.items()})
        live = [[holders[rank] for rank in ranks if rank in holders] for _, ranks in pieces.values()]
        copies = [1] if own else [len(of_piece) for of_piece in live]
        differing = {rank for identity in pieces for rank in self._checks.get((name, identity), ("", ()))[1]}
        return {
            "part": name,
            "tensors": sum(part.tensors * (len(ranks) if own else 1) for part, ranks in pieces.values()),
            "bytes": sum(part.bytes * (len(ranks) if own else 1) for part, ranks in pieces.values()),
            "dtypes": dict(dtypes),
            "pieces": sum(len(ranks) if own else 1 for _, ranks in pieces.values()),
            "least_copies": min(copies),
            "most_copies": max(copies),
            "least_nodes": 1 if own else min(len({holder.node for holder in piece}) for piece in live),
            "check": ALONE
            if own
            else self._word(
                ((name, identity) for identity in pieces), max(len(ranks) for _, ranks in pieces.values())
            ),
            "differing_ranks": sorted(differing)[:MOST_NAMES],
        }

    def _alone(self, holders: Mapping[int, Holder]) -> list[dict[str, Any]]:
        """Tensors without a live twin, by name, the largest first; one row for a name that every rank has."""
        copies: Counter[tuple[str, str]] = Counter()
        for rank, holding in self._of_rank.items():
            copies.update((part.part, part.identity) for part in holding.parts if rank in holders)
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for holding in self._holdings.values():
            for part in holding.parts if holding.ranks else ():
                if part.part != PER_RANK and copies[(part.part, part.identity)] > 1:
                    continue
                for name, size in part.largest.items():
                    kept = "records" if part.part == PER_RANK else "nowhere"
                    row = found.setdefault(
                        (part.part, name),
                        {"part": part.part, "name": name, "bytes": 0, "ranks": 0, "kept": kept},
                    )
                    row["bytes"] = max(row["bytes"], size)
                    row["ranks"] += len(holding.ranks)
        return sorted(found.values(), key=lambda row: (row["kept"] == "records", -row["bytes"], row["name"]))

    def _records(self) -> dict[str, int]:
        """What one rank's records hold, at most: how many things and bytes."""
        own = [part for h in self._holdings.values() if h.ranks for part in h.parts if part.part == PER_RANK]
        largest = max(own, key=lambda part: part.bytes, default=None)
        return {"tensors": largest.tensors if largest else 0, "bytes": largest.bytes if largest else 0}

    def _word(self, keys: Iterable[tuple[str, str]], holders: int) -> str:
        if holders < 2:
            return ALONE
        words = {self._checks.get(key, (UNCHECKED, ()))[0] for key in keys}
        for word in (DIFFERS, UNCHECKED, VERIFIED):
            if word in words:
                return word
        return ALONE


def _judged(by_digest: Mapping[str, list[int]]) -> tuple[str, tuple[int, ...]]:
    """What the digests of one piece's holders say, and the ranks that differ from most."""
    holders = sum(len(ranks) for ranks in by_digest.values())
    told = {digest: ranks for digest, ranks in by_digest.items() if digest}
    if holders < 2:
        return ALONE, ()
    if len(told) > 1:
        most = max(told.values(), key=lambda ranks: (len(ranks), -min(ranks)))
        return DIFFERS, tuple(sorted(r for ranks in told.values() if ranks is not most for r in ranks)[:8])
    return (VERIFIED if not by_digest.get("") else UNCHECKED), ()


def _shared(holding: Holding) -> list[StatePart]:
    """The parts that other ranks may hold too."""
    return [part for part in holding.parts if part.part != PER_RANK]


_PART_FIELDS = ("part", "identity", "tensors", "bytes", "dtypes", "largest")


def _part_body(part: StatePart) -> dict[str, Any]:
    body = {name: getattr(part, name) for name in _PART_FIELDS}
    return {**body, "dtypes": dict(part.dtypes), "largest": dict(part.largest)}


def _without_names(part: StatePart) -> StatePart:
    return StatePart(
        part=part.part, identity=part.identity, tensors=part.tensors, bytes=part.bytes, dtypes=part.dtypes
    )

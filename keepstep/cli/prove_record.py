"""What one run left for the proof: every reported value and every tensor's digest, by rank and step.

Reads `reports/rank-<r>.jsonl` of a run directory, also while it grows. A step that was computed again has
several lines; the last one counts. Of a step's digests only their sum stays in memory: the line is read again
when it is wanted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.cli.reports import Line

_HEAD = ("step", "generation", "worker", "time_s")


@dataclass(frozen=True, slots=True)
class Prints:
    """The digests of one rank after one step: their sum, and where the line stands that has them all."""

    digest: bytes
    path: Path
    offset: int
    size: int

    def tensors(self) -> dict[str, str]:
        """Tensor name -> digest, in the script's order. Raises OSError when the file is gone."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            found: dict[str, str] = json.loads(file.read(self.size))["tensors"]
        return found


class RunRecord:
    """Everything that a run reported. `ignored`: names of reported values that are left out."""

    def __init__(self, run_dir: Path, *, ignored: frozenset[str] = frozenset()) -> None:
        self._folder = run_dir / "reports"
        self._ignored = ignored
        self._offsets: dict[Path, int] = {}
        self.lines: list[Line] = []
        self.values: dict[int, dict[int, Mapping[str, float]]] = {}
        self.prints: dict[int, dict[int, Prints]] = {}
        self.finals: dict[int, Prints] = {}

    @property
    def ranks(self) -> list[int]:
        return sorted({*self.values, *self.prints, *self.finals})

    @property
    def steps(self) -> int:
        """Steps that were committed on some rank; of a run without digests, those that were reported."""
        by_rank = self.prints or self.values
        return max((step for steps in by_rank.values() for step in steps), default=-1) + 1

    @property
    def noted_steps(self) -> list[int]:
        """Every step of which there is a line."""
        return sorted(
            {step for by_rank in (self.values, self.prints) for steps in by_rank.values() for step in steps}
        )

    def poll(self) -> None:
        """Take in what was written since the last call."""
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            rank = int(path.stem.removeprefix("rank-"))
            start = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(start)
                whole, newline, _ = file.read().rpartition(
                    b"\n"
                )  # a line still being written is left for later
            self._offsets[path] = start + len(whole) + len(newline)
            at = start
            for text in whole.split(b"\n") if newline else ():
                for skipped, entry in _entries(text):
                    self._take(rank, entry, path, at + skipped, len(text) - skipped)
                at += len(text) + 1

    def _take(self, rank: int, entry: dict[str, Any], path: Path, offset: int, size: int) -> None:
        if entry.get("resumed"):
            return  # a time, no value
        if "tensors" in entry:
            prints = Prints(_sum(entry["tensors"]), path, offset, size)
            if entry.get("final"):
                self.finals[rank] = prints
            else:
                self.prints.setdefault(rank, {})[entry["step"]] = prints
            return
        head = {name: entry.pop(name) for name in _HEAD}
        values = {name: value for name, value in entry.items() if name not in self._ignored}
        self.lines.append(Line(rank=rank, values=values, **head))
        self.values.setdefault(rank, {})[head["step"]] = values


def read_record(run_dir: Path, *, ignored: frozenset[str] = frozenset()) -> RunRecord:
    """The record of a run that has ended."""
    record = RunRecord(run_dir, ignored=ignored)
    record.poll()
    return record


def _entries(text: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """The entry of a line, with the bytes before it. A death in mid-write leaves half a line, and the
    replacement's first one follows right behind it: that one is found."""
    at = 0
    while at >= 0:
        try:
            entry = json.loads(text[at:])
        except ValueError:
            at = text.find(b'{"', at + 1)
            continue
        if isinstance(entry, dict) and "step" in entry:
            yield at, entry
        return


def _sum(tensors: Mapping[str, str]) -> bytes:
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        hasher.update(f"{name}={tensors[name]}\n".encode())
    return hasher.digest()

"""What the ranks of a run reported: losses by step, final digests, and what follows from the two of them.

Reads `reports/rank-<r>.jsonl` of a run directory, also while it grows. A step that was computed again has
several lines; the last one counts.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEAD = ("step", "generation", "worker", "time_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One rank's report of one step (0-based), written as it enters the gate."""

    rank: int
    step: int
    generation: int
    worker: int
    time_s: float
    values: Mapping[str, float]

    @property
    def loss(self) -> float | None:
        return self.values.get("loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Final:
    """One rank's state after the last step: digest over everything protected, and one per tensor."""

    rank: int
    step: int
    digest: str
    tensors: Mapping[str, str]


@dataclass(slots=True)
class Reports:
    """Everything that was reported, by rank, in the order of writing."""

    lines: dict[int, list[Line]] = field(default_factory=dict)
    finals: dict[int, Final] = field(default_factory=dict)
    commits: dict[int, list[Line]] = field(default_factory=dict)  # the first commit of each generation
    unreadable_lines: int = 0

    def counted(self, rank: int) -> dict[int, Line]:
        """The line that counts, by step."""
        return {line.step: line for line in self.lines.get(rank, ())}

    def ranks(self) -> list[int]:
        return sorted(self.lines)


class ReportReader:
    """Reads a run's reports piece by piece: each `poll` returns only what is new."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "reports"
        self._offsets: dict[Path, int] = {}
        self.reports = Reports()

    def poll(self) -> list[Line]:
        """The step lines written since the last call, oldest first."""
        new: list[Line] = []
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            rank = int(path.stem.removeprefix("rank-"))
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole, newline, _ = data.rpartition(b"\n")  # a line still being written is left for later
            self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
            for text in whole.splitlines():
                line = self._take(rank, text)
                if line is not None:
                    new.append(line)
        return sorted(new, key=lambda line: line.time_s)

    def _take(self, rank: int, text: bytes) -> Line | None:
        try:
            entry: dict[str, Any] = json.loads(text)
        except ValueError:  # torn by a death in mid-write
            self.reports.unreadable_lines += 1
            return None
        if entry.pop("final", False):
            self.reports.finals[rank] = Final(
                rank=rank, step=entry["step"], digest=entry["digest"], tensors=entry.get("tensors", {})
            )
            return None
        if entry.pop("fingerprint", False):
            return None
        if entry.pop("resumed", False):
            self.reports.commits.setdefault(rank, []).append(
                Line(rank=rank, values={}, **{name: entry[name] for name in HEAD})
            )
            return None
        head = {name: entry.pop(name) for name in HEAD}
        line = Line(rank=rank, values=entry, **head)
        self.reports.lines.setdefault(rank, []).append(line)
        return line


def read_reports(run_dir: Path) -> Reports:
    """All reports of a run that has ended."""
    reader = ReportReader(run_dir)
    reader.poll()
    return reader.reports


def merge(parts: Iterable[Reports]) -> Reports:
    """The reports of a job over several nodes as if they were one run's: a rank may have lived on several."""
    whole = Reports()
    for part in parts:
        for rank, lines in part.lines.items():
            whole.lines.setdefault(rank, []).extend(lines)
        for rank, lines in part.commits.items():
            whole.commits.setdefault(rank, []).extend(lines)
        for rank, final in part.finals.items():
            if rank not in whole.finals or final.step >= whole.finals[rank].step:
                whole.finals[rank] = final
        whole.unreadable_lines += part.unreadable_lines
    for found in (*whole.lines.values(), *whole.commits.values()):
        # A cut-off node may still write lines of an old generation: those of a newer one count.
        found.sort(key=lambda line: (line.generation, line.time_s))
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs held against each other, bit for bit. `difference` names the first one ("" if none)."""

    identical: bool
    steps: int
    ranks: int
    difference: str = ""


def compare(reference: Reports, run: Reports) -> Comparison:
    """Every value of every step of every rank, then the final digests.

    Nothing to compare (no line, or no final digest on some rank) is never "identical".
    """
    ranks = reference.ranks()
    steps = min((len(reference.counted(rank)) for rank in ranks), default=0)
    difference = _first_difference(reference, run)
    return Comparison(identical=not difference, steps=steps, ranks=len(ranks), difference=difference)


def _bits(values: Mapping[str, float]) -> dict[str, bytes]:
    """As bytes, so that 0.0 and -0.0 differ and a NaN equals itself."""
    return {name: struct.pack("<d", value) for name, value in values.items()}


def _first_difference(reference: Reports, run: Reports) -> str:
    if not reference.lines:
        return "the undisturbed run reported nothing"
    if reference.ranks() != run.ranks():
        return f"ranks {reference.ranks()} reported, and {run.ranks()} with the fault"
    by_rank = {rank: (reference.counted(rank), run.counted(rank)) for rank in reference.ranks()}
    steps = sorted({step for pair in by_rank.values() for lines in pair for step in lines})
    for step in steps:
        for rank, (ours, theirs) in by_rank.items():
            if step not in ours or step not in theirs:
                where = "with the fault" if step in ours else "in the undisturbed run"
                return f"step {step}, rank {rank}: no report {where}"
            if _bits(ours[step].values) != _bits(theirs[step].values):
                return f"step {step}, rank {rank}: {dict(ours[step].values)} and {dict(theirs[step].values)}"
    for rank in reference.ranks():
        mine, other = reference.finals.get(rank), run.finals.get(rank)
        if mine is None or other is None:
            return f"rank {rank}: no final digest (was KEEPSTEP_FINGERPRINT set?)"
        if mine.digest != other.digest or mine.step != other.step:
            names = [name for name, digest in mine.tensors.items() if other.tensors.get(name) != digest]
            return f"final state of rank {rank} differs: {names[0] if names else 'digest'}"
    return ""


def kill_to_next_new_step_s(reports: Reports, rank: int, killed_at_s: float) -> float | None:
    """Seconds from a signal to the first new step of whoever plays `rank` afterwards.

    The clock starts at the signal (unix time, taken just before it is sent). It stops when the rank's
    replacement has committed, in a newer generation, a step that not every rank had reported before the
    signal: its update is applied and its block has ended. Where all had reported the step already (it was
    computed again), it is not new: the clock goes on to the report of the next one. None: no such line.
    """
    before = {r: {ln.step for ln in lines if ln.time_s <= killed_at_s} for r, lines in reports.lines.items()}
    reported_by_all = set.intersection(*before.values()) if before else set()
    generation = max(
        (ln.generation for lines in reports.lines.values() for ln in lines if ln.time_s <= killed_at_s),
        default=-1,
    )
    later = [line for line in reports.lines.get(rank, ()) if line.generation > generation]
    # The step that the replacement begins with is new by its commit, not yet by its report at the gate.
    begun_with = min((line.step for line in later), default=-1)
    candidates = [*reports.commits.get(rank, ()), *(line for line in later if line.step != begun_with)]
    first = min(
        (
            line.time_s
            for line in candidates
            if line.generation > generation and line.time_s > killed_at_s and line.step not in reported_by_all
        ),
        default=None,
    )
    return None if first is None else first - killed_at_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """What the reports themselves say about steps computed twice.

    `committed_steps_lost`: steps reported again although some rank had already gone on to a later one.
    `recomputed_steps`: distinct steps that some rank reported in more than one generation;
    `most_in_a_generation`: how many of them the worst generation computed again.
    """

    committed_steps_lost: int
    recomputed_steps: int
    most_in_a_generation: int


def recomputation(lines: Iterable[Line]) -> Recomputation:
    """Count, over all lines of a run, what was computed twice."""
    newest_by_generation: dict[int, int] = {}
    generations: dict[tuple[int, int], set[int]] = {}
    for line in lines:
        newest_by_generation[line.generation] = max(newest_by_generation.get(line.generation, -1), line.step)
        generations.setdefault((line.rank, line.step), set()).add(line.generation)
    lost: set[int] = set()
    again: dict[int, set[int]] = {}
    for (_, step), seen in generations.items():
        for later in sorted(seen)[1:]:
            again.setdefault(later, set()).add(step)
            if any(newest > step for number, newest in newest_by_generation.items() if number < later):
                lost.add(step)
    return Recomputation(
        committed_steps_lost=len(lost),
        recomputed_steps=len(set().union(*again.values())),
        most_in_a_generation=max(map(len, again.values()), default=0),
    )

"""Reads workers' logs as one story: lines with their time and rank, merged over workers, a batch at a time.

Nothing is held in memory beyond one line of each file and the batch. Where it goes on is told by the
cursors, one offset for each file. It reads files only: it needs no agent.
"""

from __future__ import annotations

import heapq
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from keepstep.agent.console import readable
from keepstep.agent.log_times import TIMES_ENTRY, roles_path, times_path
from keepstep.agent.logs import STREAMS, log_path

MAX_LINE_BYTES = 64 << 10
MAX_BATCH_LINES = 5_000
MAX_BATCH_BYTES = 1 << 20
_LOG_NAME = re.compile(r"worker-(\d+)\.(stdout|stderr)")


@dataclass(frozen=True, slots=True)
class Role:
    """What a worker was from the offsets on: `event` is "starts", "plays" or "ended"."""

    event: str
    time_ns: int
    rank: int | None = None
    generation: int | None = None
    fresh: bool = False
    node: str = ""
    how: str = ""
    offsets: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of one worker. Sorts by time; `note`: no output, but a change of the rank's player."""

    time_ns: int
    worker: int
    stream: str
    text: str
    rank: int | None = None
    generation: int | None = None
    node: str = ""
    note: bool = False

    def to_list(self) -> list[Any]:
        return [
            self.time_ns,
            self.worker,
            self.stream,
            self.text,
            self.rank,
            self.generation,
            self.node,
            self.note,
        ]

    @classmethod
    def from_list(cls, value: list[Any]) -> Line:
        """Raises ValueError or TypeError for anything that is no line."""
        time_ns, worker, stream, text, rank, generation, node, note = value
        return cls(
            int(time_ns),
            int(worker),
            str(stream),
            str(text),
            None if rank is None else int(rank),
            None if generation is None else int(generation),
            str(node),
            bool(note),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which lines. `whole`: leave an unfinished last line for later (somebody follows)."""

    rank: int | None = None
    node: str | None = None
    since_ns: int = 0
    whole: bool = False


def query_from(about: Mapping[str, Any]) -> Query:
    """A query out of JSON. Raises ValueError or TypeError."""
    rank, node = about.get("rank"), about.get("node")
    return Query(
        rank=None if rank is None else int(rank),
        node=None if node is None else str(node),
        since_ns=int(about.get("since_ns", 0)),
        whole=bool(about.get("whole", False)),
    )


@dataclass(slots=True)
class Batch:
    """Some lines in order; `more`: there are more to be had at once, with these cursors."""

    lines: list[Line]
    cursors: dict[str, int]
    more: bool


def read_roles(run_dir: Path, worker: int) -> list[Role]:
    """What a worker was, oldest first; a torn last line is left out."""
    try:
        text = roles_path(run_dir, worker).read_text(errors="replace")
    except OSError:
        return []
    roles = []
    for raw in text.splitlines():
        try:
            value = json.loads(raw)
            roles.append(
                Role(
                    event=str(value["event"]),
                    time_ns=int(value["time_ns"]),
                    rank=value.get("rank"),
                    generation=value.get("generation"),
                    fresh=bool(value.get("fresh")),
                    node=str(value.get("node", "")),
                    how=str(value.get("how", "")),
                    offsets={stream: int(value.get(stream, 0)) for stream in STREAMS},
                )
            )
        except (ValueError, KeyError, TypeError):
            continue
    return roles


def workers_with_logs(run_dir: Path) -> list[int]:
    """Every worker that left a log here."""
    try:
        names = os.listdir(run_dir / "logs")
    except OSError:
        return []
    return sorted({int(found[1]) for name in names if (found := _LOG_NAME.fullmatch(name))})


def read_batch(run_dir: Path, query: Query, cursors: Mapping[str, int]) -> Batch:
    """The next lines after `cursors` (none: from the start, or from `since_ns`)."""
    sources: list[_LogFile | _Roles] = []
    for worker in workers_with_logs(run_dir):
        roles = read_roles(run_dir, worker)
        if not _out_of_question(roles, query):
            sources += [_LogFile(run_dir, worker, stream, roles) for stream in STREAMS]
            sources.append(_Roles(worker, roles))
    after = dict(cursors)
    lines: list[Line] = []
    total, more = 0, False
    try:
        keyed = [_keyed(source, query, after.get(source.name), n) for n, source in enumerate(sources)]
        for _, number, _, line, end in heapq.merge(*keyed, key=lambda entry: entry[:3]):
            if len(lines) >= MAX_BATCH_LINES or total >= MAX_BATCH_BYTES:
                more = True
                break
            after[sources[number].name] = end
            lines.append(line)
            total += len(line.text) + 64
    finally:
        for source in sources:
            source.close()
    for source in sources:
        if source.exhausted:
            after[source.name] = source.position
        else:
            after.setdefault(source.name, source.begun)
    return Batch(lines, after, more)


def _out_of_question(roles: list[Role], query: Query) -> bool:
    if query.rank is not None and all(role.rank != query.rank for role in roles):
        return True
    nodes = {role.node for role in roles if role.node}
    return query.node is not None and bool(nodes) and query.node not in nodes


def _keyed(
    source: _LogFile | _Roles, query: Query, cursor: int | None, number: int
) -> Iterator[tuple[int, int, int, Line, int]]:
    newest_ns = 0
    for count, (line, end) in enumerate(source.lines(query, cursor)):
        newest_ns = max(newest_ns, line.time_ns)  # a clock that was set back must not break the order
        yield newest_ns, number, count, line, end
    source.exhausted = True


class _LogFile:
    """One stream of one worker. `begun`, `position`: from where, and up to where, it was read."""

    def __init__(self, run_dir: Path, worker: int, stream: str, roles: list[Role]) -> None:
        self.name = f"{worker}.{stream}"
        self.begun = self.position = 0
        self.exhausted = False
        self._path = log_path(run_dir, worker, stream)
        self._worker = worker
        self._stream = stream
        self._node = next((role.node for role in roles if role.node), "")
        self._ended = any(role.event == "ended" for role in roles)
        self._parts = _parts(roles, stream)
        self._file: BinaryIO | None = None
        self._times = _Times(times_path(run_dir, worker, stream))

    def close(self) -> None:
        self._times.close()
        if self._file is not None:
            self._file.close()

    def lines(self, query: Query, cursor: int | None) -> Iterator[tuple[Line, int]]:
        """The lines asked for, each with the offset after it."""
        self.position = cursor or 0
        if cursor is None and query.since_ns:
            self.position = self._times.offset_since(query.since_ns)
        self.begun = self.position
        try:
            self._file = self._path.open("rb")
        except OSError:
            return
        for begin, end, role in self._parts:
            if query.rank is not None and (role is None or role.rank != query.rank):
                continue
            if end is None or end > self.position:
                self.position = max(self.position, begin)
                yield from self._part(self._file, query, end, role)

    def _part(
        self, file: BinaryIO, query: Query, end: int | None, role: Role | None
    ) -> Iterator[tuple[Line, int]]:
        file.seek(self.position)
        while end is None or self.position < end:
            room = MAX_LINE_BYTES if end is None else min(MAX_LINE_BYTES, end - self.position)
            raw = file.readline(room)
            unfinished = end is None and not self._ended and len(raw) < room and not raw.endswith(b"\n")
            if not raw or (query.whole and unfinished):
                return
            when = self._times.at(self.position)
            self.position += len(raw)
            if when >= query.since_ns:
                rank, generation = (role.rank, role.generation) if role else (None, None)
                text = readable(raw.rstrip(b"\n"))
                yield (
                    Line(when, self._worker, self._stream, text, rank, generation, self._node),
                    self.position,
                )


def _parts(roles: list[Role], stream: str) -> list[tuple[int, int | None, Role | None]]:
    """A log by what its worker was: from, up to (None: the end), and the part played there (None: none).

    In a fresh world a worker's start belongs to the story of its rank as well.
    """
    plays = [role for role in roles if role.event == "plays"]
    first = plays[0] if plays and plays[0].fresh else None
    marks: list[tuple[int, Role | None]] = [(0, first)]
    marks += [(role.offsets.get(stream, 0), role if role.rank is not None else None) for role in plays]
    ends: list[int | None] = [offset for offset, _ in marks[1:]]
    return [(begin, end, role) for (begin, role), end in zip(marks, [*ends, None], strict=True)]


class _Roles:
    """Who played the rank, told as lines between the others. `position` counts the roles told."""

    def __init__(self, worker: int, roles: list[Role]) -> None:
        self.name = f"{worker}.roles"
        self.begun = self.position = 0
        self.exhausted = False
        self._worker = worker
        self._roles = roles

    def close(self) -> None:
        """Nothing is open."""

    def lines(self, query: Query, cursor: int | None) -> Iterator[tuple[Line, int]]:
        node = next((role.node for role in self._roles if role.node), "")
        who = f"worker {self._worker}" + (f" on {node}" if node else "")
        played: int | None = None
        self.begun = cursor or 0
        for number, role in enumerate(self._roles, 1):
            before, played = played, role.rank if role.event == "plays" else played
            concerned = query.rank is None or query.rank in (before, played)
            if number <= (cursor or 0) or role.time_ns < query.since_ns or not concerned:
                continue
            self.position = number
            if role.event == "ended":
                text = f"{who} ended: {role.how}"
            elif role.event != "plays" or before == played:
                continue
            elif played is None:
                text = f"{who} has lost rank {before} with generation {role.generation}"
            else:
                text = f"{who} plays rank {played} from generation {role.generation} on"
            rank = before if played is None else played
            line = Line(role.time_ns, self._worker, "", text, rank, role.generation, node, note=True)
            yield line, number
        self.position = len(self._roles)


class _Times:
    """The times of one log, looked up by offset or by time without reading the whole index."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO | None = None
        self._count = 0
        self._cached: tuple[int, int, int] | None = None  # from, up to, time
        try:
            self._file = path.open("rb")
            self._count = os.fstat(self._file.fileno()).st_size // TIMES_ENTRY.size
        except OSError:
            pass

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def at(self, offset: int) -> int:
        """When the byte at `offset` was first seen; now, for one that nobody has noted yet."""
        if self._cached is None or not self._cached[0] <= offset < self._cached[1]:
            number = self._last(lambda entry: entry[0] <= offset)
            if number is None:
                return time.time_ns() if self._count == 0 else self._entry(0)[2]
            begins, ends, when = self._entry(number)
            if number + 1 < self._count:
                ends = self._entry(number + 1)[0]
            elif offset >= ends:
                return time.time_ns()
            self._cached = (begins, ends, when)
        return self._cached[2]

    def offset_since(self, since_ns: int) -> int:
        """Where the first piece begins that was seen at `since_ns` or later."""
        number = self._last(lambda entry: entry[2] < since_ns)
        following = 0 if number is None else number + 1
        if following < self._count:
            return self._entry(following)[0]
        return self._entry(self._count - 1)[1] if self._count else 0

    def _last(self, fits: Callable[[tuple[int, int, int]], bool]) -> int | None:
        low, high = 0, self._count
        while low < high:
            middle = (low + high) // 2
            if fits(self._entry(middle)):
                low = middle + 1
            else:
                high = middle
        return low - 1 if low else None

    def _entry(self, number: int) -> tuple[int, int, int]:
        assert self._file is not None
        data = os.pread(self._file.fileno(), TIMES_ENTRY.size, number * TIMES_ENTRY.size)
        begins, ends, when = TIMES_ENTRY.unpack(data)
        return int(begins), int(ends), int(when)

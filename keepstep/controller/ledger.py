"""The job's memory: an append-only, hash-chained table in SQLite. One writer, any number of readers.

An entry is durable when `append` returns. Each entry's hash covers the one before it, so that whoever
alters, removes or reorders one is found out by `verify`. It does not know what the entries mean.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from keepstep.errors import KeepstepError, UsageError

FORMAT_VERSION = 1
APPLICATION_ID = 0x4B505354  # "KPST": tells a ledger from any other SQLite file
GENESIS = "0" * 64

_SCHEMA = f"""
CREATE TABLE entries (
    sequence INTEGER PRIMARY KEY,
    time_ns  INTEGER NOT NULL,
    kind     TEXT NOT NULL,
    body     TEXT NOT NULL,
    previous TEXT NOT NULL,
    hash     TEXT NOT NULL
);
CREATE TABLE head (only INTEGER PRIMARY KEY CHECK (only = 1), sequence INTEGER NOT NULL, hash TEXT NOT NULL);
INSERT INTO head VALUES (1, 0, '{GENESIS}');
CREATE TRIGGER entries_are_never_changed BEFORE UPDATE ON entries
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER entries_are_never_removed BEFORE DELETE ON entries
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT_VERSION};
"""


class LedgerWriteFailed(KeepstepError):  # noqa: N818 - past tense, like the event it becomes
    """Entries could not be made durable (a full disk, mostly). The chain is unharmed: try again later."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the ledger. `body` is canonical JSON text; `time_ns` counts since the Unix epoch."""

    sequence: int
    time_ns: int
    kind: str
    body: str
    previous: str
    hash: str

    @property
    def time_s(self) -> float:
        return self.time_ns / 1e9

    def value(self) -> dict[str, Any]:
        """The body as the mapping that was appended."""
        value = json.loads(self.body)
        return value if isinstance(value, dict) else {"value": value}


@dataclass(frozen=True, slots=True)
class Verification:
    """`flaw` is None when the chain holds, else one line that names the first wrong entry."""

    entries: int
    head: str
    flaw: str | None


def entry_hash(sequence: int, time_ns: int, kind: str, body: str, previous: str) -> str:
    """SHA-256, in hex, of the JSON array of the five values (see docs/ledger.md)."""
    text = json.dumps([sequence, time_ns, kind, body, previous], separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def canonical(body: Mapping[str, Any]) -> str:
    """The one JSON text of a body: keys sorted, no spaces, ASCII only."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_simpler)


def _simpler(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


# ---- the writer -----------------------------------------------------------------------------------


class Ledger:
    """The one writer of a ledger. Raises UsageError when the file is not ours to write."""

    def __init__(self, path: Path, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.path = path
        self._clock_ns = clock_ns
        self.entries_written = self.writes = 0  # by this process
        self.write_seconds = 0.0
        self._lock_fd = _take_writer_lock(path)
        try:
            self._db = _connect(path, read_only=False)
            _prepare(self._db, path)
            self._sequence, self._head = _read_head(self._db)
        except BaseException:
            os.close(self._lock_fd)
            raise

    @property
    def head(self) -> str:
        """Hash of the newest entry: print or keep it elsewhere, and nobody can rewrite the chain unseen."""
        return self._head

    def append(self, kind: str, body: Mapping[str, Any]) -> Entry:
        """Append one entry, durably. Raises LedgerWriteFailed; the ledger then stays as it was."""
        return self.append_all([(kind, body)])[0]

    def append_all(self, items: Iterable[tuple[str, Mapping[str, Any]]]) -> list[Entry]:
        """Append entries with one write to the disk: all of them or none."""
        began_s = time.perf_counter()
        written: list[Entry] = []
        sequence, head = self._sequence, self._head
        for kind, body in items:
            sequence, text, now_ns = sequence + 1, canonical(body), self._clock_ns()
            entry = Entry(sequence, now_ns, kind, text, head, entry_hash(sequence, now_ns, kind, text, head))
            written.append(entry)
            head = entry.hash
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                self._db.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?)", map(_row, written))
                self._db.execute("UPDATE head SET sequence = ?, hash = ?", (sequence, head))
        except (sqlite3.Error, OSError) as error:
            raise LedgerWriteFailed(f"cannot write {self.path}: {error}") from error
        self._sequence, self._head = sequence, head
        self.entries_written += len(written)
        self.writes += 1
        self.write_seconds += time.perf_counter() - began_s
        return written

    def entries(self, after: int = 0) -> list[Entry]:
        """The entries with a sequence above `after`, oldest first."""
        return _select(self._db, after)

    def verify(self) -> Verification:
        return _verify(self._db)

    def close(self) -> None:
        """Fold the write-ahead log into the file, so that a finished ledger is one file; release the lock."""
        try:
            self._db.execute("PRAGMA journal_mode = DELETE")
        except sqlite3.Error:
            pass  # a reader has it open, or the disk is full: the log stays beside the file, nothing is lost
        self._db.close()
        os.close(self._lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _row(entry: Entry) -> tuple[int, int, str, str, str, str]:
    return entry.sequence, entry.time_ns, entry.kind, entry.body, entry.previous, entry.hash


def _take_writer_lock(path: Path) -> int:
    """On the directory: closing any descriptor of the database itself would drop SQLite's own locks."""
    try:
        lock_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"cannot write a ledger in {path.parent}: {error.strerror}") from None
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock_fd)
        raise UsageError(f"{path} is being written by another controller") from None
    return lock_fd


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            db.executescript("BEGIN IMMEDIATE;" + _SCHEMA + "COMMIT;")
    except sqlite3.Error as error:
        raise _not_usable(path, error) from None
    _check_format(db, path)


# ---- a reader -------------------------------------------------------------------------------------


class LedgerReader:
    """Reads a ledger while the job writes it, or afterwards; can change nothing."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UsageError(f"there is no ledger at {path}")
        self.path = path
        self._db = _connect(path, read_only=True)
        _check_format(self._db, path)

    def entries(self, after: int = 0) -> list[Entry]:
        """The entries with a sequence above `after`, oldest first."""
        return _select(self._db, after)

    def verify(self) -> Verification:
        return _verify(self._db)

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# ---- common to both -------------------------------------------------------------------------------


def _connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    if not read_only:
        # The controller writes from one helper thread and reads from others, never at the same time as it writes.
        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    uri = path.resolve().as_uri()
    for suffix in ("?mode=ro", "?mode=ro&immutable=1"):  # the second: a finished ledger on a read-only disk
        db = sqlite3.connect(uri + suffix, uri=True, isolation_level=None, timeout=5.0)
        try:
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return db
        except sqlite3.OperationalError:
            db.close()
        except sqlite3.Error as error:
            db.close()
            raise _not_usable(path, error) from None
    raise UsageError(f"cannot read {path}")


def _check_format(db: sqlite3.Connection, path: Path) -> None:
    try:
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.Error as error:
        raise _not_usable(path, error) from None
    if application != APPLICATION_ID:
        db.close()
        raise UsageError(f"{path} is not a Keepstep ledger")
    if version > FORMAT_VERSION:
        db.close()
        raise UsageError(
            f"{path} was written by a newer Keepstep (format {version}; this one reads up to "
            f"{FORMAT_VERSION}): upgrade Keepstep, or choose another --log-dir"
        )


def _not_usable(path: Path, error: Exception) -> UsageError:
    return UsageError(f"{path} cannot be used as a ledger: {error}")


def _read_head(db: sqlite3.Connection) -> tuple[int, str]:
    sequence, digest = db.execute("SELECT sequence, hash FROM head").fetchone()
    return int(sequence), str(digest)


def _select(db: sqlite3.Connection, after: int) -> list[Entry]:
    rows = db.execute(
        "SELECT sequence, time_ns, kind, body, previous, hash FROM entries WHERE sequence > ? ORDER BY sequence",
        (after,),
    )
    return [Entry(*row) for row in rows]


def _verify(db: sqlite3.Connection) -> Verification:
    """Walk the chain once. The first entry that does not fit is named, with what is wrong about it."""
    db.execute("BEGIN")  # one snapshot of both tables, though the writer may go on
    try:
        entries = _select(db, 0)
        head_sequence, head_hash = _read_head(db)
    finally:
        db.execute("COMMIT")
    return Verification(len(entries), head_hash, _first_flaw(entries, head_sequence, head_hash))


def _first_flaw(entries: list[Entry], head_sequence: int, head_hash: str) -> str | None:
    expected, previous = 1, GENESIS
    for entry in entries:
        if entry.sequence != expected:
            return (
                f"entry {expected} is missing: {expected - 1 or 'the start'} is followed by {entry.sequence}"
            )
        if entry.hash != entry_hash(entry.sequence, entry.time_ns, entry.kind, entry.body, entry.previous):
            return f"entry {entry.sequence} ({entry.kind}) was altered or moved: its hash does not fit its content"
        if entry.previous != previous:
            return f"entry {entry.sequence} ({entry.kind}) does not follow entry {expected - 1}: replaced or moved"
        expected, previous = expected + 1, entry.hash
    if head_sequence >= expected:
        return (
            f"entry {expected} is missing: the ledger ends with {expected - 1}, {head_sequence} were written"
        )
    if (head_sequence, head_hash) != (expected - 1, previous):
        return f"entry {expected - 1} is not the one that the ledger's head names"
    return None

"""The ledger's promises: durable, append-only, and no entry can be altered, removed or moved unseen."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.controller.ledger import (
    GENESIS,
    Ledger,
    LedgerReader,
    LedgerWriteFailed,
    canonical,
    entry_hash,
)
from keepstep.core.types import Course, Generation
from keepstep.errors import UsageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


def filled(path: Path, count: int = 6) -> None:
    with Ledger(path) as ledger:
        for number in range(count):
            ledger.append("note", {"number": number})


def tamper(path: Path, statement: str) -> None:
    db = sqlite3.connect(path)
    db.execute("DROP TRIGGER entries_are_never_changed")
    db.execute("DROP TRIGGER entries_are_never_removed")
    db.executescript(statement)
    db.commit()
    db.close()


def test_entries_come_back_as_they_were_written(path: Path) -> None:
    with Ledger(path, clock_ns=lambda: 1_500_000_000) as ledger:
        ledger.append("job", {"b": 1, "a": {"x": [1, 2.5, None, "é"]}})
        ledger.append("generation", {"generation": Generation(number=0, ranks=(3, 4)), "course": Course.KEEP})
    with LedgerReader(path) as reader:
        first, second = reader.entries()
        assert reader.entries(after=1) == [second]
        assert reader.verify().flaw is None and reader.verify().entries == 2
    assert (first.sequence, first.kind, first.previous, first.time_s) == (1, "job", GENESIS, 1.5)
    assert first.body == '{"a":{"x":[1,2.5,null,"\\u00e9"]},"b":1}'
    assert second.previous == first.hash
    assert second.value()["generation"]["ranks"] == [3, 4] and second.value()["course"] == "keep"


def test_the_hash_is_the_documented_one() -> None:
    import hashlib

    text = '[1,5,"job","{\\"a\\":1}","' + GENESIS + '"]'
    assert entry_hash(1, 5, "job", canonical({"a": 1}), GENESIS) == hashlib.sha256(text.encode()).hexdigest()


def test_an_opened_again_ledger_goes_on_with_its_chain(path: Path) -> None:
    filled(path, 2)
    with Ledger(path) as ledger:
        ledger.append_all([("note", {"n": 3}), ("note", {"n": 4})])
        assert [entry.sequence for entry in ledger.entries()] == [1, 2, 3, 4]
        assert ledger.verify().flaw is None


def test_an_entry_survives_sigkill_as_soon_as_append_returned(path: Path) -> None:
    code = (
        "import sys, os, signal; from pathlib import Path; from keepstep.controller.ledger import Ledger\n"
        "ledger = Ledger(Path(sys.argv[1])); ledger.append('job', {'x': 1})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    with LedgerReader(path) as reader:
        assert [entry.kind for entry in reader.entries()] == ["job"]
    with Ledger(path) as ledger:
        ledger.append("note", {})
        assert ledger.verify().flaw is None


def test_a_reader_follows_while_the_writer_writes_and_cannot_write(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.append("a", {})
        with LedgerReader(path) as reader:
            assert len(reader.entries()) == 1
            ledger.append("b", {})
            assert len(reader.entries()) == 2
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                reader._db.execute("DELETE FROM entries")


def test_a_finished_ledger_is_one_file_that_a_read_only_disk_may_hold(path: Path, tmp_path: Path) -> None:
    filled(path)
    assert not path.with_name("ledger.sqlite-wal").exists()
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(path, alone / "l.sqlite")
    alone.chmod(0o500)
    with LedgerReader(alone / "l.sqlite") as reader:
        assert len(reader.entries()) == 6
    alone.chmod(0o700)


def test_there_is_one_writer_only(path: Path) -> None:
    with Ledger(path), pytest.raises(UsageError, match="another controller"):
        Ledger(path)
    Ledger(path).close()


def test_the_table_itself_refuses_changes(path: Path) -> None:
    filled(path)
    db = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        db.execute("UPDATE entries SET body = '{}' WHERE sequence = 2")
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        db.execute("DELETE FROM entries WHERE sequence = 2")
    db.close()


REHASHED = entry_hash(3, 7, "note", "{}", "f" * 64)


@pytest.mark.parametrize(
    ("statement", "flaw"),
    [
        ("UPDATE entries SET body = '{\"number\":9}' WHERE sequence = 3", "entry 3 (note) was altered"),
        ("UPDATE entries SET kind = 'end' WHERE sequence = 1", "entry 1 (end) was altered"),
        ("UPDATE entries SET time_ns = time_ns + 1 WHERE sequence = 6", "entry 6 (note) was altered"),
        ("DELETE FROM entries WHERE sequence = 4", "entry 4 is missing: 3 is followed by 5"),
        ("DELETE FROM entries WHERE sequence = 1", "entry 1 is missing: the start is followed by 2"),
        ("DELETE FROM entries WHERE sequence = 6", "entry 6 is missing: the ledger ends with 5"),
        (
            "UPDATE entries SET sequence = 99 WHERE sequence = 2;"
            "UPDATE entries SET sequence = 2 WHERE sequence = 3;"
            "UPDATE entries SET sequence = 3 WHERE sequence = 99",
            "entry 2 (note) was altered or moved",
        ),
        (
            f"UPDATE entries SET time_ns = 7, body = '{{}}', previous = '{'f' * 64}', hash = '{REHASHED}' WHERE sequence = 3",
            "entry 3 (note) does not follow entry 2",
        ),
        ("UPDATE head SET sequence = 5", "entry 6 is not the one"),
    ],
)
def test_the_first_wrong_entry_is_named(path: Path, statement: str, flaw: str) -> None:
    filled(path)
    tamper(path, statement)
    with LedgerReader(path) as reader:
        found = reader.verify().flaw
    assert found is not None and found.startswith(flaw)


def test_an_altered_entry_with_a_fresh_hash_breaks_the_next_link(path: Path) -> None:
    filled(path)
    with LedgerReader(path) as reader:
        old = reader.entries()[2]
    fresh = entry_hash(3, old.time_ns, "note", "{}", old.previous)
    tamper(path, f"UPDATE entries SET body = '{{}}', hash = '{fresh}' WHERE sequence = 3")
    with LedgerReader(path) as reader:
        assert (reader.verify().flaw or "").startswith("entry 4 (note) does not follow entry 3")


def test_a_ledger_of_a_newer_version_is_refused_with_one_line(path: Path) -> None:
    filled(path)
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 2")
    db.close()
    for opener in (Ledger, LedgerReader):
        with pytest.raises(UsageError, match="newer Keepstep") as caught:
            opener(path)
        assert "\n" not in str(caught.value)
    with LedgerReader_version(path, 1) as reader:
        assert len(reader.entries()) == 6


def LedgerReader_version(path: Path, version: int) -> LedgerReader:  # noqa: N802 - reads as the class it makes
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {version}")
    db.close()
    return LedgerReader(path)


def test_what_is_no_ledger_is_refused_with_one_line(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no ledger"):
        LedgerReader(path)
    path.write_text("not a database at all, but long enough to be looked at" * 20)
    for opener in (Ledger, LedgerReader):
        with pytest.raises(UsageError, match="ledger") as caught:
            opener(path)
        assert "\n" not in str(caught.value)
    other = tmp_path / "other.sqlite"
    db = sqlite3.connect(other)
    db.execute("CREATE TABLE t (x)")
    db.commit()
    db.close()
    for opener in (Ledger, LedgerReader):
        with pytest.raises(UsageError, match="not a Keepstep ledger"):
            opener(other)


def test_a_body_without_json_form_is_the_callers_mistake_and_harms_nothing(path: Path) -> None:
    with Ledger(path) as ledger:
        with pytest.raises(TypeError):
            ledger.append("note", {"x": object()})
        with pytest.raises(ValueError):
            ledger.append("note", {"x": float("nan")})
        ledger.append("note", {})
        assert ledger.verify() and len(ledger.entries()) == 1


# ---- a full disk ----------------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB, where mounting is allowed."""
    place = tmp_path / "tiny"
    place.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", "size=256k", "keepstep-test", str(place)]
    if mount is None or subprocess.run([mount, *options], capture_output=True, check=False).returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(filler: Path) -> None:
    with filler.open("wb") as file:
        while True:
            os.write(file.fileno(), bytes(4096))


def write_many(ledger: Ledger) -> None:
    for number in range(200):
        ledger.append("note", {"number": number, "text": "x" * 3000})


def test_a_full_disk_is_told_and_the_chain_goes_on_when_there_is_room_again(tiny_disk: Path) -> None:
    filler = tiny_disk / "filler"
    with Ledger(tiny_disk / "ledger.sqlite") as ledger:
        ledger.append("job", {"x": 1})
        with pytest.raises(OSError, match="No space"):
            fill(filler)
        with pytest.raises(LedgerWriteFailed, match=r"cannot write .*ledger\.sqlite"):
            write_many(ledger)
        kept = len(ledger.entries())
        assert ledger.verify().flaw is None
        filler.unlink()
        ledger.append("note", {"again": True})
        assert ledger.verify().flaw is None and len(ledger.entries()) == kept + 1


LIMITED = """
import json, resource, sys
from pathlib import Path
from keepstep.controller.ledger import Ledger, LedgerWriteFailed
ledger = Ledger(Path(sys.argv[1]))
ledger.append("job", {})
resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, resource.RLIM_INFINITY))
try:
    for number in range(500):
        ledger.append("note", {"text": "x" * 2000})
    print(json.dumps("never failed"))
except LedgerWriteFailed as failure:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ledger.append("note", {"again": True})
    print(json.dumps([str(failure), ledger.verify().flaw]))
"""


def test_a_file_that_may_not_grow_is_told_and_the_chain_goes_on_afterwards(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    said, flaw = json.loads(done.stdout)
    assert said.startswith("cannot write") and flaw is None

"""The terminal never holds up the job, whatever happens to its reader."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TextIO

import pytest

from keepstep.cli import console
from keepstep.cli.console import Terminal


def opened(path: Path) -> TextIO:
    return path.open("w", encoding="utf-8")


def test_lines_go_where_they_belong_in_order(tmp_path: Path) -> None:
    with opened(tmp_path / "out") as out, opened(tmp_path / "err") as err:
        terminal = Terminal(out=out, err=err)
        terminal.say("one\ntwo")
        terminal.line("a worker's")
        terminal.say("bad", "error")
        terminal.say("odd", "warning")
        terminal.line("its stderr", error=True)
        terminal.close()
    assert (tmp_path / "out").read_text() == (
        "keepstep: one\nkeepstep: two\na worker's\nkeepstep: warning: odd\n"
    )
    assert (tmp_path / "err").read_text() == "keepstep: error: bad\nits stderr\n"


def test_a_reader_that_does_not_read_never_blocks_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "MAX_WAITING_LINES", 100)
    monkeypatch.setattr(console, "CLOSE_TIMEOUT_S", 0.2)
    read, write = os.pipe()
    with os.fdopen(write, "w") as out:
        terminal = Terminal(out=out, err=out)
        begun = time.monotonic()
        for _ in range(5000):
            terminal.line("x" * 1000)
        terminal.close()
        assert time.monotonic() - begun < 5
        os.close(read)


def test_a_reader_that_has_gone_ends_nothing() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        terminal = Terminal(out=out, err=out)
        for _ in range(10):
            terminal.line("nobody hears this")
        terminal.close()
        assert not terminal._thread.is_alive()


def test_dropped_lines_are_counted_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "MAX_WAITING_LINES", 50)
    with opened(tmp_path / "out") as out:
        terminal = Terminal(out=out, err=out)
        for number in range(200_000):
            terminal.line(str(number))
        time.sleep(0.3)
        terminal.line("last")
        terminal.close()
    text = (tmp_path / "out").read_text()
    assert "lines of output were not shown" in text and text.rstrip().endswith(("last", "files)"))


def test_text_that_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        terminal = Terminal(out=out, err=out)
        terminal.line("caf\u00e9 \udcff")
        terminal.close()
    assert (tmp_path / "out").read_text() == "caf\\xe9 \\udcff\n"


def test_progress_is_shown_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "PLAIN_PROGRESS_S", 0.02)
    with opened(tmp_path / "out") as out:
        terminal = Terminal(out=out, err=out, progress=lambda: "step 5")
        time.sleep(0.5)
        terminal.close()
    assert (tmp_path / "out").read_text() == "keepstep: step 5\n"


def test_a_terminal_shows_the_live_table_below_the_lines() -> None:
    from rich.text import Text

    leader, follower = os.openpty()
    with os.fdopen(follower, "w") as out:
        terminal = Terminal(out=out, err=out, draw=lambda: Text("THE TABLE"))
        terminal.say("started")
        terminal.line("\x1b[31mred\x1b[0m of a worker")
        time.sleep(0.6)
        terminal.close()
        os.set_blocking(leader, False)
        shown = os.read(leader, 100_000).decode()
    os.close(leader)
    assert "THE TABLE" in shown and "keepstep: started" in shown and "of a worker" in shown
    assert shown.index("keepstep: started") < shown.rindex("THE TABLE")

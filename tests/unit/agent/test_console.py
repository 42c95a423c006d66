"""Lines on the console: whole, prefixed, of the right workers; the files hold everything anyway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepstep.agent import console as module
from keepstep.agent.config import ConsoleLine
from keepstep.agent.console import Console, parse_streams, readable
from keepstep.errors import UsageError


class Screen:
    """A console, and the logs that it follows."""

    def __init__(self, run_dir: Path, tee: str = "0", redirects: str = "0") -> None:
        self.lines: list[ConsoleLine] = []
        self.console = Console(self.lines.append, run_dir, tee, redirects)
        self._logs = run_dir / "logs"
        self._logs.mkdir()

    def write(self, worker: int, data: bytes | str, stream: str = "stdout") -> None:
        with (self._logs / f"worker-{worker}.{stream}").open("ab") as file:
            file.write(data.encode() if isinstance(data, str) else data)

    def member(self, worker: int, rank: int, generation: int = 0) -> None:
        self.console.follow(worker, worker)
        self.console.promoted(worker, rank, generation, fresh=True)

    def shown(self) -> list[str]:
        self.console.turn()
        texts = [line.text for line in self.lines]
        self.lines.clear()
        return texts


@pytest.fixture
def screen(tmp_path: Path) -> Screen:
    return Screen(tmp_path)


def test_rank_0_and_everybodys_stderr_are_shown_with_their_prefix(screen: Screen) -> None:
    screen.member(7, 0, 1)
    screen.member(8, 2, 1)
    screen.write(7, "loss 0.5\n")
    screen.write(8, "hidden\n")
    screen.write(8, "Warning: hot\n", "stderr")
    assert screen.shown() == [
        "[rank 0 | worker 7 | gen 1] loss 0.5",
        "[rank 2 | worker 8 | gen 1] Warning: hot",
    ]


@pytest.mark.parametrize(
    ("tee", "redirects", "expected"),
    [
        ("0", "0", ["out0", "err0", "err1"]),
        ("1", "0", ["out0", "err0", "out1", "err1"]),
        ("0", "3", []),
        ("0", "2", ["out0"]),
        ("3", "3", ["out0", "err0", "out1", "err1"]),
        ("1:1", "0:3", ["out1", "err1"]),
    ],
)
def test_tee_and_redirects_choose_streams_per_slot(
    tmp_path: Path, tee: str, redirects: str, expected: list[str]
) -> None:
    screen = Screen(tmp_path, tee, redirects)
    for worker in (0, 1):
        screen.member(worker, worker)
        screen.write(worker, f"out{worker}\n")
        screen.write(worker, f"err{worker}\n", "stderr")
    assert [text.split("] ")[1] for text in screen.shown()] == expected


@pytest.mark.parametrize("text", ["4", "-1", "x", "", "0:1,0:2", "0:9", "0:1:2", "a:1"])
def test_streams_that_cannot_be_read_are_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="--tee"):
        parse_streams(text, "--tee")


def test_a_partial_line_waits_for_its_end_and_two_writers_do_not_hurt(screen: Screen) -> None:
    screen.member(0, 0)
    screen.write(0, "one, ")
    assert screen.shown() == []
    screen.write(0, "two\nthree\nfo")
    assert screen.shown() == ["[rank 0 | worker 0 | gen 0] one, two", "[rank 0 | worker 0 | gen 0] three"]
    screen.write(0, "ur")
    screen.console.ended(0, failed=False)
    assert screen.shown() == ["[rank 0 | worker 0 | gen 0] four"]


def test_a_line_of_a_megabyte_is_shown_whole_and_an_endless_one_in_pieces(screen: Screen) -> None:
    screen.member(0, 0)
    screen.write(0, "x" * 1_000_000 + "\n")
    assert [len(text) for text in screen.shown()] == [1_000_000 + len("[rank 0 | worker 0 | gen 0] ")]
    screen.write(0, "y" * (module.MAX_LINE_BYTES + 5))
    assert [text.count("y") for text in screen.shown()] == [module.MAX_LINE_BYTES]


def test_output_that_outruns_the_console_is_left_out_there_and_said(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BACKLOG_BYTES", 10)
    screen.member(0, 0)
    screen.write(0, "a" * 50 + "\nlast line\n")
    said, last = (text.split("] ")[1] for text in screen.shown())
    assert said.startswith("... 51 bytes left out here, see ") and last == "last line"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"plain\r", "plain"),
        (b"\xff\xfe\x00tab\tstays", "\\xff\\xfe\\x00tab\tstays"),
        (b"10%\r50%\r100%", "100%"),
        ("déjà \x1b[31mred\x1b[0m".encode(), "déjà \x1b[31mred\x1b[0m"),
    ],
)
def test_any_bytes_become_one_line(line: bytes, text: str) -> None:
    assert readable(line) == text


def test_a_progress_bar_is_shown_before_its_line_ends(screen: Screen) -> None:
    screen.member(0, 0)
    screen.write(0, " 1%\r 2%\r 3%")
    assert screen.shown() == ["[rank 0 | worker 0 | gen 0]  2%"]
    screen.write(0, "\r 4%\r 5%")
    assert screen.shown() == []  # not more often than once a second
    screen.write(0, "\r100%\n")
    assert screen.shown() == ["[rank 0 | worker 0 | gen 0] 100%"]


def test_what_a_spare_prints_while_rehearsing_stays_in_its_own_log(screen: Screen) -> None:
    screen.console.follow(3, 3)
    screen.write(3, "starting\n", "stderr")
    screen.console.hide(3)
    screen.write(3, "rehearsing\n", "stderr")
    assert screen.shown() == []
    screen.write(3, "still rehear", "stderr")
    screen.console.promoted(3, 0, 1, fresh=False)
    screen.write(3, "now it counts\n", "stderr")
    assert screen.shown() == ["[rank 0 | worker 3 | gen 1] now it counts"]


def test_the_start_of_a_first_member_is_shown_once_it_has_its_rank(screen: Screen) -> None:
    screen.console.follow(0, 0)
    screen.write(0, "import warning\n", "stderr")
    assert screen.shown() == []
    screen.console.promoted(0, 1, 0, fresh=True)
    assert screen.shown() == ["[rank 1 | worker 0 | gen 0] import warning"]


def test_a_script_that_dies_before_init_shows_why(screen: Screen) -> None:
    screen.console.follow(0, 0)
    screen.write(0, "ModuleNotFoundError: nope", "stderr")
    screen.console.ended(0, failed=True)
    assert screen.shown() == ["[worker 0] ModuleNotFoundError: nope"]


def test_a_script_that_never_comes_to_init_does_not_stay_mute(
    screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HOLD_LIMIT_S", 0.0)
    for worker in (0, 1):
        screen.console.follow(worker, worker)
        screen.write(worker, "alone\n", "stderr")
    screen.console.greeted(1)
    assert screen.shown() == ["[worker 0] alone"]


def test_lines_belong_to_the_generation_in_which_they_were_written(screen: Screen) -> None:
    screen.member(0, 0)
    screen.write(0, "before\n")
    screen.console.promoted(0, 0, 1, fresh=False)
    screen.write(0, "after\n")
    assert screen.shown() == ["[rank 0 | worker 0 | gen 0] before", "[rank 0 | worker 0 | gen 1] after"]


def test_a_fenced_worker_falls_silent_after_its_last_line(screen: Screen) -> None:
    screen.member(0, 0)
    screen.write(0, "last words")
    screen.console.hide(0)
    screen.write(0, "\nzombie\n")
    screen.console.ended(0, failed=True)
    assert screen.shown() == ["[rank 0 | worker 0 | gen 0] last words"]


def test_a_log_that_does_not_exist_is_no_error(screen: Screen) -> None:
    screen.member(0, 0)
    assert screen.shown() == []
    screen.console.ended(0, failed=True)
    screen.console.ended(5, failed=True)
    assert screen.shown() == []


def fields(line: ConsoleLine) -> tuple[Any, ...]:
    return line.stream, line.worker, line.rank, line.generation


def test_a_line_says_where_it_comes_from(screen: Screen) -> None:
    screen.member(4, 0, 2)
    screen.write(4, "x\n", "stderr")
    screen.console.turn()
    assert [fields(line) for line in screen.lines] == [("stderr", 4, 0, 2)]


def test_a_reader_that_has_gone_stops_nothing(tmp_path: Path) -> None:
    def broken(line: ConsoleLine) -> None:
        raise BrokenPipeError

    screen = Screen(tmp_path)
    screen.console = Console(broken, tmp_path, "0", "0")
    screen.member(0, 0)
    screen.write(0, "x\n")
    screen.console.turn()

"""`keepstep logs`: moments as people write them, lines as they are shown, mistakes in one line."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from keepstep.agent.log_reader import Line
from keepstep.cli.log_source import Stream, merged
from keepstep.cli.logs import parse_since, shown
from keepstep.cli.main import run
from keepstep.controller.ledger import Ledger
from keepstep.errors import UsageError

NOW_S = datetime.datetime(2026, 11, 30, 14, 30).timestamp()


@pytest.mark.parametrize(
    ("text", "before_s"),
    [
        ("30s", 30),
        ("10m", 600),
        ("2h", 7200),
        ("1d", 86400),
        ("14:00", 1800),
        ("15:00", 84600),
        ("2026-11-30T14:29:30", 30),
    ],
)
def test_moments_are_read(text: str, before_s: float) -> None:
    assert parse_since(text, NOW_S) == int((NOW_S - before_s) * 1e9)


@pytest.mark.parametrize("text", ["", "yesterday", "10", "25:00", "-5m"])
def test_what_is_no_moment_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--since"):
        parse_since(text, NOW_S)


def test_a_line_says_when_and_who() -> None:
    at = int(NOW_S * 1e9) + 250_000_000
    assert shown(Line(at, 7, "stdout", "loss 1", 2, 1)) == "14:30:00.250 [rank 2 | worker 7 | gen 1] loss 1"
    assert shown(Line(at, 7, "stderr", "imports")) == "14:30:00.250 [worker 7] imports"
    assert shown(Line(at, 7, "", "worker 7 ended", note=True)) == "14:30:00.250 --- worker 7 ended ---"


def test_several_nodes_are_merged_by_time() -> None:
    from keepstep.agent.log_reader import Batch

    def node(*times: int) -> Stream:
        batches = iter([Batch([Line(t, 0, "stdout", str(t)) for t in times], {}, False)])
        return Stream("n", lambda cursors: next(batches))

    assert [line.text for line in merged([node(1, 4, 5), node(2, 3, 6)])] == list("123456")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.append("job", {"job": "j", "world_size": 2})
        ledger.append("generation", {"number": 0, "ranks": [0, 1]})
        for worker in (0, 1):
            ledger.append("note", {"about": "worker", "worker": worker, "node": "n0", "slot": worker})
        ledger.append("end", {"exit_code": 0, "reason": "done"})
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-0.stdout").write_text("hello\nlast line")
    return tmp_path


def test_a_finished_job_is_shown_to_its_last_line_and_a_follower_ends(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["logs", str(run_dir)], ["logs", "-f", "--run", str(run_dir)]):
        assert run(arguments) == 0
        assert [line[13:] for line in capsys.readouterr().out.splitlines()] == [
            "[worker 0] hello",
            "[worker 0] last line",
        ]


def test_ranks_and_nodes_that_the_job_does_not_have_are_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, said in ((["--rank", "2"], "there is no rank 2"), (["--node", "x"], "there is no node x")):
        assert run(["logs", str(run_dir), *arguments]) == 2
        told = capsys.readouterr().err
        assert said in told and told.count("\n") == 1

"""Logs as one story: by time over all workers, by rank across those that played it, a bounded batch at a time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from keepstep.agent import log_reader, log_times
from keepstep.agent.log_reader import Line, Query, read_batch
from keepstep.agent.log_times import LogTimes
from keepstep.core.types import Generation


class Story:
    """Workers that write, and an agent that follows; the clock moves by itself, 1 s a turn."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir = run_dir
        (run_dir / "logs").mkdir(parents=True)
        self.living: dict[int, int] = {}
        self.times = LogTimes("node-a", run_dir, lambda: list(self.living.items()))
        self.now_ns = 1_000_000_000_000
        monkeypatch.setattr(time, "time_ns", lambda: self.now_ns)

    def start(self, *workers: int) -> None:
        for worker in workers:
            self.living[worker] = worker
        self.turn()

    def turn(self) -> None:
        self.now_ns += 1_000_000_000
        self.times.turn()

    def write(self, worker: int, text: str, stream: str = "stdout") -> None:
        with (self.run_dir / "logs" / f"worker-{worker}.{stream}").open("a") as file:
            file.write(text)
        self.turn()

    def announce(self, number: int, *ranks: int, fresh: bool = False) -> None:
        self.now_ns += 1_000_000_000
        self.times.announced(Generation(number=number, ranks=ranks, fresh=fresh))

    def end(self, worker: int, how: str) -> None:
        del self.living[worker]
        self.times.ended(worker, how)

    def read(self, **query: object) -> list[str]:
        batch = read_batch(self.run_dir, Query(**query), {})  # type: ignore[arg-type]
        return [line.text for line in batch.lines]


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    made = Story(tmp_path / "run", monkeypatch)
    made.start(0, 1, 2)
    made.write(0, "zero starts\n")
    made.write(1, "one starts\n")
    made.write(2, "spare rehearses\n")
    made.announce(0, 0, 1, fresh=True)
    made.write(1, "one at step 1\n")
    made.write(0, "zero at step 1\n")
    made.write(1, "one at step 2", "stderr")
    made.end(1, "SIGKILL")
    made.announce(1, 0, 2)
    made.write(2, "two at step 2\n")
    made.write(0, "zero at step 2\n")
    return made


def test_lines_of_all_workers_come_in_the_order_of_time(story: Story) -> None:
    lines = read_batch(story.run_dir, Query(), {}).lines
    output = [line.text for line in lines if not line.note]
    assert output == [
        "zero starts",
        "one starts",
        "spare rehearses",
        "one at step 1",
        "zero at step 1",
        "one at step 2",
        "two at step 2",
        "zero at step 2",
    ]
    assert [line.time_ns for line in lines] == sorted(line.time_ns for line in lines)
    spare = next(line for line in lines if line.text == "spare rehearses")
    assert (spare.worker, spare.rank, spare.node) == (2, None, "node-a")


def test_a_ranks_log_goes_on_with_its_next_player_and_says_so(story: Story) -> None:
    assert story.read(rank=1) == [
        "one starts",
        "worker 1 on node-a plays rank 1 from generation 0 on",
        "one at step 1",
        "one at step 2",
        "worker 1 on node-a ended: SIGKILL",
        "worker 2 on node-a plays rank 1 from generation 1 on",
        "two at step 2",
    ]


def test_since_leaves_out_what_is_older(story: Story) -> None:
    lines = read_batch(story.run_dir, Query(), {}).lines
    since_ns = next(line.time_ns for line in lines if line.text == "one at step 2")
    assert story.read(since_ns=since_ns)[0] == "one at step 2"
    assert story.read(since_ns=story.now_ns + 10**9) == []


def test_whoever_follows_gets_each_line_once_and_no_half_one(story: Story) -> None:
    batch = read_batch(story.run_dir, Query(whole=True), {})
    assert read_batch(story.run_dir, Query(whole=True), batch.cursors).lines == []
    story.write(0, "half")
    batch = read_batch(story.run_dir, Query(whole=True), batch.cursors)
    assert batch.lines == []
    story.write(0, " and half\n")
    batch = read_batch(story.run_dir, Query(whole=True), batch.cursors)
    assert [line.text for line in batch.lines] == ["half and half"]
    assert read_batch(story.run_dir, Query(whole=True), batch.cursors).lines == []


def test_following_a_rank_tells_a_change_once(story: Story) -> None:
    batch = read_batch(story.run_dir, Query(rank=1, whole=True), {})
    story.end(2, "exit code 1")
    story.start(3)
    story.announce(2, 0, 3)
    story.write(3, "three at step 3\n")
    batch = read_batch(story.run_dir, Query(rank=1, whole=True), batch.cursors)
    assert [line.text for line in batch.lines] == [
        "worker 2 on node-a ended: exit code 1",
        "worker 3 on node-a plays rank 1 from generation 2 on",
        "three at step 3",
    ]
    assert read_batch(story.run_dir, Query(rank=1, whole=True), batch.cursors).lines == []


def test_many_lines_come_in_bounded_batches_without_a_gap(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "MAX_BATCH_LINES", 3)
    whole: list[str] = []
    cursors: dict[str, int] = {}
    for _ in range(20):
        batch = read_batch(story.run_dir, Query(), cursors)
        assert len(batch.lines) <= 3
        whole += [line.text for line in batch.lines]
        cursors = batch.cursors
        if not batch.more:
            break
    monkeypatch.undo()
    assert whole == story.read()


def test_a_log_without_times_or_roles_is_still_shown(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-4.stdout").write_bytes(b"an old run\n\xff no text\n")
    lines = read_batch(tmp_path, Query(), {}).lines
    assert [line.text for line in lines] == ["an old run", "\\xff no text"]


def test_an_agent_that_comes_back_goes_on_where_it_was(story: Story) -> None:
    again = LogTimes("node-a", story.run_dir, lambda: list(story.living.items()))
    before = [line.text for line in read_batch(story.run_dir, Query(), {}).lines]
    story.now_ns += 10**9
    again.turn()
    assert [line.text for line in read_batch(story.run_dir, Query(), {}).lines] == before


def test_a_full_disk_costs_times_and_nothing_else(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log_times.os, "write", full)
    story.times.turn()
    story.write(0, "goes on\n")
    assert "goes on" in story.read()


def test_lines_travel_as_json() -> None:
    line = Line(5, 1, "stderr", "text", 2, 3, "n", False)
    assert Line.from_list(line.to_list()) == line
    with pytest.raises((ValueError, TypeError)):
        Line.from_list(["x"])

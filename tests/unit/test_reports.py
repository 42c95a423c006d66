"""What follows from the ranks' reports: the line that counts, the time of a recovery, equality bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.cli.reports import (
    ReportReader,
    Reports,
    compare,
    kill_to_next_new_step_s,
    read_reports,
    recomputation,
)


def write(folder: Path, rank: int, *entries: dict[str, object]) -> None:
    (folder / "reports").mkdir(parents=True, exist_ok=True)
    with (folder / "reports" / f"rank-{rank}.jsonl").open("a") as file:
        for entry in entries:
            file.write(json.dumps(entry) + "\n")


def step(
    number: int, time_s: float, *, generation: int = 0, worker: int = 0, loss: float = 1.0
) -> dict[str, object]:
    return {"step": number, "generation": generation, "worker": worker, "time_s": time_s, "loss": loss}


def resumed(number: int, time_s: float, *, generation: int = 1, worker: int = 2) -> dict[str, object]:
    return {"resumed": True, "step": number, "generation": generation, "worker": worker, "time_s": time_s}


def final(number: int, digest: str = "aa") -> dict[str, object]:
    return {
        "final": True,
        "step": number,
        "digest": digest,
        "tensors": {"w": digest},
        "worker": 0,
        "time_s": 9.0,
    }


def two_ranks(folder: Path, loss: float = 1.0, digest: str = "aa") -> Reports:
    for rank in (0, 1):
        write(folder, rank, step(0, 1.0), step(1, 2.0, loss=loss), final(2, digest))
    return read_reports(folder)


def test_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    write(tmp_path, 0, step(0, 1.0, loss=3.0), step(1, 2.0, loss=2.5), step(1, 3.0, generation=1, loss=2.0))
    assert {s: line.loss for s, line in read_reports(tmp_path).counted(0).items()} == {0: 3.0, 1: 2.0}


def test_a_line_still_being_written_is_read_once_it_is_whole(tmp_path: Path) -> None:
    write(tmp_path, 0, step(0, 1.0))
    path = tmp_path / "reports" / "rank-0.jsonl"
    text = json.dumps(step(1, 2.0))
    path.write_text(path.read_text() + text[:10])
    reader = ReportReader(tmp_path)
    assert [line.step for line in reader.poll()] == [0]
    with path.open("a") as file:
        file.write(text[10:] + "\n")
    assert [line.step for line in reader.poll()] == [1]
    assert reader.poll() == []


def test_equal_runs_are_identical(tmp_path: Path) -> None:
    compared = compare(two_ranks(tmp_path / "a"), two_ranks(tmp_path / "b"))
    assert (compared.identical, compared.steps, compared.ranks, compared.difference) == (True, 2, 2, "")


def test_the_last_bit_of_one_loss_is_a_difference(tmp_path: Path) -> None:
    compared = compare(two_ranks(tmp_path / "a"), two_ranks(tmp_path / "b", loss=1.0000000000000002))
    assert not compared.identical
    assert "step 1, rank 0" in compared.difference


def test_equal_losses_with_another_final_state_are_not_identical(tmp_path: Path) -> None:
    compared = compare(two_ranks(tmp_path / "a"), two_ranks(tmp_path / "b", digest="ab"))
    assert compared.difference == "final state of rank 0 differs: w"


@pytest.mark.parametrize("missing", ["everything", "digest", "rank", "step"])
def test_what_is_missing_is_never_identical(tmp_path: Path, missing: str) -> None:
    whole = two_ranks(tmp_path / "a")
    if missing != "everything":
        write(tmp_path / "b", 0, step(0, 1.0), step(1, 2.0), final(2))
        if missing == "digest":
            write(tmp_path / "b", 1, step(0, 1.0), step(1, 2.0))
        elif missing == "step":
            write(tmp_path / "b", 1, step(0, 1.0), final(2))
    part = read_reports(tmp_path / "b")
    assert not compare(whole, part).identical
    assert not compare(part, whole).identical


def test_the_clock_of_a_recovery_stops_at_the_first_commit_of_a_step_that_not_all_had_reported(
    tmp_path: Path,
) -> None:
    write(tmp_path, 0, step(4, 10.0), step(5, 10.2), step(5, 10.9, generation=1), step(6, 11.2, generation=1))
    write(tmp_path, 1, step(4, 10.0), step(5, 10.2))
    write(tmp_path, 1, step(5, 11.0, generation=1, worker=2))
    assert kill_to_next_new_step_s(read_reports(tmp_path), 1, 10.1) is None  # 5 is at its gate
    write(tmp_path, 1, resumed(5, 11.1), step(6, 11.3, generation=1, worker=2))
    reports = read_reports(tmp_path)
    assert kill_to_next_new_step_s(reports, 1, 10.1) == pytest.approx(1.0)  # 5 was nobody's yet
    assert kill_to_next_new_step_s(reports, 1, 10.5) == pytest.approx(0.8)  # 5 was everybody's: 6 is new
    assert kill_to_next_new_step_s(reports, 1, 12.0) is None


def test_steps_computed_twice_are_counted_and_committed_ones_called_lost(tmp_path: Path) -> None:
    write(tmp_path, 0, step(5, 1.0), step(5, 2.0, generation=1), step(6, 3.0, generation=1))
    once = recomputation(line for lines in read_reports(tmp_path).lines.values() for line in lines)
    assert (once.committed_steps_lost, once.recomputed_steps, once.most_in_a_generation) == (0, 1, 1)
    write(tmp_path, 0, step(5, 4.0, generation=2))
    lost = recomputation(line for lines in read_reports(tmp_path).lines.values() for line in lines)
    assert (lost.committed_steps_lost, lost.recomputed_steps, lost.most_in_a_generation) == (1, 1, 1)

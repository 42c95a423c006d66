"""A worker that takes over rank 0 continues its TensorBoard run: no step logged twice, none missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.jobs import run_job

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "tensorboard_logging.py")
STEPS = 16

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def logged(folder: Path) -> list[tuple[int, float]]:
    """What TensorBoard shows of the run: (step, loss) of each event, in order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars("loss")]


def test_the_heir_of_rank_0_continues_its_tensorboard_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    board = tmp_path / "board"
    # The first death comes right after a commit, before it was logged; the second in a step that is done again.
    job = run_job(
        tmp_path / "run",
        [EXAMPLE, "--logdir", str(board), "--steps", str(STEPS), "--symmetric"],
        ranks=2,
        spares=2,
        faults=["rank=0,step=6,at=block_end", "rank=0,step=11,at=backward"],
    )
    assert job.status == 0, job.output + job.worker_log()
    assert [incident["rank"] for incident in job.ledger("incident_closed")] == [0, 0], job.output
    shown = logged(board)
    assert [step for step, _ in shown] == list(range(STEPS)), shown
    reported = job.reports.counted(0)
    assert [value for _, value in shown] == pytest.approx([reported[s].values["loss"] for s in range(STEPS)])
    writers = list(board.glob("events.*"))
    assert len(writers) == 3, f"one writer for each player of rank 0: {writers}"

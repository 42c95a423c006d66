"""What the job's exit code says when a rank dies after the last step: training is complete, its own work is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.jobs import run_job

# After the loop the victim kills itself; the other rank is still busy then, or has left already.
SCRIPT = """
import os, signal, sys, time, torch, keepstep
victim, others_stay_s, own_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
run = keepstep.init()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.protect(model=model, optimizer=optimizer)
for step in run.steps(until=6):
    with step:
        model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()
if run.rank == victim:
    time.sleep(own_s)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(others_stay_s)
"""


@pytest.mark.integration
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("victim", "others_stay_s", "own_s"),
    [
        pytest.param(1, 3.0, 0.0, id="the others are busy"),
        pytest.param(0, 0.0, 2.0, id="the others have left"),
    ],
)
def test_a_death_after_the_loop_is_told_and_is_no_success(
    tmp_path: Path, victim: int, others_stay_s: float, own_s: float
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    job = run_job(
        tmp_path / "run", [str(script), str(victim), str(others_stay_s), str(own_s)], ranks=2, spares=1
    )
    assert job.status == 137, job.output
    assert "training is complete, all 6 steps are committed on every rank, but " in job.output
    assert (
        f"rank {victim} (worker {job.ledger('generation')[0]['ranks'][victim]}) was ended by SIGKILL in what the script does after its loop"
        in job.output
    )
    assert "run.finish()" in job.output
    assert [body["resolution"] for body in job.ledger("incident_closed")] == ["after_training"] * bool(
        others_stay_s
    )

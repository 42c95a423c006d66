"""`keepstep prove` on real jobs: a script that repeats itself, one that does not, one that forgets its state."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

SCRIPT = Path(__file__).parent / "scripts" / "train.py"
PROOF_TIMEOUT_S = 280.0
ONE_RANK = ("--ranks", "1", "--spares", "0")  # where nobody has to take over

# What it trains depends on a flag: on an unseeded generator, or on a number that nobody protects.
SMALL = """
import sys
import torch
from torch import nn
import keepstep

run = keepstep.init()
torch.manual_seed(7)
model = nn.Linear(4, 4)
if "unseeded" in sys.argv:
    torch.seed()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.protect(model=model, optimizer=optimizer)
forgotten = 0
for step in run.steps(until=8):
    with step:
        forgotten += "forgetful" in sys.argv
        loss = (model(torch.randn(4)) + forgotten).square().mean()
        loss.backward()
        torch.distributed.all_reduce(model.weight.grad)
        torch.distributed.all_reduce(model.bias.grad)
        run.report(loss=loss.item())
        optimizer.step()
        optimizer.zero_grad()
"""


def prove(*arguments: str, cwd: Path | None = None) -> tuple[int, dict[str, Any], str]:
    """Exit code, the JSON, and what was said meanwhile."""
    ended = subprocess.run(
        [sys.executable, "-m", "keepstep", "prove", "--json", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=cwd,
        capture_output=True,
        timeout=PROOF_TIMEOUT_S,
        text=True,
        check=False,
    )
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout), ended.stderr


@pytest.fixture
def small(tmp_path: Path) -> str:
    script = tmp_path / "small.py"
    script.write_text(SMALL)
    return str(script)


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_a_script_that_repeats_itself_is_proven_identical(tmp_path: Path) -> None:
    code, told, said = prove(
        *("--ranks", "2", "--kill", "rank=1,step=4,at=after_gate", "--stop", "rank=0,step=9,at=backward"),
        *("--keep", str(tmp_path / "kept"), "-m", f"scripts.{SCRIPT.stem}", "--until", "12", "--symmetric"),
        cwd=SCRIPT.parents[1],
    )
    assert (code, told["deterministic"], told["identical"]) == (0, True, True), said
    assert told["first_difference"] is None and told["steps"] == 12
    assert [fault["struck"] for fault in told["faults"]] == [True, True]
    assert len(told["incidents"]) == 2 and told["committed_steps_lost"] == 0
    assert "Identical: 12 steps on 2 ranks" in said
    assert {"undisturbed-1", "undisturbed-2", "with-faults"} <= {
        p.name for p in (tmp_path / "kept").iterdir()
    }


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_a_script_that_does_not_repeat_itself_is_told_so_first(small: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    code, told, said = prove(*ONE_RANK, "--kill", "rank=0,step=4", "--keep", str(kept), small, "unseeded")
    assert (code, told["deterministic"], told["identical"]) == (3, False, None), said
    assert told["first_difference"]["step"] == 0 and told["first_difference"]["name"] == "loss"
    assert "torch.manual_seed" in told["usual_cause"] and not (kept / "with-faults").exists()


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_state_that_the_script_never_protected_is_found(small: str, tmp_path: Path) -> None:
    """The replacement starts to count anew, and the rank that serves the step again counts it twice."""
    kept = tmp_path / "kept"
    code, told, said = prove("--kill", "rank=1,step=4,at=gate", "--keep", str(kept), small, "forgetful")
    assert (code, told["deterministic"], told["identical"]) == (1, True, False), said
    assert (told["first_difference"]["name"], told["first_difference"]["step"]) == ("loss", 4)
    assert "Not identical: the first difference is the reported value 'loss'" in said


@pytest.mark.integration
@pytest.mark.timeout(300)
def test_a_fault_beyond_the_end_proves_nothing(small: str, tmp_path: Path) -> None:
    code, told, said = prove(*ONE_RANK, "--kill", "rank=0,step=100", "--keep", str(tmp_path / "kept"), small)
    assert (code, told["deterministic"], told["identical"]) == (4, True, None), said
    assert "the script has 8 steps, the last is step 7" in said


@pytest.mark.integration
@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_by_a_signal_it_leaves_no_process_and_no_folder(
    number: signal.Signals, small: str, tmp_path: Path
) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    proof = subprocess.Popen(
        [sys.executable, "-m", "keepstep", "prove", "--kill", "rank=1,step=4", small],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        stderr=subprocess.PIPE,
    )
    assert proof.stderr is not None
    try:
        said = b""
        deadline = time.monotonic() + 90
        while b"generation 0" not in said:
            assert time.monotonic() < deadline, said
            if select.select([proof.stderr], [], [], 1.0)[0]:
                said += os.read(proof.stderr.fileno(), 4096)
        family = psutil.Process(proof.pid).children(recursive=True)
        assert family and list(folder.iterdir())
        proof.send_signal(number)
        assert proof.wait(60) == 128 + number
    finally:
        proof.kill()
        proof.wait()
        proof.stderr.close()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == [] and list(folder.iterdir()) == []

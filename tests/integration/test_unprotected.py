"""The same script without Keepstep: it runs unchanged and says once that it is unprotected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPT, run_job

ARGUMENTS = ("--parallel", "ddp", "--until", "6", "--clip", "--aside")
SAID = "the script runs unprotected"


def run_plain(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
    return subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=110, check=False
    )


def test_under_plain_python(tmp_path: Path) -> None:
    ended = run_plain([sys.executable, str(SCRIPT), *ARGUMENTS], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(SAID) == 1
    assert "finished" in ended.stdout


@pytest.mark.parametrize("parallel", ["ddp", "plain"])
def test_under_torchrun(parallel: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    ended = run_plain([*torchrun, str(SCRIPT), *ARGUMENTS, "--parallel", parallel], tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(SAID) == 1
    assert "finished" in ended.stdout


def test_under_keepstep_run_with_keepstep_disabled(tmp_path: Path) -> None:
    job = run_job(tmp_path / "run", ARGUMENTS, ranks=2, spares=1, env={"KEEPSTEP_DISABLE": "1"})
    assert job.status == 0, job.output
    assert job.output.count(SAID) == 1
    assert "finished" in job.output

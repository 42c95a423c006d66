"""`keepstep demo` as a newcomer starts it, only shorter; and what is left when a command that starts jobs is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.test_from_outside import wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
FEW_STEPS = "20"
PNG = b"\x89PNG\r\n\x1a\n"
LIMIT_S = 400
WORKERS_MARK = "LOCAL_RANK"  # torchrun and Keepstep both set it for what they start


@pytest.mark.integration
@pytest.mark.timeout(LIMIT_S + 30)
def test_the_demo_kills_a_rank_and_proves_that_nothing_was_lost(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    demo = [sys.executable, "-m", "keepstep", "demo", "--steps", FEW_STEPS]
    done = subprocess.run(
        [*demo, "--json", str(result), "--out", str(tmp_path / "demos")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert list(found) == [
        *("identical", "steps", "committed_steps_lost", "recomputed_steps"),
        *("kill_to_next_new_step_s", "phases_s"),
    ]
    assert found["identical"] is True and found["steps"] == int(FEW_STEPS)
    assert found["committed_steps_lost"] == 0 and found["recomputed_steps"] <= 1
    assert 0 < found["kill_to_next_new_step_s"] < 60
    assert list(found["phases_s"]) == ["detect", "decide", "connect", "vote", "transfer", "resume"]
    (folder,) = (tmp_path / "demos").iterdir()
    chart = folder / "loss.png"
    assert chart.read_bytes().startswith(PNG) and chart.stat().st_size > 10_000
    for part in ("SIGKILL sent to rank", "the incident", "Identical", f"chart: {chart}"):
        assert part in done.stdout.replace("\n", ""), done.stdout


@pytest.mark.integration
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "command",
    [
        pytest.param([str(REPOSITORY / "benchmarks" / "recovery.py"), "--quick"], id="recovery"),
        pytest.param([str(REPOSITORY / "benchmarks" / "overhead.py"), "--quick"], id="overhead"),
        pytest.param(["-m", "keepstep", "demo", "--steps", FEW_STEPS], id="demo"),
    ],
)
def test_a_stopped_command_leaves_no_process_of_its_jobs(command: list[str], tmp_path: Path) -> None:
    """SIGTERM, as soon as the first worker of the first job lives."""
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as stopped:
        family: set[psutil.Process] = set()

        def has_a_worker() -> bool:
            family.update(psutil.Process(stopped.pid).children(recursive=True))
            return any(is_worker(process) for process in family)

        try:
            wait_for(has_a_worker, "a worker of the first job")
            has_a_worker()
        finally:
            stopped.send_signal(signal.SIGTERM)
        _, said = stopped.communicate(timeout=60)
    assert stopped.returncode == 128 + signal.SIGTERM, said.decode()
    assert b"Traceback" not in said, said.decode()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, f"still there: {[process.cmdline() for process in alive]}"


def is_worker(process: psutil.Process) -> bool:
    try:
        return WORKERS_MARK in process.environ()
    except psutil.Error:
        return False

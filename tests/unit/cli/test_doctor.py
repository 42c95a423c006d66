"""Each check of `keepstep doctor`, on its failing side, with real trouble: full memory, taken ports, missing pieces."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.cli import doctor_checks
from keepstep.cli.addresses import Endpoint
from keepstep.cli.doctor_checks import Check
from keepstep.cli.doctor_join import Controller, judge_network

ROOT = Path(__file__).resolve().parents[3]
UNWRITABLE = Path("/proc/keepstep")  # not even root can make it


def by_name(checks: Iterator[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_healthy_machine_has_no_failed_check(tmp_path: Path) -> None:
    found = [
        *doctor_checks.versions(),
        doctor_checks.process_watching(),
        doctor_checks.stacks(),
        doctor_checks.sockets(),
        *doctor_checks.run_directory(tmp_path / "not" / "yet"),
        *doctor_checks.gpus(),
    ]
    assert not [check for check in found if check.outcome == "failed"]
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@contextlib.contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount a tmpfs here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_shared_memory_that_is_too_small_for_the_workers_is_told_with_both_sizes(tmp_path: Path) -> None:
    with tmpfs(tmp_path, "1m") as small:
        failed = doctor_checks.shared_memory(8, 4 << 20, small)
        tight = doctor_checks.shared_memory(2, 4 << 20, small)
    assert failed.outcome == "failed"
    assert "1.05 MB free of 1.05 MB, 8 workers take 2.1 MB to 168 MB" in failed.found
    assert "--shm-size" in failed.cure
    assert tight.outcome == "warning"
    assert doctor_checks.shared_memory(1, 1, UNWRITABLE).outcome == "failed"


def test_a_port_in_use_fails_when_it_was_asked_for_and_warns_otherwise() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        asked = by_name(doctor_checks.ports([port], asked=True))
        default = by_name(doctor_checks.ports([port], asked=False))
    assert (asked[f"port {port}"].outcome, default[f"port {port}"].outcome) == ("failed", "warning")
    assert "in use" in asked[f"port {port}"].found
    assert by_name(doctor_checks.ports([port], asked=True))[f"port {port}"].outcome == "ok"


def test_a_run_directory_that_cannot_be_written_fails() -> None:
    (check,) = doctor_checks.run_directory(UNWRITABLE / "runs")
    assert check.outcome == "failed"
    assert "/proc cannot be written" in check.found


def test_a_full_disk_fails_and_a_slow_one_is_measured(tmp_path: Path) -> None:
    with tmpfs(tmp_path, "1m") as small:
        found = by_name(doctor_checks.run_directory(small / "runs"))
    assert found["disk"].outcome == "failed"
    assert "fsync takes" in found["ledger's disk"].found


def test_too_few_open_files_for_so_many_ranks_fail() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        few = doctor_checks.file_limit(ranks=64, slots=8)
        many = doctor_checks.file_limit(ranks=16_384, slots=8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert few.outcome == "ok"
    assert many.outcome == "failed"
    assert "1024 open files allowed" in many.found
    assert "ulimit -n" in many.cure


def test_a_place_without_sockets_fails() -> None:
    assert doctor_checks.sockets(UNWRITABLE).outcome == "failed"


def test_a_missing_py_spy_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    check = doctor_checks.stacks()
    assert (check.outcome, check.found) == ("warning", "not installed")


def test_a_gpu_whose_state_cannot_be_read_is_no_silence(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    checks = list(doctor_checks.gpus(tmp_path))
    assert checks[0].outcome in ("warning", "failed")
    assert "1 GPUs" in checks[0].found


# ---- other nodes ----------------------------------------------------------------------------------


def link(
    one: str, other: str, rate: float | None, latency_s: float = 0.0001, detail: str = ""
) -> dict[str, Any]:
    return {"from": one, "to": other, "bytes_per_s": rate, "latency_s": latency_s, "detail": detail}


def clock(node: str, ahead_s: float | None, error_s: float = 0.001, detail: str = "") -> dict[str, Any]:
    return {"node": node, "ahead_s": ahead_s, "error_s": error_s, "detail": detail}


def test_links_that_are_broken_slow_or_slower_than_the_others_stand_out() -> None:
    nodes = list("abcde")
    links = [
        link("a", "b", 10e9),
        link("b", "c", 2e9),
        link("c", "d", 5e6),
        link("d", "e", None, detail="cannot send to e (10.0.0.5 port 4242): TimeoutError"),
        link("e", "a", 9e9),
    ]
    found = by_name(judge_network({"nodes": nodes, "clocks": [], "links": links}))
    assert {name: check.outcome for name, check in found.items()} == {
        "b to c": "warning",
        "c to d": "failed",
        "d to e": "failed",
        "network": "failed",
    }
    assert "10.0.0.5 port 4242" in found["d to e"].found
    assert "firewall" in found["d to e"].cure


def test_a_clock_is_wrong_only_beyond_the_error_of_its_measurement() -> None:
    clocks = [clock("a", 0.25, 0.2), clock("b", -0.5, 0.01), clock("c", None, detail="no answer in 2 s")]
    found = by_name(judge_network({"nodes": ["a", "b", "c"], "clocks": clocks, "links": []}))
    assert "clock of a" not in found
    assert found["clock of b"].outcome == "warning"
    assert "500.0 ms (± 10.0) behind" in found["clock of b"].found
    assert found["clock of c"].outcome == "warning"


def test_a_controller_that_is_not_there_is_one_failed_line() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        (check,) = Controller(Endpoint("127.0.0.1", bound.getsockname()[1]), "x" * 32, None).checks()
    assert check.outcome == "failed"
    assert "refused" in check.found.lower()


# ---- the command, and PyTorch ---------------------------------------------------------------------

PATCH = """
import sys
if "keepstep.trainer.torch_pieces" in sys.orig_argv:
    {what}
"""
WITHOUT = {
    "a piece": "import torch; del torch.nn.parallel.DistributedDataParallel._update_process_group",
    "torch": "sys.modules['torch'] = None",
}


def doctor(folder: Path, *arguments: str, without: str = "") -> tuple[int, Any, str]:
    """Exit code, what it printed as JSON, and what it complained of."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if without:
        (folder / "sitecustomize.py").write_text(PATCH.format(what=WITHOUT[without]))
        environment["PYTHONPATH"] = f"{folder}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "keepstep", "doctor", "--json", *arguments],
        capture_output=True, text=True, timeout=60, env=environment, cwd=folder, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def outcomes(answer: Any) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in answer["checks"]}


def test_the_command_ends_within_its_time_and_tells_all_as_json(tmp_path: Path) -> None:
    started_s = time.monotonic()
    code, answer, complaint = doctor(tmp_path)
    assert time.monotonic() - started_s < 30, "20 s, on a machine that is not busy with tests"
    assert code == 0, complaint
    assert answer["ok"]
    names = outcomes(answer)
    assert {"python", "kernel", "pidfd", "shared memory", "open files", "loopback", "disk", "torch"} <= set(
        names
    )
    assert not list(tmp_path.iterdir())


def test_a_pytorch_that_lacks_a_piece_is_told_by_the_piece_s_name(tmp_path: Path) -> None:
    code, answer, _ = doctor(tmp_path, without="a piece")
    assert code == 1
    check = outcomes(answer)["torch's own pieces"]
    assert check["outcome"] == "failed"
    assert "torch.nn.parallel.DistributedDataParallel._update_process_group is missing" in check["found"]
    assert "unprotected" in check["cure"]


def test_no_pytorch_at_all_is_told(tmp_path: Path) -> None:
    code, answer, _ = doctor(tmp_path, without="torch")
    assert code == 1
    assert outcomes(answer)["torch"]["outcome"] == "failed"


def test_a_command_line_that_means_nothing_is_one_line(tmp_path: Path) -> None:
    code, _, complaint = doctor(tmp_path, "--join", "127.0.0.1:1")
    assert code == 2
    assert "--token-file" in complaint
    code, _, complaint = doctor(tmp_path, "--run", "nowhere")
    assert code == 2
    assert "there is no run directory nowhere" in complaint

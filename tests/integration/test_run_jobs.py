"""`keepstep run` with real processes: how jobs end, and that nothing of them is ever left.

The workers are small scripts that speak the wire without torch; what matters here is everything around.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepstep.controller.ledger import LedgerReader
from keepstep.controller.rundir import Address, RunDirectory
from keepstep.wire import codec, framing
from keepstep.wire.messages import PROTOCOL_VERSION, Fenced, Hello

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "integration" / "fake_worker.py"
DEADLINE_S = 60.0

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


class Launched:
    """One `keepstep run` in a session of its own."""

    def __init__(self, folder: Path, *command: str, run_dir: Path | None = None, output: Any = None) -> None:
        self.run_dir = run_dir or folder / "run"
        self.job = f"t{os.getpid()}-{time.monotonic_ns()}"
        self.console = folder / "console.txt"
        with self.console.open("wb") as console:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "keepstep",
                    "run",
                    "--job",
                    self.job,
                    "--log-dir",
                    str(self.run_dir),
                    *command,
                ],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output or console,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.console.read_text()

    def members(self) -> list[psutil.Process]:
        """Every living process of this job, workers' children included, found by their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get("KEEPSTEP_JOB") == self.job
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def worker(self, number: int) -> psutil.Process:
        """The process that a worker's number belongs to."""
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                if process.environ()["KEEPSTEP_WORKER"] == str(number) and "fake_worker.py" in str(
                    process.cmdline()
                ):
                    return process
        raise AssertionError(f"no process of worker {number}:\n{self.said}")

    def address(self) -> Address:
        found = RunDirectory(self.run_dir).address()
        assert found is not None, self.said
        return found

    def ask(self, path: str, method: str = "GET", body: str | None = None, token: str | None = None) -> Any:
        address = self.address()
        connection = http.client.HTTPConnection(address.url.removeprefix("http://"), timeout=10)
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {address.token if token is None else token}"}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"not in time:\n{self.said}"
            assert self.process.poll() is None, f"the job ended:\n{self.said}"
            time.sleep(0.02)

    def training(self) -> bool:
        """The job is past its setup and its spares are parked."""
        if RunDirectory(self.run_dir).address() is None:
            return False
        _, status = self.ask("/api/status")
        return status["state"] == "running" and all(one["state"] != "starting" for one in status["workers"])

    def end(self, timeout_s: float = DEADLINE_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end:\n{self.said}") from None

    def incidents(self, *arguments: str) -> Any:
        """What the command says, as JSON."""
        command = [
            sys.executable,
            "-m",
            "keepstep",
            "incidents",
            "--run",
            str(self.run_dir),
            *arguments,
            "--json",
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        return json.loads(done.stdout)


def assert_nothing_is_left(job: Launched) -> None:
    """No process, no shared memory, no socket, no address file."""
    deadline = time.monotonic() + 15
    while job.members() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not job.members(), job.members()
    assert not [name for name in os.listdir("/dev/shm") if job.job in name]
    unix = Path("/proc/net/unix").read_text()
    assert job.job not in unix
    assert not RunDirectory(job.run_dir).address_file.exists()
    assert not RunDirectory(job.run_dir).token_file.exists()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    jobs: list[Launched] = []

    def start(*command: str, **options: Any) -> Launched:
        jobs.append(Launched(tmp_path, *command, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        for process in job.members():
            with contextlib.suppress(psutil.Error):
                process.kill()
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait(10)


TWO_AND_A_SPARE = ("--nproc-per-node", "2", "--spares", "1")
LONG = (str(FAKE), "--steps", "100000")


# ---- the ordinary end -----------------------------------------------------------------------------


def test_a_job_runs_to_its_end_and_leaves_only_its_run_directory(launch: Callable[..., Launched]) -> None:
    job = launch(*TWO_AND_A_SPARE, str(FAKE), "--steps", "60")
    sockets: set[str] = set()
    job.until(lambda: bool(job.members()))
    sockets.update(process.environ()["KEEPSTEP_SOCKET"] for process in job.members() if process.is_running())
    address = job.address()
    assert RunDirectory(job.run_dir).token_file.stat().st_mode & 0o777 == 0o600
    assert RunDirectory(job.run_dir).address_file.stat().st_mode & 0o777 == 0o600
    assert job.end() == 0
    assert_nothing_is_left(job)
    assert not any(Path(path).exists() or Path(path).parent.exists() for path in sockets)
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(address.url.removeprefix("http://"), timeout=5).connect()
    with LedgerReader(job.run_dir / "ledger.sqlite") as reader:
        assert reader.verify().flaw is None and reader.entries()[-1].kind == "end"
    assert "finished after" in job.said and "Traceback" not in job.said


@pytest.mark.parametrize("launch_as", ["module", "program"])
def test_a_module_and_a_program_are_started_as_torchrun_does(
    launch: Callable[..., Launched], tmp_path: Path, launch_as: str
) -> None:
    shutil.copy(FAKE, tmp_path / "my_worker.py")
    program = tmp_path / "program.sh"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    program.chmod(0o755)
    what = ("-m", "my_worker") if launch_as == "module" else ("--no-python", str(program))
    job = launch(
        "--standalone", "--nnodes=1", "--nproc_per_node=2", "--rdzv-conf=timeout=5", *what, "--steps", "5"
    )
    assert job.end() == 0
    assert "--rdzv-conf has no effect" in job.said
    assert_nothing_is_left(job)


# ---- being stopped --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_everything_in_order(launch: Callable[..., Launched], number: int, code: int) -> None:
    job = launch(*TWO_AND_A_SPARE, *LONG, "--child")
    job.until(job.training)
    assert len(job.members()) >= 6  # three workers, each with a child of its own
    job.process.send_signal(number)
    assert job.end() == code
    assert_nothing_is_left(job)
    assert "ending the job in order" in job.said and "Traceback" not in job.said


def test_the_second_ctrl_c_ends_at_once_what_ignores_the_first(launch: Callable[..., Launched]) -> None:
    job = launch(*TWO_AND_A_SPARE, "--shutdown-timeout", "100", *LONG, "--stubborn", "--child")
    job.until(job.training)
    job.process.send_signal(signal.SIGINT)
    job.until(lambda: "ending the job in order" in job.said)
    with pytest.raises(subprocess.TimeoutExpired):
        job.process.wait(1.0)
    job.process.send_signal(signal.SIGINT)
    assert job.end(timeout_s=15) == 130
    assert_nothing_is_left(job)


def test_a_worker_that_ignores_sigterm_is_killed_after_the_time_given(
    launch: Callable[..., Launched],
) -> None:
    job = launch("--nproc-per-node", "2", "--shutdown-timeout", "0.5", *LONG, "--stubborn")
    job.until(job.training)
    job.process.send_signal(signal.SIGTERM)
    assert job.end(timeout_s=25) == 143
    assert_nothing_is_left(job)


def test_a_signal_while_workers_still_start_leaves_nothing_either(launch: Callable[..., Launched]) -> None:
    job = launch(*TWO_AND_A_SPARE, *LONG)
    job.until(lambda: bool(job.members()))
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130
    assert_nothing_is_left(job)


def test_the_api_can_stop_the_job(launch: Callable[..., Launched]) -> None:
    job = launch("--nproc-per-node", "2", *LONG)
    job.until(job.training)
    assert job.ask("/api/stop", "POST", '{"hard": true}')[0] == 202
    assert job.end() == 143
    assert_nothing_is_left(job)


def test_workers_do_not_outlive_a_launcher_that_is_killed(launch: Callable[..., Launched]) -> None:
    job = launch(*TWO_AND_A_SPARE, *LONG, "--child")
    job.until(job.training)
    job.process.kill()
    job.process.wait(10)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (
        job.members() or any(job.job in name for name in os.listdir("/dev/shm"))
    ):
        time.sleep(0.1)
    assert not job.members()
    assert not [name for name in os.listdir("/dev/shm") if job.job in name]
    command = [sys.executable, "-m", "keepstep", "status", str(job.run_dir), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["state"] == "lost"


# ---- what scripts do ------------------------------------------------------------------------------


def test_a_script_that_raises_ends_the_job_with_its_code_and_its_traceback_first(
    launch: Callable[..., Launched],
) -> None:
    job = launch(*TWO_AND_A_SPARE, str(FAKE), "--steps", "1000", "--raise-at", "5")
    assert job.end() == 17
    trace, last = job.said.index("ValueError: of the user"), job.said.index("ended with exit code 17")
    assert trace < last
    assert job.incidents() == []
    assert_nothing_is_left(job)


def test_what_the_library_refuses_is_one_line_and_code_2(launch: Callable[..., Launched]) -> None:
    job = launch("--nproc-per-node", "2", str(FAKE), "--steps", "10", "--refuse", "protect the optimizer too")
    assert job.end() == 2
    assert "keepstep: error: protect the optimizer too" in job.said
    assert_nothing_is_left(job)


def test_a_script_that_never_calls_init_is_told_so(launch: Callable[..., Launched]) -> None:
    job = launch("--nproc-per-node", "2", str(FAKE), "--steps", "10", "--silent")
    assert job.end() == 2
    assert "without calling keepstep.init()" in job.said
    assert_nothing_is_left(job)


def test_output_that_nobody_reads_does_not_stop_the_job(launch: Callable[..., Launched]) -> None:
    unread, write = os.pipe()
    job = launch("--nproc-per-node", "1", str(FAKE), "--steps", "40", "--chatty", output=write)
    os.close(write)
    try:
        assert job.end() == 0
        assert_nothing_is_left(job)
    finally:
        os.close(unread)


# ---- incidents ------------------------------------------------------------------------------------


def test_a_killed_rank_is_an_incident_that_can_be_read_while_the_job_runs_and_afterwards(
    launch: Callable[..., Launched],
) -> None:
    job = launch(*TWO_AND_A_SPARE, *LONG)
    job.until(job.training)
    job.worker(1).kill()
    job.until(lambda: "incident 1 is over" in job.said)
    live = job.incidents("show", "1")
    _, status = job.ask("/api/status")
    assert [one["worker"] for one in status["workers"] if one["rank"] == 1] == [2]
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 143
    assert job.incidents("show", "1") == live
    assert live["state"] == "closed" and live["rank"] == 1 and live["worker"] == 1
    assert "SIGKILL" in live["reason"] and live["replacements"] == {"1": 2}
    assert set(live["phases_s"]) == {"detect", "decide", "connect", "vote", "transfer", "resume"}
    assert live["steps_lost"] == 0 and live["phases_s"]["vote"] == 0.002
    assert_nothing_is_left(job)


def test_status_watches_a_job_until_it_ends(launch: Callable[..., Launched]) -> None:
    job = launch(*TWO_AND_A_SPARE, str(FAKE), "--steps", "150")
    job.until(job.training)
    command = [sys.executable, "-m", "keepstep", "status", "--run", str(job.run_dir), "--watch", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    pictures = [json.loads(line) for line in done.stdout.splitlines()]
    assert pictures[0]["live"] and pictures[0]["state"] == "running"
    assert not pictures[-1]["live"] and pictures[-1]["state"] == "finished" and pictures[-1]["exit_code"] == 0
    assert job.end() == 0


def test_observing_says_what_it_would_do_and_does_nothing(launch: Callable[..., Launched]) -> None:
    job = launch(*TWO_AND_A_SPARE, "--mode", "observe", *LONG)
    job.until(job.training)
    job.worker(1).kill()
    assert job.end() != 0
    assert "observe:" in job.said and "would" in job.said
    assert_nothing_is_left(job)


@pytest.fixture
def tiny_run_dir(tmp_path: Path) -> Iterator[Path]:
    """A run directory on a disk of 1 MiB, where mounting is allowed."""
    place = tmp_path / "tiny"
    place.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1m", "keepstep-test", str(place)]
    if (
        shutil.which("mount") is None
        or subprocess.run(["mount", *options], capture_output=True).returncode != 0
    ):
        pytest.skip("cannot mount a tmpfs here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_under_the_ledger_is_said_aloud_and_training_goes_on(
    launch: Callable[..., Launched], tiny_run_dir: Path
) -> None:
    job = launch(*TWO_AND_A_SPARE, str(FAKE), "--steps", "300", run_dir=tiny_run_dir)
    job.until(job.training)
    filler = os.open(tiny_run_dir / "filler", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(filler, bytes(4096))
    os.close(filler)
    # Pages of the log that exist already may still take an entry or two.
    for victim in (1, 2):
        job.until(job.training)
        job.worker(victim).kill()
        line = f"worker {victim} was ended by SIGKILL"
        job.until(lambda line=line: line in job.said)  # type: ignore[misc]
    assert job.end() == 0
    assert "the ledger cannot be written" in job.said and "training goes on" in job.said
    assert_nothing_is_left(job)


# ---- strangers ------------------------------------------------------------------------------------


def test_a_stranger_without_the_token_gets_nothing_from_any_door(launch: Callable[..., Launched]) -> None:
    job = launch("--nproc-per-node", "2", *LONG)
    job.until(job.training)
    for path in ("/api/status", "/api/incidents", "/api/incidents/1"):
        assert job.ask(path, token="guess")[0] == 401
    assert job.ask("/api/stop", "POST", token="guess")[0] == 401
    environment = job.worker(0).environ()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(environment["KEEPSTEP_SOCKET"])
        hello = Hello(version=PROTOCOL_VERSION, token="guess", worker=0, pid=os.getpid(), role="control")
        framing.send_frame(sock, codec.encode(hello))
        answers: list[object] = []
        with contextlib.suppress(ConnectionError):
            while (data := framing.recv_frame(sock)) is not None:
                answers.append(codec.decode(data))
    assert all(isinstance(one, Fenced) for one in answers)
    assert job.process.poll() is None and job.training()


# ---- bad input that needs a process -----------------------------------------------------------------


def refused(tmp_path: Path, *command: str) -> str:
    """The one line with which `keepstep run` refuses."""
    done = subprocess.run(
        [sys.executable, "-m", "keepstep", "run", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done
    return done.stderr


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port}" in refused(tmp_path, "--controller-port", str(port), str(FAKE), "--steps", "1")


def test_a_run_directory_is_used_once(tmp_path: Path, launch: Callable[..., Launched]) -> None:
    job = launch("--nproc-per-node", "1", str(FAKE), "--steps", "3")
    assert job.end() == 0
    assert "already holds a run" in refused(tmp_path, "--log-dir", str(job.run_dir), str(FAKE))

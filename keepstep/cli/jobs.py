"""Starts `keepstep run` as a user would, watches it from outside, and does real harm to its workers.

Shared by the demo and the benchmarks. It knows the run directory and the operating system, and nothing of
the controller's insides: a worker is found by the variables in its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from keepstep.cli.reports import Line, ReportReader
from keepstep.controller.incidents import incidents_of
from keepstep.controller.rundir import RunDirectory
from keepstep.errors import KeepstepError

POLL_S = 0.02
END_GRACE_S = 15.0
ASK_TIMEOUT_S = 2.0


class JobFailed(KeepstepError):  # noqa: N818 - an outcome, not a fault of this code
    """A launched job did not do what it was started for. The message ends with its last output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Harm:
    """One signal that was sent to the worker of a rank. `at_s` is unix time, just before sending."""

    rank: int
    worker: int
    pid: int
    signal: signal.Signals
    at_s: float


class LaunchedJob:
    """One `keepstep run` in a process of its own; leave the `with` block and nothing of it is left."""

    def __init__(
        self,
        script: Path | str,
        arguments: Sequence[str],
        *,
        module: bool = False,
        ranks: int,
        spares: int,
        run_dir: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self.ranks = ranks
        self.console_path = run_dir.with_name(run_dir.name + ".console.txt")
        self.reader = ReportReader(run_dir)
        self._console = self.console_path.open("wb")
        self._console_read = 0
        # fmt: off
        command = [
            sys.executable, "-m", "keepstep", "run",
            "--nproc-per-node", str(ranks), "--spares", str(spares), "--log-dir", str(run_dir),
            *(["--module"] if module else []), str(script), *arguments,
        ]
        # fmt: on
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._console,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the job itself
        )

    def __enter__(self) -> LaunchedJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._console.close()

    # ---- what can be seen from outside ----------------------------------------------------------

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def console_lines(self) -> list[str]:
        """Whole lines that the launcher printed since the last call."""
        with self.console_path.open("rb") as file:
            file.seek(self._console_read)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._console_read += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()

    def last_output(self, lines: int = 15) -> str:
        text = self.console_path.read_text(errors="replace").splitlines()
        return "\n".join(text[-lines:])

    def workers(self) -> dict[int, int]:
        """Worker -> pid of every living worker process (not of its data loaders)."""
        found: dict[int, int] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                worker = _worker_of(process)
                if worker is not None:
                    found[worker] = process.pid  # parents come first: a shim gives way to what it runs
        return found

    def status(self) -> dict[str, Any]:
        """The controller's own word on the job; empty while it does not answer."""
        return self._ask("/api/status") or {}

    def spares(self) -> dict[int, str]:
        """Worker -> state ("starting", "warm", "hot") of the workers without a rank."""
        rows = self.status().get("workers", [])
        return {int(row["worker"]): str(row["state"]) for row in rows if row["rank"] is None}

    def incidents(self) -> list[dict[str, Any]]:
        """The incidents in the ledger, oldest first."""
        return incidents_of(self.run_dir)

    def _ask(self, path: str) -> dict[str, Any] | None:
        address = RunDirectory(self.run_dir).address()
        if address is None:
            return None
        request = urllib.request.Request(
            address.url + path, headers={"Authorization": f"Bearer {address.token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S) as answer:
                value: dict[str, Any] = json.load(answer)
                return value
        except (OSError, ValueError):  # not up yet, or ending
            return None

    def wait_until(
        self,
        condition: Callable[[], bool],
        *,
        timeout_s: float,
        what: str,
        poll_s: float = POLL_S,
        ended_is_failure: bool = True,
    ) -> None:
        """Poll until `condition`. Raises JobFailed at the deadline, or when the job ends before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if ended_is_failure and self.exit_code is not None:
                raise JobFailed(f"the job ended ({self.exit_code}) before {what}:\n{self.last_output()}")
            if time.monotonic() > deadline:
                raise JobFailed(f"waited {timeout_s:.0f} s for {what}:\n{self.last_output()}")
            time.sleep(poll_s)

    def wait_for_exit(self, *, timeout_s: float, each_poll: Callable[[], object] = lambda: None) -> int:
        """The exit code. Raises JobFailed at the deadline."""

        def ended() -> bool:
            each_poll()
            return self.exit_code is not None

        self.wait_until(ended, timeout_s=timeout_s, what="the job to end", ended_is_failure=False)
        each_poll()
        assert self.exit_code is not None
        return self.exit_code

    def newest(self, rank: int) -> Line | None:
        """The newest report of a rank (call `reader.poll()` before)."""
        lines = self.reader.reports.lines.get(rank)
        return lines[-1] if lines else None

    # ---- harm -----------------------------------------------------------------------------------

    def strike(
        self, rank: int, number: signal.Signals = signal.SIGKILL, pids: Mapping[int, int] | None = None
    ) -> Harm:
        """Send a signal, from outside, to the worker that last reported for `rank`.

        `pids`: what `workers` said just before, for whoever has no time to look again.
        """
        pids = self.workers() if pids is None else pids
        self.reader.poll()
        newest = self.newest(rank)
        pid = pids.get(newest.worker) if newest else None
        if newest is None or pid is None:
            raise JobFailed(f"no living worker plays rank {rank}:\n{self.last_output()}")
        at_s = time.time()
        os.kill(pid, number)
        return Harm(rank=rank, worker=newest.worker, pid=pid, signal=number, at_s=at_s)

    def end(self) -> None:
        """Stop what still runs: as Ctrl-C does, then, after END_GRACE_S, every process by force."""
        if self._process.poll() is not None:
            return
        family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.terminate()
        try:
            self._process.wait(END_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.wait(END_GRACE_S)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP leave every `with` block, as Ctrl-C does, so that no job outlives its watcher.

    The first one counts: those that follow find everything being ended already.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _worker_of(process: psutil.Process) -> int | None:
    """The worker's number when this process leads a worker's session, else None."""
    try:
        number = process.environ().get("KEEPSTEP_WORKER")
        if number is None or os.getsid(process.pid) != process.pid:
            return None
        return int(number)
    except (psutil.Error, OSError, ValueError):  # gone meanwhile
        return None

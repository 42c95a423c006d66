"""What is known about a worker that will be killed or has died: into one folder, within a deadline.

Everything here may fail by itself (a process vanishes, a tool is missing): what could be had is kept,
what could not is named. It kills nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from keepstep.agent import procfs
from keepstep.agent.logs import STREAMS, log_path, tail
from keepstep.agent.workers import Worker
from keepstep.core.events import WorkerExited
from keepstep.wire.page import Page

DEADLINE_S = 2.0
# The worker's library registers faulthandler for it, with the file named by KEEPSTEP_STACKS.
STACKS_SIGNAL = signal.SIGUSR2
STACKS_WAIT_S = 0.5
LOG_TAIL_BYTES = 64 << 10
SUMMARY_LINES = 30
_PROC_FILES = ("status", "wchan", "stack", "syscall", "cmdline", "limits")


class Evidence:
    """Writes `run_dir/evidence/worker-<w>-<n>/`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def at_once(self, worker: Worker, reason: str) -> dict[str, Any]:
        """What can be read without waiting: state, counters, memory."""
        pid = worker.python_pid or worker.process.pid
        found = procfs.stat(pid)
        status = dict(_status_lines(pid))
        return {
            "reason": reason,
            "pid": pid,
            "state": found.state if found else "gone",
            "memory": status.get("VmRSS", "unknown"),
            "threads": status.get("Threads", "unknown"),
            "waits_in_kernel": _text(procfs.read(pid, "wchan")),
            "open_files": _count_files(pid),
            **_page_facts(worker.page),
        }

    async def of_suspect(self, worker: Worker, facts: dict[str, Any], deadline_s: float = DEADLINE_S) -> None:
        """Everything about a living worker, its Python stacks included; adds to `facts` what it finds."""
        deadline = time.monotonic() + deadline_s
        pid = worker.python_pid or worker.process.pid
        folder = self._folder(worker.number)
        facts["folder"] = str(folder.relative_to(self._run_dir))
        for name in _PROC_FILES:
            _write(folder / f"proc-{name}", procfs.read(pid, name))
        self._keep_logs(worker.number, folder)
        stacks, source = await _stacks(pid, worker.stacks, deadline)
        _write(folder / "stacks.txt", stacks)
        facts["stacks_from"] = source
        facts["stacks"] = _text(stacks).splitlines()[:SUMMARY_LINES]
        _write_summary(folder, facts)

    def of_dead(self, worker: Worker, event: WorkerExited) -> None:
        """What a dead worker left: how it ended, its counters, its last lines."""
        folder = self._folder(worker.number)
        summary = {
            "folder": str(folder.relative_to(self._run_dir)),
            "ended": describe_status(event.status),
            "oom_killed": event.oom_killed,
            **_page_facts(worker.page),
        }
        self._keep_logs(worker.number, folder)
        _write_summary(folder, summary)

    def _folder(self, worker: int) -> Path:
        root = self._run_dir / "evidence"
        number = 1
        while True:
            folder = root / f"worker-{worker}-{number}"
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                number += 1

    def _keep_logs(self, worker: int, folder: Path) -> None:
        for stream in STREAMS:
            _write(folder / f"{stream}.tail", tail(log_path(self._run_dir, worker, stream), LOG_TAIL_BYTES))


def describe_status(status: int) -> str:
    """An exit status in words: "exit code 1", "SIGKILL"."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


async def _stacks(pid: int, file: Path, deadline: float) -> tuple[bytes, str]:
    """Python stacks of all threads and where they come from: the process itself, or py-spy."""
    found = procfs.stat(pid)
    if found is None:
        return b"", "the process was gone"
    # Unasked, the signal would kill a process that has no handler for it; a stopped one cannot answer.
    if found.state not in "Tt" and file.exists() and procfs.catches(pid, STACKS_SIGNAL):
        dumped = await _dumped(pid, file, min(deadline, time.monotonic() + STACKS_WAIT_S))
        if dumped:
            return dumped, "faulthandler"
    return await _py_spy(pid, deadline)


async def _dumped(pid: int, file: Path, deadline: float) -> bytes:
    before = file.stat().st_size
    try:
        os.kill(pid, STACKS_SIGNAL)
    except ProcessLookupError:
        return b""
    size = before
    while time.monotonic() < deadline:
        await asyncio.sleep(0.02)
        grown = file.stat().st_size
        if grown > before and grown == size:  # it no longer grows: the dump is whole
            break
        size = grown
    return tail(file, size - before) if size > before else b""


async def _py_spy(pid: int, deadline: float) -> tuple[bytes, str]:
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is None:
        return b"", "nowhere: the process does not answer and py-spy is not installed"
    # --nonblocking: it must not stop (and then continue!) a process that was stopped on purpose.
    child = await asyncio.create_subprocess_exec(
        tool,
        "dump",
        "--nonblocking",
        "--pid",
        str(pid),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(child.communicate(), max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        return b"", "nowhere: py-spy took too long"
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    if child.returncode:
        return b"", f"nowhere: py-spy says {_text(errors).strip()[-200:]}"
    return output, "py-spy"


def _page_facts(page: Page) -> dict[str, Any]:
    records = page.records()
    facts: dict[str, Any] = {
        "step": page.step,
        "published": page.published,
        "generation": page.generation,
        "collectives": page.collectives,
        "phase": phase_name(page),
        "in_phase_s": round((time.monotonic_ns() - page.phase_since_ns) / 1e9, 3),
    }
    if records:
        newest = records[0]
        facts["last_record"] = {
            "kind": newest.kind,
            "step": newest.step,
            "lineage": newest.lineage,
            "bytes": len(newest.payload),
        }
    return facts


def phase_name(page: Page) -> str:
    """The page's phase by name; a number that this version does not know is "unknown"."""
    try:
        return page.phase.name
    except ValueError:
        return "unknown"


def _status_lines(pid: int) -> list[tuple[str, str]]:
    lines = _text(procfs.read(pid, "status")).splitlines()
    return [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]


def _count_files(pid: int) -> int | None:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "backslashreplace")


def _write(path: Path, data: bytes | None) -> None:
    if data:
        path.write_bytes(data)


def _write_summary(folder: Path, summary: dict[str, Any]) -> None:
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")

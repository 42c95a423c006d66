"""What is known about a worker that will be killed or has died: into one folder, within a deadline.

Everything here may fail by itself (a process vanishes, a tool is missing): what could be had is kept,
what could not is named. It kills nobody.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from keepstep.agent import procfs, stacks
from keepstep.agent.logs import STREAMS, log_path, tail
from keepstep.agent.redact import Redactor
from keepstep.agent.rings import Rings, in_full, monotonic_offset_s
from keepstep.agent.workers import Worker
from keepstep.core.events import WorkerExited
from keepstep.wire.page import Page

DEADLINE_S = 2.0
LOG_TAIL_BYTES = 64 << 10
SUMMARY_LINES = 30
_PROC_FILES = ("status", "wchan", "stack", "syscall", "cmdline", "limits")


class Evidence:
    """Writes `run_dir/evidence/worker-<w>-<n>/`. `known`: the newest summary of each worker."""

    def __init__(self, run_dir: Path, redactor: Redactor | None = None, rings: Rings | None = None) -> None:
        self._run_dir = run_dir
        self._redactor = redactor or Redactor()
        self._rings = rings
        self.known: dict[int, dict[str, Any]] = {}
        self._folders: dict[int, list[str]] = {}

    def folders(self, worker: int) -> list[str]:
        """What was written about a worker so far, relative to the run directory."""
        return list(self._folders.get(worker, ()))

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
        self.known[worker.number] = facts
        folder = self._folder(worker.number)
        facts["folder"] = str(folder.relative_to(self._run_dir))
        for name in _PROC_FILES:
            self._write(folder / f"proc-{name}", procfs.read(pid, name))
        self._keep_collectives(worker.number, folder)
        self._keep_logs(worker.number, folder)
        taken, source = await stacks.take(pid, worker.stacks, deadline)
        self._write(folder / "stacks.txt", taken)
        facts["stacks_from"] = source
        facts["stacks"] = _text(taken).splitlines()[:SUMMARY_LINES]
        facts["main_thread"] = stacks.main_thread(_text(taken))
        self._write_summary(folder, facts)

    def of_dead(self, worker: Worker, event: WorkerExited) -> None:
        """What a dead worker left: how it ended, its counters, its last lines."""
        folder = self._folder(worker.number)
        summary = {
            "folder": str(folder.relative_to(self._run_dir)),
            "ended": describe_status(event.status),
            "oom_killed": event.oom_killed,
            **_page_facts(worker.page),
        }
        # A suspect that was killed has told more than its end does.
        self.known[worker.number] = {**self.known.get(worker.number, {}), **summary}
        self._keep_collectives(worker.number, folder)
        self._keep_logs(worker.number, folder)
        self._write_summary(folder, summary)

    def _folder(self, worker: int) -> Path:
        root = self._run_dir / "evidence"
        number = 1
        while True:
            folder = root / f"worker-{worker}-{number}"
            try:
                folder.mkdir(parents=True)
                self._folders.setdefault(worker, []).append(str(folder.relative_to(self._run_dir)))
                return folder
            except FileExistsError:
                number += 1

    def _keep_logs(self, worker: int, folder: Path) -> None:
        for stream in STREAMS:
            path = log_path(self._run_dir, worker, stream)
            self._write(folder / f"{stream}.tail", tail_of_lines(path, LOG_TAIL_BYTES))

    def _keep_collectives(self, worker: int, folder: Path) -> None:
        groups = in_full(self._rings.copy(worker), monotonic_offset_s()) if self._rings else []
        if groups:
            (folder / "collectives.json").write_text(json.dumps(groups, indent=1) + "\n")

    def _write(self, path: Path, data: bytes | None) -> None:
        if data:
            path.write_bytes(self._redactor.clean(data))

    def _write_summary(self, folder: Path, summary: dict[str, Any]) -> None:
        text = json.dumps(summary, indent=1) + "\n"
        (folder / "summary.json").write_text(self._redactor.clean_text(text))


def tail_of_lines(path: Path, limit: int) -> bytes:
    """The last whole lines of a file: a cut one may begin in the middle of a secret."""
    data = tail(path, limit)
    return data.partition(b"\n")[2] if len(data) == limit else data


def describe_status(status: int | None) -> str:
    """An exit status in words: "exit code 1", "SIGKILL"."""
    if status is None:
        return "unknown (its agent was away)"
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


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

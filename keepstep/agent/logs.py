"""Where workers' output goes: files that the kernel writes, so that no worker waits for the agent."""

from __future__ import annotations

import os
from pathlib import Path

STREAMS = ("stdout", "stderr")


def log_path(run_dir: Path, worker: int, stream: str) -> Path:
    """The file that holds all that a worker ever wrote to `stream`."""
    return run_dir / "logs" / f"worker-{worker}.{stream}"


def open_logs(run_dir: Path, worker: int) -> tuple[int, int]:
    """Descriptors for stdout and stderr, appending, so that several writers cannot overwrite each other."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    stdout = os.open(log_path(run_dir, worker, "stdout"), flags, 0o600)
    try:
        return stdout, os.open(log_path(run_dir, worker, "stderr"), flags, 0o600)
    except OSError:
        os.close(stdout)
        raise


def tail(path: Path, limit: int) -> bytes:
    """The last `limit` bytes of a file; empty when there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            return file.read(limit)
    except OSError:
        return b""

"""What the script reports of each step (its loss), one JSON line per step and rank.

A line is written before the rank contributes to the gate, so every committed step has one. A step
that is served again has two: the last one counts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


class Reports:
    """Appends to `reports/rank-<r>.jsonl` of the run directory."""

    def __init__(self, run_dir: str, worker: int) -> None:
        self._directory = Path(run_dir) / "reports"
        self._worker = worker
        self._waiting: dict[str, Any] = {}
        self._descriptor = -1
        self._rank = -1
        self._said_lost = False

    def add(self, values: dict[str, Any]) -> None:
        """Remember values for the current step's line."""
        self._waiting.update(values)

    def flush(self, rank: int, step: int, generation: int) -> None:
        """Write the current step's line, if anything was reported."""
        if not self._waiting:
            return
        numbers = {name: float(value) for name, value in self._waiting.items()}
        self._waiting = {}
        self.write(rank, {"step": step, "generation": generation, **numbers})

    def drop(self) -> None:
        """Forget what a poisoned step reported."""
        self._waiting = {}

    def write(self, rank: int, line: dict[str, Any]) -> None:
        """Append one line for `rank`. A full disk costs the report, not the training: said once."""
        try:
            self._append(rank, line)
        except OSError as error:
            if not self._said_lost:
                self._said_lost = True
                sys.stderr.write(f"keepstep: reports of rank {rank} are lost: {error}\n")

    def _append(self, rank: int, line: dict[str, Any]) -> None:
        if rank != self._rank:
            if self._descriptor >= 0:
                os.close(self._descriptor)
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"rank-{rank}.jsonl"
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._rank = rank
            if not _ends_a_line(path):
                os.write(self._descriptor, b"\n")  # the last player of this rank died in mid-line
        stamped = {**line, "worker": self._worker, "time_s": time.time()}
        os.write(self._descriptor, (json.dumps(stamped) + "\n").encode())


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"

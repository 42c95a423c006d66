"""When each piece of a worker's log was written, and which rank it played then: small files beside the log.

The log itself stays as the worker wrote it. `worker-7.stdout.times` holds triples (from, up to, Unix time in
ns): these bytes were first seen then, at most a poll later than they were written. `worker-7.roles` holds
one line of JSON whenever the worker starts, is given a rank, loses it, or ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepstep.agent.logs import STREAMS, log_path
from keepstep.core.types import Generation

POLL_INTERVAL_S = 0.1
TIMES_ENTRY = struct.Struct("<QQQ")

log = logging.getLogger(__name__)


def times_path(run_dir: Path, worker: int, stream: str) -> Path:
    return log_path(run_dir, worker, stream).with_suffix(f".{stream}.times")


def roles_path(run_dir: Path, worker: int) -> Path:
    return run_dir / "logs" / f"worker-{worker}.roles"


@dataclass(slots=True)
class _Followed:
    worker: int
    paths: dict[str, str]  # of its logs
    seen: dict[str, int] = field(default_factory=dict)
    rank: int | None = None
    generation: int | None = None


class LogTimes:
    """Follows the logs of this node's living workers. `living`: their numbers and slots."""

    def __init__(self, node: str, run_dir: Path, living: Callable[[], Iterable[tuple[int, int]]]) -> None:
        self._node = node
        self._run_dir = run_dir
        self._living = living
        self._followed: dict[int, _Followed] = {}
        self._complained = False

    async def run(self) -> None:
        """Look at every log, until cancelled."""
        while True:
            self.turn()
            await asyncio.sleep(POLL_INTERVAL_S)

    def turn(self) -> None:
        """Note what is new now."""
        for worker, slot in self._living():
            if worker not in self._followed:
                self._follow(worker, slot)
        for followed in self._followed.values():
            self._note_growth(followed)

    def announced(self, generation: Generation) -> None:
        """Before workers hear of a generation: what they wrote so far belongs to the one before."""
        self.turn()
        for followed in self._followed.values():
            rank = generation.rank_of(followed.worker)
            if rank is None and followed.rank is None:
                continue
            if (rank, generation.number) != (followed.rank, followed.generation):
                followed.rank, followed.generation = rank, generation.number
                role = {"event": "plays", "rank": rank, "generation": generation.number}
                self._note_role(followed, {**role, "fresh": generation.fresh})

    def ended(self, worker: int, how: str) -> None:
        """Its process is gone: nothing more will come."""
        followed = self._followed.pop(worker, None)
        if followed is not None:
            self._note_growth(followed)
            self._note_role(followed, {"event": "ended", "how": how})

    def _follow(self, worker: int, slot: int) -> None:
        followed = self._followed[worker] = _Followed(
            worker, {stream: str(log_path(self._run_dir, worker, stream)) for stream in STREAMS}
        )
        for stream in STREAMS:
            # After an agent's restart: what was noted before stays, the rest counts from here.
            known = _size(str(times_path(self._run_dir, worker, stream))) > 0
            followed.seen[stream] = _size(followed.paths[stream]) if known else 0
        if not roles_path(self._run_dir, worker).exists():
            self._note_role(followed, {"event": "starts", "node": self._node, "slot": slot})

    def _note_growth(self, followed: _Followed) -> None:
        for stream, path in followed.paths.items():
            size, seen = _size(path), followed.seen[stream]
            if size != seen:
                followed.seen[stream] = size
                entry = TIMES_ENTRY.pack(min(seen, size), size, time.time_ns())
                self._append(times_path(self._run_dir, followed.worker, stream), entry)

    def _note_role(self, followed: _Followed, role: dict[str, Any]) -> None:
        role = {"time_ns": time.time_ns(), **role, **followed.seen}
        self._append(roles_path(self._run_dir, followed.worker), json.dumps(role).encode() + b"\n")

    def _append(self, path: Path, data: bytes) -> None:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(descriptor, data)
            finally:
                os.close(descriptor)
        except OSError as error:  # a full disk: lines go without their time
            if not self._complained:
                self._complained = True
                log.warning("times of log lines cannot be written: %s", error)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # many times a second: no Path
    except OSError:
        return 0

"""What a stand-alone agent leaves written down, so that its successor can take over its workers.

One small file in the folder of the pages, replaced by a rename each time; and a lock on that folder, held
for as long as an agent lives, so that no two ever look after the same workers. It decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import glob
import hashlib
import hmac
import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.agent import cleanup
from keepstep.agent.announcements import Announcements
from keepstep.errors import UsageError, WireError
from keepstep.wire.codec import as_json, from_json
from keepstep.wire.messages import JobSpec

FORMAT_VERSION = 1
STATE_FILE = "state.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedWorker:
    """One worker as the state file has it. `alive`: as far as the agent knew."""

    number: int
    slot: int
    pid: int
    started: int
    alive: bool
    status: int | None = None
    python_pid: int | None = None
    died_in: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """What an earlier agent of this node knew. `lock`: the folder's, ours now."""

    page_dir: Path
    socket: Path
    lock: int
    spec: JobSpec
    workers: tuple[RememberedWorker, ...]
    announcements: dict[str, Any]
    peer: str


class Memory:
    """Keeps the state file up to date. `describe()`: workers, announcements, and the peers' address."""

    def __init__(
        self,
        page_dir: Path,
        *,
        node: str,
        run_dir: Path,
        token: str,
        spec: JobSpec,
        socket: Path,
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        self._file = page_dir / STATE_FILE
        self._fixed = {
            "format": FORMAT_VERSION,
            **_identity(node, run_dir, token),
            "spec": as_json(spec),
            "socket": str(socket),
        }
        self._describe = describe
        self._due = False
        self._failing = False

    def soon(self) -> None:
        """Write it when the loop has done what it is at: first the news, then the bookkeeping."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self.now)

    def now(self) -> None:
        """Write it. A full shared memory costs the adoption, not the training: said once."""
        self._due = False
        draft = self._file.with_suffix(".new")
        text = json.dumps({**self._fixed, **self._describe()})
        try:
            with open(draft, "w", opener=_private) as file:
                file.write(text)
            draft.rename(self._file)
        except OSError as error:
            if not self._failing:
                log.error("should this agent die, its successor will not know its workers: %s", error)
            self._failing = True
        else:
            self._failing = False


def lock(page_dir: Path) -> int | None:
    """Take the folder's lock until this process ends; None while another agent holds it. Raises OSError."""
    descriptor = os.open(page_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def recall(node: str, run_dir: Path, token: str) -> Remembered | None:
    """What the dead agent of this node and run has left, if any. Raises UsageError when it still lives."""
    wanted = _identity(node, run_dir, token)
    for file in cleanup.SHARED_MEMORY.glob(f"{cleanup.PREFIX}*/{glob.escape(node)}/{STATE_FILE}"):
        raw = _read(file)
        if raw is None or any(raw.get(key) != wanted[key] for key in ("node", "run_dir")):
            continue
        if not hmac.compare_digest(str(raw.get("token")), wanted["token"]):
            continue
        try:
            descriptor = lock(file.parent)
        except OSError:
            continue  # removed this very moment
        if descriptor is None:
            owner = (file.parent / cleanup.OWNER).read_text().split()[0]
            raise UsageError(f"the agent of {node} for this run is running already (process {owner})")
        try:
            found = _remembered(file, descriptor)
        except (ValueError, KeyError, TypeError, AttributeError, WireError) as error:
            log.error("%s cannot be read, the workers of this node are not adopted: %s", file, error)
            os.close(descriptor)
            continue
        if found is not None:
            return found
        os.close(descriptor)
    return None


def _identity(node: str, run_dir: Path, token: str) -> dict[str, str]:
    # Only a digest: the token itself lies in one file only.
    return {"node": node, "run_dir": str(run_dir), "token": hashlib.sha256(token.encode()).hexdigest()}


def _read(file: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        if cleanup.is_mine(file.parent):
            raw = json.loads(file.read_text())
            if isinstance(raw, dict) and raw.get("format") == FORMAT_VERSION:
                return raw
    return None


def _remembered(file: Path, descriptor: int) -> Remembered | None:
    """Read again with the lock in hand: the dead agent may have written until a moment ago."""
    raw = _read(file)
    if raw is None:
        return None
    spec = from_json(raw["spec"])
    if not isinstance(spec, JobSpec):
        raise ValueError("no job is described")
    Announcements().load(raw["announcements"])  # raises for what cannot be read
    return Remembered(
        page_dir=file.parent,
        socket=Path(raw["socket"]),
        lock=descriptor,
        spec=spec,
        workers=tuple(RememberedWorker(**worker) for worker in raw["workers"]),
        announcements=dict(raw["announcements"]),
        peer=str(raw["peer"]),
    )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)

"""Nothing is left behind: folders with a recorded owner, processes found by their environment.

Every folder of an agent (pages in shared memory, the socket's) holds a file that names its owner, so
that a later agent can tell leftovers of a dead one from a job that runs. It knows no messages.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from keepstep.agent import procfs

SHARED_MEMORY = Path("/dev/shm")
# Short and fixed: a Unix socket's path may have 107 bytes, and TMPDIR may be long.
SOCKETS = Path("/tmp")
PREFIX = "keepstep-"
SWEEP_DEADLINE_S = 3.0

log = logging.getLogger(__name__)

OWNER = "owner"
_PAGES = "pages"
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def make_page_dir(job: str, node: str) -> Path:
    """The folder of this node's pages, readable by its owner only.

    Raises ValueError (a name that is no file name, a job that runs here already), OSError.
    """
    if not _JOB.fullmatch(job):
        raise ValueError(f"job name {job!r} must be 1 to 64 letters, digits, dots, dashes")
    folder = SHARED_MEMORY / f"{PREFIX}{job}" / node
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise ValueError(f"job {job} has an agent for {node} on this machine already ({folder})") from None
    own(folder)
    return folder


def make_socket_dir() -> Path:
    """A fresh folder for the socket, 0700, with a short path."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=SOCKETS))
    own(folder)
    return folder


def remake_socket_dir(folder: Path) -> None:
    """The same folder again: the workers of a dead agent know no other path. Raises OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_mine(folder):
        raise PermissionError(f"{folder} belongs to somebody else")
    own(folder)


def belongs_to(socket_dir: Path, page_dir: Path) -> None:
    """Note for whose workers a socket is: while they live it is kept for the agent that comes next."""
    (socket_dir / _PAGES).write_text(str(page_dir))


def remove(folder: Path) -> None:
    """Remove an agent's folder, and the job's folder above it once it is empty."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.parent.name.startswith(PREFIX):
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


def users_of(page_dir: Path) -> list[int]:
    """Processes that were started with a page in this folder: workers and all that they started."""
    within = f"{page_dir}/"
    return [
        pid for pid in procfs.pids() if procfs.environment(pid).get("KEEPSTEP_PAGE", "").startswith(within)
    ]


def end_users_of(page_dir: Path) -> bool:
    """SIGKILL to all of them, until none is left. Blocks, at most SWEEP_DEADLINE_S; False when some stay."""
    deadline = time.monotonic() + SWEEP_DEADLINE_S
    while found := users_of(page_dir):
        if time.monotonic() > deadline:
            log.error("processes could not be ended, they hang in the kernel: %s", found)
            return False
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # the kernel needs a moment to take them down; the deadline stands above
    return True


def end_strangers(page_dir: Path, living: Collection[int]) -> int:
    """SIGKILL to all that belong to no living worker of this folder. Returns how many there were."""
    found = [
        pid
        for pid in users_of(page_dir)
        if procfs.environment(pid).get("KEEPSTEP_WORKER", "") not in map(str, living)
    ]
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(found)


def remove_stale() -> list[Path]:
    """Remove what agents left behind that died without a chance to tidy up. Returns what was removed.

    Folders whose workers still live stay, the socket's too: a restarted agent adopts those workers, and when
    none comes they end themselves.
    """
    removed = []
    candidates = [*SHARED_MEMORY.glob(f"{PREFIX}*/*/{OWNER}"), *SOCKETS.glob(f"{PREFIX}*/{OWNER}")]
    for owner in candidates:
        folder = owner.parent
        if is_mine(folder) and not _owner_lives(owner) and not users_of(_pages_of(folder)):
            remove(folder)
            removed.append(folder)
    return removed


def own(folder: Path) -> None:
    """Write down that this process answers for the folder."""
    found = procfs.stat(os.getpid())
    started = 0 if found is None else found.started
    (folder / OWNER).write_text(f"{os.getpid()} {started} {_pid_namespace()}\n")


def _pages_of(folder: Path) -> Path:
    """The folder of pages that another one goes with: its own, or what the socket's folder says."""
    try:
        return Path((folder / _PAGES).read_text())
    except OSError:
        return folder


def _pid_namespace() -> str:
    """Numbers of processes mean something only within one (containers may share memory, not numbers)."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"


def is_mine(folder: Path) -> bool:
    """Whether a folder belongs to this user and is no link to somewhere else."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not folder.is_symlink()


def _owner_lives(owner: Path) -> bool:
    try:
        pid_text, started_text, namespace = owner.read_text().split()
        pid, started = int(pid_text), int(started_text)
    except (OSError, ValueError):
        return True  # being written, or not ours to judge
    if namespace != _pid_namespace():
        return True
    found = procfs.stat(pid)
    return found is not None and found.state not in "ZX" and found.started == started

"""Python stacks of a process's threads: by a signal that it handles itself, else by py-spy.

Nothing here waits longer than its deadline, and a process that has no handler is never signalled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

from keepstep.agent import procfs
from keepstep.agent.logs import tail

# The worker's library registers faulthandler for it, with the file named by KEEPSTEP_STACKS.
STACKS_SIGNAL = signal.SIGUSR2
ANSWER_WAIT_S = 0.5
MAX_DUMP_BYTES = 1 << 20

_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_FOREIGN = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen")
_DUMPED_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')
_SPIED_FRAME = re.compile(r"^\s+(?P<name>\S+) \((?P<file>[^()]+):(?P<line>\d+)\)$")


def size(file: Path) -> int:
    """How much was dumped so far: what comes after that is new."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def ask(pid: int, file: Path) -> bool:
    """Signal a process to dump its stacks, without waiting. False when it is not prepared, or cannot answer."""
    found = procfs.stat(pid)
    # Unasked, the signal would kill a process that has no handler for it; a stopped one cannot answer.
    if found is None or found.state in "TtZX" or not file.exists() or not procfs.catches(pid, STACKS_SIGNAL):
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, STACKS_SIGNAL)
        return True
    return False


def dumped_since(file: Path, before: int) -> bytes:
    """What a process has dumped beyond the first `before` bytes, bounded."""
    return tail(file, min(size(file) - before, MAX_DUMP_BYTES)) if size(file) > before else b""


async def take(pid: int, file: Path, deadline: float) -> tuple[bytes, str]:
    """Stacks of all threads, and where they come from: the process itself, or py-spy."""
    if procfs.stat(pid) is None:
        return b"", "the process was gone"
    before = size(file)
    if ask(pid, file):
        dumped = await _settled(file, before, min(deadline, time.monotonic() + ANSWER_WAIT_S))
        if dumped:
            return dumped, "faulthandler"
    return await _py_spy(pid, deadline)


def main_thread(stacks: str) -> str:
    """Where the script's main thread was, as "data.py:41 in load"; empty when the text does not tell."""
    frames = _main_frames(stacks.splitlines())
    own = [frame for frame in frames if _is_scripts(frame[0])]
    for file, line, name in (own or frames)[:1]:
        return f"{os.path.basename(file)}:{line} in {name}"
    return ""


def _main_frames(lines: list[str]) -> list[tuple[str, int, str]]:
    """The frames of the main thread, newest first: py-spy names it, faulthandler writes it last."""
    threads: list[tuple[str, list[tuple[str, int, str]]]] = []
    for line in lines:
        if line.startswith(("Thread ", "Current thread ")):
            threads.append((line, []))
        elif threads and (frame := _DUMPED_FRAME.match(line) or _SPIED_FRAME.match(line)):
            threads[-1][1].append((frame["file"], int(frame["line"]), frame["name"]))
    named = [frames for head, frames in threads if '"MainThread"' in head]
    return named[0] if named else threads[-1][1] if threads else []


def _is_scripts(file: str) -> bool:
    return not file.startswith(_PACKAGE) and not any(part in file for part in _FOREIGN)


async def _settled(file: Path, before: int, deadline: float) -> bytes:
    seen = before
    while time.monotonic() < deadline:
        await asyncio.sleep(0.02)
        grown = size(file)
        if grown > before and grown == seen:  # it no longer grows: the dump is whole
            break
        seen = grown
    return dumped_since(file, before)


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
        said = errors.decode("utf-8", "backslashreplace").strip()[-200:]
        return b"", f"nowhere: py-spy says {said}"
    return output, "py-spy"

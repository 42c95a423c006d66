"""Reads /proc: whatever has gone away in the meantime is None, never an exception."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stat:
    """The parts of /proc/PID/stat that matter here. `started` (ticks since boot) tells a reused pid."""

    state: str
    group: int
    session: int
    cpu_ticks: int
    started: int


def read(pid: int, name: str, limit: int = 64 << 10) -> bytes | None:
    """At most `limit` bytes of /proc/PID/name."""
    try:
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, limit)
    except OSError:  # the process ended between opening and reading, or it is not ours to read
        return None
    finally:
        os.close(descriptor)


def stat(pid: int) -> Stat | None:
    """State and times of a process; a zombie still has them."""
    line = read(pid, "stat", 4096)
    if not line:
        return None
    # The name (in brackets) may hold anything, brackets and spaces too: the last one ends it.
    fields = line[line.rindex(b")") + 2 :].split()
    return Stat(
        state=fields[0].decode(),
        group=int(fields[2]),
        session=int(fields[3]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        started=int(fields[19]),
    )


def io_bytes(pid: int) -> int | None:
    """Bytes read and written through system calls since the start; None when it may not be read."""
    text = read(pid, "io", 4096)
    if not text:
        return None
    counters = dict(line.split(b": ") for line in text.splitlines())
    return int(counters.get(b"rchar", 0)) + int(counters.get(b"wchar", 0))


def environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with, as far as it may be read."""
    block = read(pid, "environ", 1 << 20) or b""
    pairs = (item.partition(b"=") for item in block.split(b"\0") if b"=" in item)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def pids() -> list[int]:
    """Every process that is there now."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def catches(pid: int, signal_number: int) -> bool:
    """Whether a process has a handler for a signal: to an unprepared one it would be deadly."""
    for line in (read(pid, "status") or b"").splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal_number - 1) & 1)
    return False

"""What the machine says of itself at a failure: devices, memory, load, heat, and the kernel's last lines.

Whatever cannot be read (no GPU, no permission) is left out by name; nothing here waits beyond its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import time
from collections import deque
from pathlib import Path
from typing import Any

KERNEL_LINES = 400
RECENT_S = 3600.0
_TIME = "%Y-%m-%d %H:%M:%S"
MAX_KERNEL_RECORDS = 100_000
MAX_DEVICE_BYTES = 512 << 10
NOTABLE = re.compile(
    r"Xid|NVRM|Out of memory|oom-kill|Hardware Error|\bMCE\b|machine check|I/O error|link (is )?down|"
    r"segfault|hung task|blocked for more than|soft lockup|throttl|critical temperature|mlx\d|EXT4-fs error|XFS.*corrupt",
    re.I,
)
_MEMORY = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree", "Shmem", "Dirty")


async def devices(deadline_s: float) -> tuple[str, str]:
    """What nvidia-smi tells of every GPU, and a line that says where it comes from."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "", "no nvidia-smi: no device readings"
    child = await asyncio.create_subprocess_exec(
        tool,
        "-q",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(child.communicate(), deadline_s)
    except TimeoutError:
        return "", f"nvidia-smi did not answer within {deadline_s:g} s"
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    text = output[:MAX_DEVICE_BYTES].decode("utf-8", "replace")
    return text, "nvidia-smi -q" if child.returncode == 0 else f"nvidia-smi failed ({child.returncode})"


def host(*folders: Path) -> dict[str, Any]:
    """Memory, load, pressure, heat, and the room in `folders`."""
    found: dict[str, Any] = {"load": list(os.getloadavg()), "cores": os.cpu_count()}
    memory = dict(line.partition(":")[::2] for line in _lines("/proc/meminfo"))
    found["memory"] = {name: memory[name].strip() for name in _MEMORY if name in memory}
    for kind in ("cpu", "memory", "io"):
        if pressure := _lines(f"/proc/pressure/{kind}"):
            found[f"{kind}_pressure"] = pressure
    heat = {}
    for zone in sorted(Path("/sys/class/thermal").glob("thermal_zone*"))[:64]:
        with contextlib.suppress(OSError, ValueError):
            name = (zone / "type").read_text().strip()
            heat[f"{zone.name} {name}"] = int((zone / "temp").read_text()) / 1000
    if heat:
        found["heat_celsius"] = heat
    for folder in folders:
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(folder)
            found.setdefault("room", {})[str(folder)] = {"free_bytes": usage.free, "bytes": usage.total}
    return found


def kernel_lines() -> tuple[list[str], str]:
    """The kernel's last lines with their time, and why there are none."""
    try:
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return [], f"the kernel's lines may not be read: {error.strerror}"
    booted_s = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    lines: deque[str] = deque(maxlen=KERNEL_LINES)
    try:
        for _ in range(MAX_KERNEL_RECORDS):
            try:
                record = os.read(descriptor, 8192)
            except BlockingIOError:
                break  # that was the newest
            except BrokenPipeError:
                continue  # overwritten while it was being read
            lines.append(_kernel_line(record, booted_s))
    except OSError as error:
        return list(lines), f"the kernel's lines end early: {error.strerror}"
    finally:
        os.close(descriptor)
    return list(lines), "" if lines else "the kernel says nothing here"


def notable(lines: list[str], since_s: float = 0.0, limit: int = 20) -> list[str]:
    """Those since `since_s` (Unix time) that tell of hardware, memory or devices; the newest ones."""
    since = time.strftime(_TIME, time.localtime(since_s))
    return [line for line in lines if line >= since and NOTABLE.search(line)][-limit:]


def _kernel_line(record: bytes, booted_s: float) -> str:
    head, _, text = record.decode("utf-8", "replace").partition(";")
    fields = head.split(",")
    message = text.splitlines()[0] if text else ""
    if len(fields) < 3 or not fields[2].isdecimal():
        return message
    when = time.strftime(_TIME, time.localtime(booted_s + int(fields[2]) / 1e6))
    return f"{when} {message}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []

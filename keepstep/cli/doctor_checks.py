"""What `keepstep doctor` looks at on this machine: each check is one function, one line, and a cure.

Nothing is changed: what is written (a few kilobytes in shared memory and under the run directory) is removed
at once. PyTorch is looked at by `doctor_torch`, other nodes by `doctor_join`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import resource
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from keepstep import __version__
from keepstep.core.replica_words import size

Outcome = Literal["ok", "warning", "failed"]

SHARED_MEMORY = Path("/dev/shm")
SOCKETS = Path("/tmp")
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
LEAST_KERNEL = (5, 4)  # waitid(P_PIDFD)
LEAST_PYTHON = (3, 11)
RECORD_SLOTS = 5  # of a worker's page
LEAST_PAGE_BYTES = 256 << 10
SLOW_FSYNC_S, BAD_FSYNC_S = 0.05, 1.0
LITTLE_DISK_BYTES, NO_DISK_BYTES = 2 << 30, 64 << 20
GROUPS_OF_A_RANK = 3
CAP_SYS_PTRACE = 19


@dataclass(frozen=True, slots=True)
class Check:
    """One line. `cure`: what to do, where it is not ok."""

    name: str
    outcome: Outcome
    found: str
    cure: str = ""


def versions() -> Iterator[Check]:
    """Python, Keepstep, kernel."""
    have = sys.version_info[:2]
    yield Check(
        "python",
        "ok" if have >= LEAST_PYTHON else "failed",
        f"Python {platform.python_version()}, Keepstep {__version__}",
        f"Keepstep needs Python {'.'.join(map(str, LEAST_PYTHON))} or newer",
    )
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdecimal())
    yield Check(
        "kernel",
        "ok" if platform.system() == "Linux" and numbers >= LEAST_KERNEL else "failed",
        f"{platform.system()} {release}",
        f"Keepstep needs Linux {'.'.join(map(str, LEAST_KERNEL))} or newer (pidfd)",
    )


def process_watching() -> Check:
    """A child's death must be seen by its pidfd, whatever sockets say."""
    cure = "a kernel or a sandbox (seccomp) without pidfd_open and waitid(P_PIDFD) cannot run workers"
    try:
        with subprocess.Popen([sys.executable, "-S", "-c", ""]) as child:
            descriptor = os.pidfd_open(child.pid)
            try:
                seen = bool(select.select([descriptor], [], [], 10.0)[0])
                signal.pidfd_send_signal(descriptor, 0)
            except ProcessLookupError:
                pass
            finally:
                os.close(descriptor)
    except (OSError, AttributeError) as error:
        return Check("pidfd", "failed", f"a process cannot be watched: {error}", cure)
    if not seen:
        return Check("pidfd", "failed", "the end of a process was not seen within 10 s", cure)
    return Check("pidfd", "ok", "the end of a process is seen at once")


def stacks() -> Check:
    """Evidence of a hung worker is best with py-spy, which must be allowed to look into it."""
    if not Path(sys.executable).with_name("py-spy").exists() and shutil.which("py-spy") is None:
        cure = "pip install py-spy: without it a stuck native call shows only its Python lines (faulthandler)"
        return Check("py-spy", "warning", "not installed", cure)
    try:
        scope = int(YAMA.read_text())
    except (OSError, ValueError):
        scope = 0
    if scope == 0 or (scope < 3 and _may_trace()):
        return Check("py-spy", "ok", f"installed, and may look into workers (ptrace_scope {scope})")
    cure = f"sysctl kernel.yama.ptrace_scope=0, or give the agent CAP_SYS_PTRACE (it is {scope} now)"
    return Check(
        "py-spy", "warning", f"installed, but kernel.yama.ptrace_scope {scope} forbids it to look", cure
    )


def _may_trace() -> bool:
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> CAP_SYS_PTRACE & 1)
    return False


def shared_memory(slots: int, record_bytes: int, folder: Path = SHARED_MEMORY) -> Check:
    """Records lie in shared memory: it must be there, writable, and large enough for all workers."""
    name = "shared memory"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.truncate(mmap.PAGESIZE)
            with mmap.mmap(file.fileno(), mmap.PAGESIZE) as page:
                page[:8] = b"keepstep"
        about = os.statvfs(folder)
    except OSError as error:
        cure = f"{folder} must be writable by this user: mount a tmpfs there"
        return Check(name, "failed", f"{folder} cannot be written: {error.strerror}", cure)
    free, whole = about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize
    most, least = slots * RECORD_SLOTS * record_bytes, slots * LEAST_PAGE_BYTES
    found = (
        f"{folder}: {size(free)} free of {size(whole)}, {slots} workers take {size(least)} to {size(most)}"
    )
    cure = (
        "docker run --shm-size=2g, in Kubernetes an emptyDir of medium Memory; loader workers need it as well"
    )
    if free < least:
        return Check(name, "failed", found, cure)
    return Check(name, "ok" if free >= most else "warning", found, cure)


def file_limit(ranks: int, slots: int) -> Check:
    """Every rank connects to every other one, in each of its groups."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = max(256 + GROUPS_OF_A_RANK * ranks, 128 + 16 * slots)
    found = f"{soft} open files allowed ({hard} at most), {ranks} ranks may need {need}"
    cure = f"ulimit -n {max(65_536, 2 * need)}, or LimitNOFILE= in the service's unit"
    unlimited = soft == resource.RLIM_INFINITY
    if unlimited or soft >= 2 * need:
        return Check("open files", "ok", found)
    return Check("open files", "failed" if soft < need else "warning", found, cure)


def ports(wanted: list[int], *, asked: bool) -> Iterator[Check]:
    """Ports that the controller (or a rendezvous) is to listen on, and any free one."""
    for port in wanted:
        for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                try:
                    sock.bind((host, port))
                except OSError as error:
                    if family == socket.AF_INET6 and port_is_strange(error):
                        continue  # no IPv6 here
                    outcome: Outcome = "failed" if asked else "warning"
                    cure = "choose another port (--rdzv-endpoint, --bind), or end what holds it: ss -ltnp"
                    yield Check(f"port {port}", outcome, f"cannot be had: {error.strerror}", cure)
                    break
        else:
            yield Check(f"port {port}", "ok", "free")
    yield _loopback()


def port_is_strange(error: OSError) -> bool:
    """Whether the address itself is unknown here."""
    return error.strerror is not None and "address" in error.strerror.lower() and "use" not in error.strerror


def _loopback() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5.0)
            with socket.create_connection(server.getsockname(), 5.0) as one, server.accept()[0] as other:
                one.sendall(b"k")
                other.settimeout(5.0)
                if other.recv(1) == b"k":
                    return Check("loopback", "ok", "a connection to 127.0.0.1 works")
    except OSError as error:
        return Check("loopback", "failed", f"127.0.0.1 cannot be reached: {error}", "bring lo up")
    return Check("loopback", "failed", "127.0.0.1 answers wrongly", "bring lo up")


def sockets(folder: Path = SOCKETS) -> Check:
    """Workers speak to their agent over a Unix socket there."""
    place = None
    try:
        place = Path(tempfile.mkdtemp(prefix="keepstep-doctor-", dir=folder))
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(place / "agent.sock"))
    except OSError as error:
        cure = f"{folder} must be writable by this user, on a file system that has sockets"
        return Check("unix socket", "failed", f"{folder}: {error.strerror or error}", cure)
    finally:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)
    return Check("unix socket", "ok", f"can be made under {folder}")


def run_directory(folder: Path) -> Iterator[Check]:
    """Room, permission, and how long a decision waits for the ledger to be on the disk."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.NamedTemporaryFile(prefix=".keepstep-doctor-", dir=existing) as file:
            took_s = [_fsync_s(file.fileno()) for _ in range(5)]
    except OSError as error:
        cure = "choose another --log-dir, or chown it to the user that runs the job"
        yield Check("run directory", "failed", f"{existing} cannot be written: {error.strerror}", cure)
        return
    about = os.statvfs(existing)
    free = about.f_bavail * about.f_frsize
    outcome: Outcome = "ok"
    if free < LITTLE_DISK_BYTES:
        outcome = "failed" if free < NO_DISK_BYTES else "warning"
    yield Check("disk", outcome, f"{existing}: {size(free)} free", "make room for logs, reports and evidence")
    middle_s = statistics.median(took_s)
    outcome = "ok"
    if middle_s > SLOW_FSYNC_S:
        outcome = "failed" if middle_s > BAD_FSYNC_S else "warning"
    cure = "each decision waits for the ledger's fsync: put --log-dir on a local disk"
    yield Check(
        "ledger's disk",
        outcome,
        f"fsync takes {1000 * middle_s:.1f} ms (slowest {1000 * max(took_s):.1f})",
        cure,
    )


def _fsync_s(descriptor: int) -> float:
    started_s = time.perf_counter()
    os.write(descriptor, bytes(4096))
    os.fsync(descriptor)
    return time.perf_counter() - started_s


def gpus(devices: Path = Path("/dev")) -> Iterator[Check]:
    """What NVML says, where there is a GPU. Needs nvidia-ml-py, which is optional."""
    names = [one for one in os.listdir(devices) if one.removeprefix("nvidia").isdecimal() and one != "nvidia"]
    if not names:
        yield Check("gpu", "ok", "no NVIDIA GPU here: gloo only")
        return
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        cure = "pip install nvidia-ml-py: without it the GPUs' health is not read"
        yield Check("gpu", "warning", f"{len(names)} GPUs, their state is unknown", cure)
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Check("gpu", "failed", f"{len(names)} GPUs, the driver does not answer: {error}", "nvidia-smi")
        return
    with contextlib.closing(_Nvml(pynvml)) as nvml:
        yield from nvml.checks()


class _Nvml:
    """One look at every device."""

    def __init__(self, pynvml: object) -> None:
        self._nvml: Any = pynvml

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def checks(self) -> Iterator[Check]:
        nvml = self._nvml
        yield Check("gpu driver", "ok", f"{nvml.nvmlSystemGetDriverVersion()}")
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                yield self._device(index)
            except nvml.NVMLError as error:
                yield Check(f"gpu {index}", "failed", f"cannot be read: {error}", "take it out, or reset it")

    def _device(self, index: int) -> Check:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        found = f"{nvml.nvmlDeviceGetName(handle)}, {size(memory.free)} of {size(memory.total)} free"
        name = f"gpu {index}"
        if self._row_remap(handle):
            return Check(
                name, "failed", f"{found}; a row remapping is pending or failed", "reset it before the job"
            )
        uncorrected = self._uncorrected(handle)
        if uncorrected:
            cure = "uncorrected memory errors since the driver was loaded: reset it, watch it"
            return Check(name, "warning", f"{found}; {uncorrected} uncorrected ECC errors", cure)
        if memory.used > memory.total // 10:
            return Check(name, "warning", f"{found}; something else uses it", "nvidia-smi shows what")
        return Check(name, "ok", found)

    def _row_remap(self, handle: object) -> bool:
        nvml = self._nvml
        try:
            _, _, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
        except nvml.NVMLError:
            return False  # an older device has none
        return bool(pending or failed)

    def _uncorrected(self, handle: object) -> int:
        nvml = self._nvml
        try:
            return int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            )
        except nvml.NVMLError:
            return 0  # no ECC, or switched off

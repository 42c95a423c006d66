"""How fast a replacement gets its state: Keepstep's transfer beside a bare TCP stream of the same bytes.

Two real processes on loopback, the same memory at both ends. The bare stream is a plain sender process and a
receiver that reads into place, without checksum, token or manifest. Repeats alternate, medians are compared.
Extra memory: growth of the process's peak resident size during a copy, over the state's size.
"""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from common import Options, start, table, write

from keepstep.transfer import Manifest, StateServer, TensorSpec, fetch_manifest, receive
from keepstep.transfer.buffers import view
from keepstep.transfer.checksum import checksum
from keepstep.transfer.link import CHUNK_BYTES

TOKEN = "benchmark"
KEY = "state"
LIMIT_S = 60.0
CHUNK = 1 << 20


def make_state(total_bytes: int, fill: bool) -> list[torch.Tensor]:
    """Tensors like those of a transformer: mostly large, some tiny; together `total_bytes`."""
    tensors: list[torch.Tensor] = []
    left = total_bytes // 4
    for size in (4096, 16 << 20, 1, 4 << 20, 4 << 20, 1024, 1 << 20):
        tensors.append(torch.empty(min(size, left), dtype=torch.int32))
        left -= tensors[-1].numel()
    while left:
        tensors.append(torch.empty(min(12 << 20, left), dtype=torch.int32))
        left -= tensors[-1].numel()
    for index, tensor in enumerate(tensors):
        if fill:
            torch.arange(
                index, index + tensor.numel(), out=tensor
            )  # random numbers would take longer than the copies
        else:
            tensor.zero_()  # its pages are there before the clock starts, in both ways of copying
    return tensors


def manifest_of(tensors: list[torch.Tensor]) -> Manifest:
    specs = [
        TensorSpec(f"t{index}", "int32", tuple(tensor.shape), tensor.nbytes)
        for index, tensor in enumerate(tensors)
    ]
    return Manifest(tensors=tuple(specs), values=b"", step=1, lineage="")


def source(total_bytes: int) -> None:
    """The process that holds the state: serves both ways until its standard input ends."""
    tensors = make_state(total_bytes, fill=True)
    views = [view(tensor) for tensor in tensors]
    server = StateServer("127.0.0.1", TOKEN)
    server.offer(KEY, manifest_of(tensors), views)
    bare = socket.create_server(("127.0.0.1", 0))

    def send_bare() -> None:
        while True:
            peer, _ = bare.accept()
            with peer:
                peer.recv(1)
                for data in views:
                    for offset in range(0, len(data), CHUNK):
                        peer.sendall(data[offset : offset + CHUNK])

    threading.Thread(target=send_bare, daemon=True).start()
    print(server.address, bare.getsockname()[1], peak_bytes(), flush=True)
    for _ in sys.stdin:
        print(peak_bytes(), flush=True)
    server.close()


def copy_bare(port: int, views: list[memoryview]) -> float:
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as sock:
        sock.settimeout(None)
        begin = time.perf_counter()
        sock.sendall(b"x")
        for data in views:
            got = 0
            while got < len(data):
                count = sock.recv_into(data[got:])
                if not count:
                    raise ConnectionError("the bare sender stopped")
                got += count
        return time.perf_counter() - begin


def copy_keepstep(address: str, views: list[memoryview]) -> float:
    begin = time.perf_counter()
    manifest = fetch_manifest(address, TOKEN, KEY, LIMIT_S)
    receive([address], TOKEN, KEY, manifest, views, LIMIT_S, threading.Event())
    return time.perf_counter() - begin


def peak_bytes() -> int:
    """The largest resident size of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("this kernel tells no peak memory")


def measure(total_bytes: int, repeats: int, within_s: float) -> tuple[list[float], list[float], int]:
    """Seconds of each bare copy, of each of ours, and the larger end's extra memory in bytes."""
    command = [sys.executable, __file__, "--source", str(total_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None and process.stdout is not None
            address, port, there = process.stdout.readline().split()
            tensors = make_state(total_bytes, fill=False)
            views = [view(tensor) for tensor in tensors]
            here = peak_bytes()
            copy_keepstep(address, views)  # a warm-up, and alone: the memory is ours
            process.stdin.write("memory\n")
            process.stdin.flush()
            extra = max(peak_bytes() - here, int(process.stdout.readline()) - int(there))
            if not all(map(torch.equal, tensors, make_state(total_bytes, fill=True))):
                raise AssertionError("the copy differs from the state")
            bare: list[float] = []
            ours: list[float] = []
            until = time.monotonic() + within_s
            while len(ours) < repeats and (len(ours) < 3 or time.monotonic() < until):
                bare.append(copy_bare(int(port), views))
                ours.append(copy_keepstep(address, views))
            return bare, ours, extra
        finally:
            process.kill()


def checksum_speeds() -> dict[str, float]:
    """GB/s of each candidate for the chunks' checksum, one core, data in the cache as after a copy."""
    data = memoryview(bytearray(torch.randint(0, 256, (CHUNK_BYTES,), dtype=torch.uint8).tolist()))
    candidates: dict[str, Callable[[memoryview], object]] = {
        "ours": checksum,
        "crc32": zlib.crc32,
        "adler32": zlib.adler32,
        "sha256": hashlib.sha256,
        "blake2b": hashlib.blake2b,
    }
    speeds = {}
    for name, candidate in candidates.items():
        best = float("inf")
        for _ in range(20):
            begin = time.perf_counter()
            candidate(data)
            best = min(best, time.perf_counter() - begin)
        speeds[name] = len(data) / best / 1e9
    return speeds


def main(chosen: Options) -> None:
    total_bytes, repeats, within_s = (1 << 30, 7, 20.0) if chosen.quick else (1 << 30, 21, 300.0)
    speeds = checksum_speeds()
    bare, ours, extra = measure(total_bytes, repeats, within_s)
    figures = {
        "fraction_of_tcp": median(bare) / median(ours),
        "extra_memory_fraction": extra / total_bytes,
        "keepstep_gb_per_s": total_bytes / median(ours) / 1e9,
        "tcp_gb_per_s": total_bytes / median(bare) / 1e9,
        "state_bytes": total_bytes,
        "repeats": len(ours),
        "checksum_gb_per_s": speeds["ours"],
        "crc32_gb_per_s": speeds["crc32"],
    }
    rows = [
        (name, median(times), min(times), max(times), total_bytes / median(times) / 1e9)
        for name, times in (("bare TCP", bare), ("Keepstep", ours))
    ]
    print(table(("way", "median s", "min s", "max s", "GB/s"), rows))
    print(f"\n{total_bytes / 1e9:.2f} GB, one source, {len(ours)} repeats, verified by checksums")
    print("checksum GB/s: " + ", ".join(f"{name} {speed:.1f}" for name, speed in speeds.items()))
    print(
        f"fraction of bare TCP {figures['fraction_of_tcp']:.2f}; extra memory {figures['extra_memory_fraction']:.2%}"
    )
    write(chosen, figures)


if __name__ == "__main__":
    torch.set_num_threads(1)  # as in a worker: Keepstep starts them with OMP_NUM_THREADS=1
    if sys.argv[1:2] == ["--source"]:
        source(int(sys.argv[2]))
    else:
        start(main, __doc__)

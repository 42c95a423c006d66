"""How fast a replacement gets its state: Keepstep's transfer beside a bare TCP stream of the same bytes.

Two real processes on loopback, the same memory at both ends. The bare stream is a plain sender process and a
receiver that reads into place, without checksum, token or manifest. Repeats alternate, medians are compared.
Extra memory: growth of the process's peak resident size during a copy, over the state's size.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

import torch
from common import Options, options, table, write

from keepstep.transfer import Manifest, StateServer, TensorSpec, fetch_manifest, receive
from keepstep.transfer.buffers import view

SEED = 0
TOKEN = "benchmark"
KEY = "state"
LIMIT_S = 60.0
CHUNK = 1 << 20


def make_state(total_bytes: int, fill: bool) -> list[torch.Tensor]:
    """Tensors like those of a transformer: mostly large, some tiny; together `total_bytes`."""
    generator = torch.Generator().manual_seed(SEED)
    tensors: list[torch.Tensor] = []
    left = total_bytes // 4
    for size in (4096, 16 << 20, 1, 4 << 20, 4 << 20, 1024, 1 << 20):
        tensors.append(torch.empty(min(size, left)))
        left -= tensors[-1].numel()
    while left:
        tensors.append(torch.empty(min(12 << 20, left)))
        left -= tensors[-1].numel()
    for tensor in tensors:
        if fill:
            tensor.normal_(generator=generator)
        else:
            tensor.zero_()  # its pages are there before the clock starts, in both ways of copying
    return tensors


def manifest_of(tensors: list[torch.Tensor]) -> Manifest:
    specs = [
        TensorSpec(f"t{index}", "float32", tuple(tensor.shape), tensor.nbytes)
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


def measure(total_bytes: int, repeats: int) -> tuple[list[float], list[float], int]:
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
            for _ in range(repeats):
                bare.append(copy_bare(int(port), views))
                ours.append(copy_keepstep(address, views))
            return bare, ours, extra
        finally:
            process.kill()


def main(chosen: Options) -> None:
    total_bytes, repeats = (1 << 30, 5) if chosen.quick else (1 << 30, 15)
    bare, ours, extra = measure(total_bytes, repeats)
    figures = {
        "fraction_of_tcp": median(bare) / median(ours),
        "extra_memory_fraction": extra / total_bytes,
        "keepstep_gb_per_s": total_bytes / median(ours) / 1e9,
        "tcp_gb_per_s": total_bytes / median(bare) / 1e9,
        "state_bytes": total_bytes,
        "repeats": repeats,
    }
    rows = [
        (name, median(times), min(times), max(times), total_bytes / median(times) / 1e9)
        for name, times in (("bare TCP", bare), ("Keepstep", ours))
    ]
    print(table(("way", "median s", "min s", "max s", "GB/s"), rows))
    print(f"\n{total_bytes / 1e9:.2f} GB, one source, {repeats} repeats, verified by checksums")
    print(
        f"fraction of bare TCP {figures['fraction_of_tcp']:.2f}; extra memory {figures['extra_memory_fraction']:.2%}"
    )
    write(chosen, figures, {"state": SEED})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--source"]:
        source(int(sys.argv[2]))
    else:
        main(options(__doc__))

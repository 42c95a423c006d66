"""Real sources and targets of a copy: in this process, in another one that dies, and with a spoiler between."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from keepstep.transfer import (
    Manifest,
    Received,
    StateServer,
    TensorSpec,
    receive,
)
from keepstep.transfer.buffers import view
from keepstep.transfer.link import CHUNK_BYTES, greeting

TOKEN, KEY = "secret", "generation 2"
SIZES = (3, CHUNK_BYTES, 0, 2 * CHUNK_BYTES + 4321, 20_000, 5 * CHUNK_BYTES)


def make_state(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in SIZES]


def manifest_of(state: Sequence[torch.Tensor], values: bytes = b"values") -> Manifest:
    specs = [
        TensorSpec(f"t{index}", "uint8", tuple(tensor.shape), tensor.nbytes)
        for index, tensor in enumerate(state)
    ]
    return Manifest(tensors=tuple(specs), values=values, step=7, lineage="ab" * 16)


@contextlib.contextmanager
def serving(host: str = "127.0.0.1", key: str = KEY, **options: Any) -> Iterator[StateServer]:
    server = StateServer(host, TOKEN, **options)
    state = make_state()
    server.offer(key, manifest_of(state), [view(tensor) for tensor in state])
    try:
        yield server
    finally:
        server.close()


def copy(
    sources: Sequence[str],
    *,
    token: str = TOKEN,
    key: str = KEY,
    deadline_s: float = 20.0,
    stall_s: float = 5.0,
    cancelled: threading.Event | None = None,
    tls: ssl.SSLContext | None = None,
) -> tuple[Received, list[torch.Tensor]]:
    state = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
    views = [view(tensor) for tensor in state]
    event = cancelled or threading.Event()
    try:
        return receive(
            sources, token, key, manifest_of(state), views, deadline_s, event, stall_s=stall_s, tls=tls
        ), state
    finally:
        left = [thread for thread in threading.enumerate() if thread.name.startswith("keepstep-transfer-in")]
        assert not left, "a thread may still write into the target's memory"


def is_state(state: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, state, make_state()))


CHILD = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import keepstep.transfer.server as server_module
from copies import StateServer, TOKEN, KEY, make_state, manifest_of, view
last_chunk, exact = int(sys.argv[2]), server_module.checksum
def checksum_until_death(data):
    global last_chunk
    last_chunk -= 1
    if last_chunk < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return exact(data)
server_module.checksum = checksum_until_death
state = make_state()
server = StateServer("127.0.0.1", TOKEN)
server.offer(KEY, manifest_of(state), [view(tensor) for tensor in state])
print(server.address, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def source_process(chunks_until_death: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A source that kills itself by SIGKILL when the n-th chunk is asked for."""
    folder = __file__.rpartition("/")[0]
    command = [sys.executable, "-c", CHILD, folder, str(chunks_until_death)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


@contextlib.contextmanager
def between(address: str, spoil: Callable[[bytearray], None]) -> Iterator[str]:
    """A proxy that lets `spoil` change what the source sends, part by part."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, _, port = address.rpartition(":")
    sockets: list[socket.socket] = [listener]

    def pump(
        source: socket.socket, target: socket.socket, change: Callable[[bytearray], None] | None
    ) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if change is not None:
                    change(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                sockets.extend((near, far))
                threading.Thread(target=pump, args=(near, far, None), daemon=True).start()
                threading.Thread(target=pump, args=(far, near, spoil), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def slowly(data: bytearray) -> None:
    time.sleep(0.002)


@contextlib.contextmanager
def fake_source(behave: Callable[[socket.socket], object]) -> Iterator[str]:
    """A peer that knows the protocol's beginning, then does as it likes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with peer, contextlib.suppress(OSError):
                    peer.recv(len(greeting(TOKEN)), socket.MSG_WAITALL)
                    (length,) = struct.unpack(">I", peer.recv(4, socket.MSG_WAITALL))
                    question = json.loads(peer.recv(length, socket.MSG_WAITALL))
                    if question["op"] == "stream":
                        peer.sendall(struct.pack(">I", 15) + b'{"ready": true}')
                    behave(peer)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()

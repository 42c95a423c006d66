"""Copies between real sockets and processes: whole and verified, or an error that names the source."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from keepstep.transfer import (
    Manifest,
    Received,
    StateServer,
    TensorSpec,
    TransferCancelledError,
    TransferError,
    fetch_manifest,
    receive,
)
from keepstep.transfer.buffers import view
from keepstep.transfer.link import CHUNK, CHUNK_BYTES, REQUEST, greeting

TOKEN, KEY = "secret", "generation 2"
SIZES = (3, CHUNK_BYTES, 0, 2 * CHUNK_BYTES + 4321, 20_000, 5 * CHUNK_BYTES)

pytestmark = pytest.mark.timeout(60)


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
def serving(host: str = "127.0.0.1", key: str = KEY, **options: int) -> Iterator[StateServer]:
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
) -> tuple[Received, list[torch.Tensor]]:
    state = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
    views = [view(tensor) for tensor in state]
    event = cancelled or threading.Event()
    try:
        return receive(
            sources, token, key, manifest_of(state), views, deadline_s, event, stall_s=stall_s
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
from test_transfer import StateServer, TOKEN, KEY, make_state, manifest_of, view
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


# ---- whole copies -------------------------------------------------------------------------------------


def test_a_copy_from_one_source_is_whole() -> None:
    with serving() as server:
        assert fetch_manifest(server.address, TOKEN, KEY, 5.0) == manifest_of(make_state())
        received, state = copy([server.address])
    assert is_state(state)
    assert received.bytes == sum(SIZES) and received.sources == (server.address,) and received.replanned == 0


def slowly(data: bytearray) -> None:
    time.sleep(0.002)


def test_several_sources_share_one_copy() -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving()) for _ in range(3)]
        addresses = [stack.enter_context(between(server.address, slowly)) for server in servers]
        sent_by: set[str] = set()
        until = time.monotonic() + 30.0  # on a busy machine one of them may come too late for a share
        while sent_by != set(addresses):
            assert time.monotonic() < until
            received, state = copy(addresses)
            assert is_state(state) and received.bytes == sum(SIZES)
            sent_by.update(received.sources)


def test_a_copy_over_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving("::1") as server:
        assert server.address.startswith("[::1]:")
        assert fetch_manifest(server.address, TOKEN, KEY, 5.0).step == 7
        assert is_state(copy([server.address])[1])


def test_the_listener_is_on_the_given_address_only() -> None:
    with serving("127.0.0.1") as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), timeout=2.0)


def test_both_questions_wait_for_an_offer_that_comes_late() -> None:
    with serving(key="another") as server:

        def offer_late() -> None:
            time.sleep(0.3)
            state = make_state()
            server.offer(KEY, manifest_of(state), [view(tensor) for tensor in state])

        thread = threading.Thread(target=offer_late)
        thread.start()
        with serving() as early:
            assert is_state(copy([server.address, early.address])[1])  # nobody waits for the late one
        assert fetch_manifest(server.address, TOKEN, KEY, 10.0).values == b"values"
        assert is_state(copy([server.address])[1])
        thread.join()


def test_a_state_of_no_bytes_is_whole_at_once() -> None:
    with serving() as server:
        nothing = Manifest(tensors=(TensorSpec("e", "uint8", (0,), 0),), values=b"", step=0, lineage="")
        empty = [view(torch.empty(0))]
        server.offer("empty", nothing, empty)
        assert receive([server.address], TOKEN, "empty", nothing, empty, 5.0, threading.Event()).bytes == 0


# ---- sources that die ---------------------------------------------------------------------------------


def test_a_source_killed_in_mid_copy_is_replaced_by_the_living_one() -> None:
    with source_process(chunks_until_death=2) as (address, process), serving() as server:
        received, state = copy([address, server.address])
        assert process.wait(10) == -signal.SIGKILL
    assert is_state(state)
    assert received.bytes == sum(SIZES) and received.replanned >= 1 and server.address in received.sources


def test_the_last_source_killed_in_mid_copy_is_named_with_the_reason() -> None:
    with source_process(chunks_until_death=2) as (address, process):
        with pytest.raises(TransferError, match=rf"{address}: closed the connection"):
            copy([address])
        assert process.wait(10) == -signal.SIGKILL


def test_a_source_that_is_not_there_is_named() -> None:
    gone = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{gone.getsockname()[1]}"
    gone.close()
    with pytest.raises(TransferError, match=rf"{address}: .*refused"):
        copy([address])
    with pytest.raises(TransferError, match=rf"{address}: .*refused"):
        fetch_manifest(address, TOKEN, KEY, 2.0)
    with serving() as server:
        assert is_state(copy([address, server.address])[1])
    with pytest.raises(TransferError, match="not an address"):
        copy(["nonsense"])
    with pytest.raises(TransferError, match="no source"):
        copy([])


def test_a_source_that_falls_silent_loses_its_share() -> None:
    asked = threading.Event()
    silent = fake_source(lambda peer: (peer.recv(REQUEST.size), asked.set(), time.sleep(3.0)))
    with silent as address, serving(key="another") as server:

        def offer_then() -> None:
            assert asked.wait(10)
            state = make_state()
            server.offer(KEY, manifest_of(state), [view(tensor) for tensor in state])

        thread = threading.Thread(target=offer_then)
        thread.start()
        begin = time.monotonic()
        received, state = copy([address, server.address], stall_s=0.3)
        assert is_state(state) and received.sources == (server.address,)
        assert received.replanned >= 1 and time.monotonic() - begin < 2.5
        with pytest.raises(TransferError, match="sent nothing for too long"):
            copy([address], stall_s=0.3)
        thread.join()


def test_withdrawn_memory_is_no_longer_read_and_the_copy_fails() -> None:
    with serving() as server:
        under_way = threading.Event()

        def crawl(data: bytearray) -> None:
            if len(data) > 10_000:
                under_way.set()
                time.sleep(0.05)

        outcome: list[str] = []
        with between(server.address, crawl) as address:

            def run() -> None:
                try:
                    copy([address])
                except TransferError as error:
                    outcome.append(str(error))

            thread = threading.Thread(target=run)
            thread.start()
            assert under_way.wait(10)
            server.withdraw(KEY)
            thread.join(20)
        assert len(outcome) == 1 and "closed the connection" in outcome[0]
        server.withdraw(KEY)
        with pytest.raises(TransferError, match="was not offered within"):
            fetch_manifest(server.address, TOKEN, KEY, 2.0)


# ---- strangers and errors on the way --------------------------------------------------------------------


def flip(times: int) -> Callable[[bytearray], None]:
    """Flips one bit of `times` large parts, far from any header."""
    left = [times]

    def spoil(data: bytearray) -> None:
        if left[0] and len(data) > 50_000:
            left[0] -= 1
            data[len(data) // 2] ^= 16

    return spoil


def test_a_flipped_bit_on_the_way_is_found_and_the_chunk_comes_again() -> None:
    with serving() as server, between(server.address, flip(1)) as address:
        received, state = copy([address])
        assert is_state(state) and received.bytes == sum(SIZES)


def test_a_source_whose_bits_flip_always_is_refused() -> None:
    with serving() as server, between(server.address, flip(1000)) as address:
        with pytest.raises(TransferError, match=rf"{address}: several chunks came with a wrong checksum"):
            copy([address])
        assert is_state(copy([address, server.address])[1])


def test_a_wrong_token_is_refused_before_anything_else() -> None:
    with serving() as server:
        for attempt in (
            lambda: copy([server.address], token="guess"),
            lambda: fetch_manifest(server.address, "guess", KEY, 2.0),
        ):
            with pytest.raises(TransferError, match="wrong token"):
                attempt()
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n")
            assert sock.recv(200)[4:] == b'{"refused": "wrong token"}'
            assert sock.recv(200) == b""


def test_a_wrong_key_and_another_state_are_refused_by_name() -> None:
    with serving() as server:
        with pytest.raises(TransferError, match="'other' was not offered within"):
            copy([server.address], key="other", deadline_s=2.0)
        with pytest.raises(TransferError, match="'other' was not offered within"):
            fetch_manifest(server.address, TOKEN, "other", 2.0)
        state = [tensor[:-1] if index == 3 else tensor for index, tensor in enumerate(make_state())]
        views = [view(tensor) for tensor in state]
        with pytest.raises(TransferError, match="holds another state"):
            receive([server.address], TOKEN, KEY, manifest_of(state), views, 5.0, threading.Event())
        with pytest.raises(ValueError, match="t3: "):
            receive([server.address], TOKEN, KEY, manifest_of(make_state()), views, 5.0, threading.Event())


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


@pytest.mark.parametrize("length", [0, 1, CHUNK_BYTES + 1, 2**32 - 1])
def test_a_chunk_of_another_size_than_asked_for_is_refused(length: int) -> None:
    with (
        fake_source(lambda peer: peer.sendall(CHUNK.pack(0, 0, length, 0) + bytes(100))) as address,
        pytest.raises(TransferError, match="which nobody asked for"),
    ):
        copy([address])


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (struct.pack(">I", 2**32 - 1), "announces 4294967295 bytes"),
        (struct.pack(">I", 3) + b"xyz", "malformed"),
        (struct.pack(">I", 14) + b'{"refused": 1}', ": 1"),
        (b"", "without an answer"),
        (b"\x00", "middle of a message"),
    ],
)
def test_an_absurd_manifest_is_refused(answer: bytes, reason: str) -> None:
    with (
        fake_source(lambda peer: peer.sendall(answer)) as address,
        pytest.raises(TransferError, match=reason),
    ):
        fetch_manifest(address, TOKEN, KEY, 2.0)


def test_a_target_that_asks_for_bytes_outside_the_state_gets_none() -> None:
    for piece, offset, length in ((99, 0, 1), (0, 0, 4), (0, 3, 1), (3, 2**64 - 1, 2), (1, 0, 2**32 - 1)):
        with serving() as server:
            host, _, port = server.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=10) as sock:
                question = json.dumps(
                    {
                        "op": "stream",
                        "key": KEY,
                        "wait_s": 1,
                        "identity": manifest_of(make_state()).identity(),
                    }
                ).encode()
                sock.sendall(greeting(TOKEN) + struct.pack(">I", len(question)) + question)
                assert sock.recv(19, socket.MSG_WAITALL)[4:] == b'{"ready": true}'
                sock.sendall(REQUEST.pack(piece, offset, length))
                head = CHUNK.unpack(sock.recv(CHUNK.size, socket.MSG_WAITALL))
                assert head[0] == 0xFFFFFFFF and b"not in this state" in sock.recv(
                    head[2], socket.MSG_WAITALL
                )
                assert sock.recv(1) == b""


def test_nonsense_from_strangers_leaves_the_server_serving() -> None:
    rng = random.Random(0)
    with serving() as server:
        host, _, port = server.address.rpartition(":")
        for round_number in range(30):
            with socket.create_connection((host, int(port)), timeout=10) as sock:
                known = greeting(TOKEN) if round_number % 2 else b""
                with contextlib.suppress(OSError):
                    sock.sendall(known + rng.randbytes(rng.randrange(200)))
        assert is_state(copy([server.address])[1])


def test_connections_are_bounded_and_a_place_comes_back() -> None:
    with serving(max_connections=2) as server:
        host, _, port = server.address.rpartition(":")
        holders = [socket.create_connection((host, int(port)), timeout=10) for _ in range(2)]
        with pytest.raises(TransferError):
            fetch_manifest(server.address, TOKEN, KEY, 2.0)
        for holder in holders:
            holder.close()
        until = time.monotonic() + 10
        while True:
            try:
                assert fetch_manifest(server.address, TOKEN, KEY, 2.0).step == 7
                break
            except TransferError:
                assert time.monotonic() < until


# ---- the end --------------------------------------------------------------------------------------------


def test_cancelling_ends_a_copy_at_once_wherever_it_stands() -> None:
    silent = fake_source(lambda peer: time.sleep(5.0))
    with silent as address, serving(key="another") as server:
        for sources in ([address], [server.address], [address, server.address]):
            cancelled = threading.Event()
            times: list[float] = []

            def cancel(event: threading.Event = cancelled, at: list[float] = times) -> None:
                time.sleep(0.2)
                at.append(time.monotonic())
                event.set()

            thread = threading.Thread(target=cancel)
            thread.start()
            with pytest.raises(TransferCancelledError, match="cancelled"):
                copy(sources, cancelled=cancelled, stall_s=10.0)
            assert time.monotonic() - times[0] < 1.0
            thread.join()


def test_a_deadline_ends_a_copy_and_says_who_was_late() -> None:
    with fake_source(lambda peer: time.sleep(5.0)) as address:
        begin = time.monotonic()
        with pytest.raises(TransferError, match=rf"{address}: not finished within 0.3 s"):
            copy([address], deadline_s=0.3)
        assert time.monotonic() - begin < 2.0


def test_offers_are_checked_and_closing_frees_the_port() -> None:
    with serving() as server:
        state = make_state()
        views = [view(tensor) for tensor in state]
        with pytest.raises(ValueError, match="already offered"):
            server.offer(KEY, manifest_of(state), views)
        with pytest.raises(ValueError, match="not those of the manifest"):
            server.offer("k", manifest_of(state), views[1:])
        with pytest.raises(ValueError, match="larger than the limit"):
            server.offer("k", manifest_of(state, values=bytes(16 << 20)), views)
        server.close()
        server.close()
        with pytest.raises(TransferError):
            fetch_manifest(server.address, TOKEN, KEY, 1.0)
        host, _, port = server.address.rpartition(":")
        socket.create_server((host, int(port)), reuse_port=False).close()

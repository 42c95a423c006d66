"""Flipped bits, wrong tokens and nonsense on the way: found, refused, and the server goes on serving."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable

import pytest

from keepstep.transfer import (
    TransferError,
    fetch_manifest,
    receive,
)
from keepstep.transfer.buffers import view
from keepstep.transfer.link import CHUNK, CHUNK_BYTES, REQUEST, greeting
from tests.unit.transfer.copies import (
    KEY,
    SIZES,
    TOKEN,
    between,
    copy,
    fake_source,
    is_state,
    make_state,
    manifest_of,
    serving,
)

pytestmark = pytest.mark.timeout(60)


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

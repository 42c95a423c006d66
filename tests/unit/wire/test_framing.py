"""Framing's promises: frames arrive whole and in order, and a bad peer is a WireError."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from keepstep.errors import WireError
from keepstep.wire.framing import MAX_FRAME_BYTES, frame, read_frame, recv_frame, send_frame, write_frame

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    left.settimeout(10)
    right.settimeout(10)
    with left, right:
        yield left, right


def test_frames_arrive_whole_and_in_order(pair: Pair) -> None:
    payloads = [b"", b"a", bytes(300_000), b"last"]
    sender = threading.Thread(target=lambda: [send_frame(pair[0], payload) for payload in payloads])
    sender.start()
    assert [recv_frame(pair[1]) for _ in payloads] == payloads
    sender.join(10)


def test_a_peer_that_closes_between_frames_is_simply_gone(pair: Pair) -> None:
    send_frame(pair[0], b"x")
    pair[0].close()
    assert recv_frame(pair[1]) == b"x"
    assert recv_frame(pair[1]) is None


@pytest.mark.parametrize("part", [b"\x00", b"\x00\x00\x00\x05", b"\x00\x00\x00\x05abc"])
def test_a_peer_that_stops_in_mid_frame_is_a_wire_error(pair: Pair, part: bytes) -> None:
    pair[0].sendall(part)
    pair[0].close()
    with pytest.raises(WireError, match="in the middle"):
        recv_frame(pair[1])


def test_a_frame_too_large_is_refused_by_sender_and_receiver(pair: Pair) -> None:
    with pytest.raises(WireError, match=str(MAX_FRAME_BYTES)):
        send_frame(pair[0], bytes(MAX_FRAME_BYTES + 1))
    pair[0].sendall(struct.pack(">I", MAX_FRAME_BYTES + 1))
    with pytest.raises(WireError, match="announces"):
        recv_frame(pair[1])


def test_asyncio_frames_are_the_same_bytes() -> None:
    async def check() -> None:
        left, right = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=left)
        right.settimeout(10)
        await write_frame(writer, b"hello")
        assert await asyncio.to_thread(recv_frame, right) == b"hello"
        right.sendall(frame(b"one") + frame(b"") + b"\x00\x00\x00\x09half")
        right.close()
        assert await read_frame(reader) == b"one"
        assert await read_frame(reader) == b""
        with pytest.raises(WireError, match="in the middle"):
            await read_frame(reader)
        writer.close()

    asyncio.run(asyncio.wait_for(check(), 20))


def test_asyncio_reader_refuses_what_the_limit_forbids_and_knows_the_end() -> None:
    async def check() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(b"\xff\xff\xff\xff")
        with pytest.raises(WireError, match="announces"):
            await read_frame(reader)
        ended = asyncio.StreamReader()
        ended.feed_eof()
        assert await read_frame(ended) is None

    asyncio.run(asyncio.wait_for(check(), 20))


def test_ten_thousand_random_streams_give_frames_or_a_wire_error() -> None:
    async def check() -> None:
        dice = random.Random(7)
        for _ in range(10_000):
            reader = asyncio.StreamReader()
            reader.feed_data(
                b"".join(frame(dice.randbytes(dice.randrange(9))) for _ in range(dice.randrange(3)))
            )
            reader.feed_data(dice.randbytes(dice.randrange(12)))
            reader.feed_eof()
            try:
                while await read_frame(reader) is not None:
                    pass
            except WireError:
                pass

    asyncio.run(asyncio.wait_for(check(), 60))

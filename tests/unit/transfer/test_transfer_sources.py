"""Sources that die, fall silent or take their memory back: the copy goes on without them, or names them."""

from __future__ import annotations

import signal
import socket
import threading
import time

import pytest

from keepstep.transfer import (
    TransferError,
    fetch_manifest,
)
from keepstep.transfer.buffers import view
from keepstep.transfer.link import REQUEST
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
    source_process,
)

pytestmark = pytest.mark.timeout(60)


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

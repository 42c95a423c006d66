"""Copies between real sockets and processes are whole and verified, and end when they are told to."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
import torch

from keepstep.transfer import (
    Manifest,
    TensorSpec,
    TransferCancelledError,
    TransferError,
    fetch_manifest,
    receive,
)
from keepstep.transfer.buffers import view
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
    slowly,
)

pytestmark = pytest.mark.timeout(60)


def test_a_copy_from_one_source_is_whole() -> None:
    with serving() as server:
        assert fetch_manifest(server.address, TOKEN, KEY, 5.0) == manifest_of(make_state())
        received, state = copy([server.address])
    assert is_state(state)
    assert received.bytes == sum(SIZES) and received.sources == (server.address,) and received.replanned == 0


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

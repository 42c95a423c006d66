"""State travels encrypted where certificates are given, and only between those who have one."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest

from keepstep.transfer import TransferCancelledError, TransferError, fetch_manifest
from tests.certificates import Authority
from tests.unit.transfer.copies import KEY, SIZES, TOKEN, copy, is_state, make_state, manifest_of, serving

pytestmark = pytest.mark.timeout(60)


def test_a_copy_over_tls_is_whole_and_shared_by_several_sources(tmp_path: Path) -> None:
    files = Authority(tmp_path / "ca").issue("worker")
    with serving(tls=files.server()) as one, serving(tls=files.server()) as two:
        assert fetch_manifest(one.address, TOKEN, KEY, 5.0, tls=files.client()) == manifest_of(make_state())
        received, state = copy([one.address, two.address], tls=files.client())
    assert is_state(state) and received.bytes == sum(SIZES)


def test_without_a_certificate_of_the_authority_nothing_is_served(tmp_path: Path) -> None:
    files, foreign = Authority(tmp_path / "ca").issue("worker"), Authority(tmp_path / "other").issue("worker")
    with serving(tls=files.server()) as server:
        with pytest.raises(TransferError):
            copy([server.address], deadline_s=3.0)
        with pytest.raises(TransferError):
            copy([server.address], tls=foreign.client(), deadline_s=3.0)
        with socket.create_connection(server.address.split(":"), timeout=5) as stranger:
            stranger.sendall(b"x" * 100)
            with contextlib.suppress(ConnectionResetError):
                assert b"KST" not in stranger.recv(1000)
        assert is_state(copy([server.address], tls=files.client())[1])


def test_a_cancelled_copy_over_tls_ends_at_once_and_a_wait_for_an_offer_too(tmp_path: Path) -> None:
    files = Authority(tmp_path / "ca").issue("worker")
    with serving(tls=files.server(), key="another") as server:
        cancelled = threading.Event()
        threading.Timer(0.3, cancelled.set).start()
        with pytest.raises(TransferCancelledError):
            copy([server.address], tls=files.client(), cancelled=cancelled, deadline_s=30.0)

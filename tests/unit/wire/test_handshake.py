"""Both sides prove the token and neither shows it; what was seen once is worth nothing a second time."""

from __future__ import annotations

import pytest

from keepstep.errors import WireError
from keepstep.wire import handshake

TOKEN = "t" * 32


def test_both_sides_are_convinced() -> None:
    banner = handshake.make_banner()
    handshake.check_banner(banner)
    greeting = handshake.greet(TOKEN, banner, b"hello")
    assert handshake.hello_of(TOKEN, banner, greeting) == b"hello"
    answer = handshake.reply(TOKEN, banner, greeting, b"welcome")
    assert handshake.message_of(TOKEN, banner, greeting, answer) == b"welcome"
    assert TOKEN.encode() not in banner + greeting + answer


def test_a_caller_without_the_token_is_no_caller() -> None:
    banner = handshake.make_banner()
    assert handshake.hello_of(TOKEN, banner, handshake.greet("wrong", banner, b"hello")) is None
    for junk in (b"", b"x", bytes(64), bytes(2000)):
        assert handshake.hello_of(TOKEN, banner, junk) is None


def test_a_listener_without_the_token_convinces_nobody() -> None:
    banner = handshake.make_banner()
    greeting = handshake.greet(TOKEN, banner, b"hello")
    for answer in (b"", bytes(40), handshake.reply("wrong", banner, greeting, b"welcome"), greeting):
        with pytest.raises(WireError, match="token"):
            handshake.message_of(TOKEN, banner, greeting, answer)


def test_a_greeting_counts_once_and_as_it_is() -> None:
    banner = handshake.make_banner()
    greeting = handshake.greet(TOKEN, banner, b"hello")
    assert handshake.hello_of(TOKEN, handshake.make_banner(), greeting) is None
    for at in range(len(greeting)):
        bent = bytearray(greeting)
        bent[at] ^= 1
        assert handshake.hello_of(TOKEN, banner, bytes(bent)) is None


def test_an_answer_counts_for_its_own_greeting_only() -> None:
    banner = handshake.make_banner()
    first, second = (handshake.greet(TOKEN, banner, b"hello") for _ in range(2))
    with pytest.raises(WireError):
        handshake.message_of(TOKEN, banner, second, handshake.reply(TOKEN, banner, first, b"welcome"))


def test_another_service_on_the_port_is_recognised() -> None:
    for banner in (b"", b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12", bytes(36)):
        with pytest.raises(WireError, match="no agent"):
            handshake.check_banner(banner)

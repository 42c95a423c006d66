"""Endpoints as people write them, and names that stand for several addresses."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from keepstep.cli.addresses import Endpoint, own_address, parse_endpoint, parse_join
from keepstep.controller.server import bind
from keepstep.errors import UsageError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node0:29400", "node0", 29400),
        ("node0", "node0", 29400),
        ("10.0.0.1:0", "10.0.0.1", 0),
        ("[::1]:29401", "::1", 29401),
        ("[::1]", "::1", 29400),
        ("fd00::7", "fd00::7", 29400),
        ("[fd00::7]:0", "fd00::7", 0),
    ],
)
def test_an_endpoint_is_read_in_every_usual_form(text: str, host: str, port: int) -> None:
    found = parse_endpoint(text)
    assert found == Endpoint(host, port)
    assert parse_endpoint(str(found)) == found


@pytest.mark.parametrize("text", ["", ":29400", "a:b", "a:70000", "a b:1", "http://a:1", "a:1:2", "[::1:5"])
def test_what_is_no_endpoint_says_so(text: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        parse_endpoint(text)


def test_join_takes_an_endpoint_or_a_url_that_says_whether_it_is_tls() -> None:
    assert parse_join("node0:1") == (Endpoint("node0", 1), None)
    assert parse_join("http://node0:1") == (Endpoint("node0", 1), False)
    assert parse_join("wss://[::1]:1/agent") == (Endpoint("::1", 1), True)
    for text in ("ftp://node0:1", "http://node0:1/other", "http://user:secret@node0:1"):
        with pytest.raises(ValueError, match="must"):
            parse_join(text)


def resolves_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """The name `several` stands for these."""
    real = socket.getaddrinfo

    def resolve(host: Any, port: Any, *args: Any, **named: Any) -> Any:
        hosts = addresses if host == "several" else (host,)
        return [found for one in hosts for found in real(one, port, *args, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def test_of_a_name_with_several_addresses_the_local_one_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    resolves_to(monkeypatch, "198.51.100.1", "127.0.0.9")
    with bind("several", 0) as sock:
        assert sock.getsockname()[0] == "127.0.0.9"
    assert own_address("several", "--advertise") == "127.0.0.9"


def test_a_name_without_a_local_address_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    resolves_to(monkeypatch, "198.51.100.1", "198.51.100.2")
    said = r"several \(198.51.100.1, 198.51.100.2\): not an address of this machine"
    with pytest.raises(UsageError, match=said):
        bind("several", 0)
    with pytest.raises(UsageError, match="an outside address of a translating router"):
        own_address("several", "--advertise")


def test_both_families_are_bound_and_a_port_in_use_is_said() -> None:
    for host in ("127.0.0.1", "::1"):
        with bind(host, 0) as sock, pytest.raises(UsageError, match="is in use: choose another"):
            bind(host, sock.getsockname()[1])
    with pytest.raises(UsageError, match="neither an address nor a name"):
        bind("no-such-host.invalid", 0)
    with pytest.raises(UsageError, match="is no address that others could reach"):
        own_address("0.0.0.0", "--advertise")

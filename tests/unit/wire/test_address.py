"""HOST:PORT is read as it is written, and what is none is refused in one line."""

from __future__ import annotations

import pytest

from keepstep.wire.address import format_address, parse_address, plain_host


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        ("127.0.0.2", 80, "127.0.0.2:80"),
        ("node-1.example.org", 65535, "node-1.example.org:65535"),
        ("::1", 1, "[::1]:1"),
        ("fe80::1%eth0", 29500, "[fe80::1%eth0]:29500"),
    ],
)
def test_an_address_is_read_as_it_was_written(host: str, port: int, text: str) -> None:
    assert format_address(host, port) == text
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "host",
            ":80",
            "host:",
            "host:0",
            "host:65536",
            "host:8O",
            "host:-1",
            "host:²",
            "::1:80",
            "[::1]",
        ),
        *("[]:80", "[host]:80", "[::1:80", "::1]:80", "a b:80", "http://host:80", "host:80\n", "[[::1]]:80"),
    ],
)
def test_what_is_no_address_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="not an address") as caught:
        parse_address(text)
    assert "\n" not in str(caught.value)


def test_a_host_has_one_form() -> None:
    assert plain_host("0:0:0:0:0:0:0:1") == "::1"
    assert plain_host("localhost") == "localhost"

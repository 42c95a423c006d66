"""HOST:PORT as text, one way to write it and one to read it; an IPv6 host stands in brackets.

Text only: no name is looked up, nothing is connected.
"""

from __future__ import annotations

import ipaddress


def format_address(host: str, port: int) -> str:
    """host:port, with brackets round an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
    """The reverse of `format_address`. Raises ValueError, in one line; ::1:80 without brackets is none."""
    host, separator, port_text = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if bracketed else host
    digits = port_text.isascii() and port_text.isdecimal() and len(port_text) <= 5
    if (
        not separator
        or not bare
        or not digits
        or not 0 < int(port_text) < 65536
        or bracketed != (":" in bare)
        or any(character in bare for character in "[]/ \t\r\n")
    ):
        raise ValueError(f"not an address: {address!r:.100} (expected HOST:PORT, or [HOST]:PORT for IPv6)")
    return bare, int(port_text)


def plain_host(host: str) -> str:
    """An address in the one form in which sockets report it (::1, not 0:0:0:0:0:0:0:1); a name as it is."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host

"""Where a node meets the others: endpoints as people write them, and which address of this machine is meant.

A name may stand for several addresses and be of any family. Nothing here listens or speaks.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from keepstep.errors import UsageError
from keepstep.wire.address import format_address, parse_address

RENDEZVOUS_PORT = 29400  # torchrun's
MASTER_PORT = 29500  # torchrun's, of --master-port


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host (name or address) and a port; port 0: any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return format_address(self.host, self.port)

    def url(self, *, tls: bool) -> str:
        return f"{'https' if tls else 'http'}://{self}"


def parse_endpoint(text: str, default_port: int = RENDEZVOUS_PORT) -> Endpoint:
    """HOST:PORT, HOST, [V6]:PORT or a bare IPv6 address. Raises ValueError, in words that follow a flag's name."""
    text = text.strip()
    wrong = ValueError(f"must be HOST:PORT (an IPv6 address in brackets), not {text!r}")
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if is_address(bare):
        return Endpoint(bare, default_port)
    if ":" not in text:
        if not text or any(c.isspace() or c in "/[]" for c in text):
            raise wrong
        return Endpoint(text, default_port)
    if text.endswith(":0"):
        host = text.removesuffix(":0")
        text = f"{host}:1"
        return Endpoint(_parsed(text, wrong)[0], 0)
    return Endpoint(*_parsed(text, wrong))


def _parsed(text: str, wrong: ValueError) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError:
        raise wrong from None


def parse_join(text: str) -> tuple[Endpoint, bool | None]:
    """What --join names: HOST:PORT, or a URL, whose scheme says whether it speaks TLS (None: not said)."""
    tls: bool | None = None
    if "://" in text:
        parts = urlsplit(text)
        schemes = {"http": False, "ws": False, "https": True, "wss": True}
        if parts.scheme not in schemes or not parts.netloc or parts.path not in ("", "/", "/agent"):
            raise ValueError(f"must be HOST:PORT or http://HOST:PORT, not {text!r}")
        if parts.username is not None or parts.query:
            raise ValueError("must not carry a token or anything else: --token-file names the token's file")
        text, tls = parts.netloc, schemes[parts.scheme]
    return parse_endpoint(text), tls


def is_address(text: str) -> bool:
    """Whether this is an IPv4 or IPv6 address and no name."""
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def is_wildcard(host: str) -> bool:
    """0.0.0.0 and [::]: every address of the machine."""
    return is_address(host) and ipaddress.ip_address(host.partition("%")[0]).is_unspecified


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address; False for a name."""
    return is_address(host) and ipaddress.ip_address(host.partition("%")[0]).is_loopback


def addresses_of(host: str) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    """All addresses of a name, as sockets take them (port 0), those that others can reach first. Raises OSError."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    unique = dict.fromkeys((family, address) for family, _, _, _, address in found)
    return sorted(unique, key=lambda one: is_loopback(str(one[1][0])))


def own_address(host: str, flag: str) -> str:
    """The address of this machine that `host` stands for. Raises UsageError when it is none of this machine's."""
    if is_wildcard(host):
        raise UsageError(f"{flag} {host} is no address that others could reach: name one of this machine's")
    try:
        candidates = addresses_of(host)
    except OSError:
        raise UsageError(f"{flag} {host} is neither an address nor a name that is known here") from None
    for family, address in candidates:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return str(address[0])
    shown = ", ".join(str(address[0]) for _, address in candidates)
    what = f"{host} ({shown})" if shown != host else host
    raise UsageError(
        f"{flag} {what} is no address of this machine: workers listen there, so an outside address of a "
        "translating router (NAT) cannot serve"
    )

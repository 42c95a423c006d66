"""Where the agents of other nodes are, and how this worker connects to one of them.

The newest announcement tells the addresses. A connection is made by a dialler, which shows every socket to
its owner *before* it blocks, so that another thread can cut it at any moment. Both sides prove the job's
token (`keepstep.wire.handshake`); TLS lies beneath it where the session has a context for it.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from keepstep.core.actions import Announce
from keepstep.core.types import Generation
from keepstep.errors import ProtectionError, WireError
from keepstep.trainer.link import Identity
from keepstep.wire import codec, framing, handshake
from keepstep.wire.address import parse_address
from keepstep.wire.messages import PROTOCOL_VERSION, Fenced, PeerHello, PeerWelcome

CONNECT_TIMEOUT_S = 10.0

Own = Callable[[socket.socket], None]  # told of each socket before anything blocks on it
Dial = Callable[[Own], socket.socket]


@dataclass(frozen=True, slots=True)
class Route:
    """One other node's agent."""

    node: str
    address: str


class Directory:
    """What the newest announcement says about the other nodes. Read and written from any thread."""

    def __init__(self, identity: Identity, tls: ssl.SSLContext | None = None) -> None:
        self._identity = identity
        self._tls = tls
        self._number = -1
        self._peers: Mapping[str, str] = {}
        self._keepers: Mapping[str, str] = {}

    def note(self, announce: Announce) -> None:
        """A later word about the same generation counts as well: an agent may have moved to another port."""
        if announce.generation.number >= self._number:
            self._number = announce.generation.number
            self._peers, self._keepers = announce.peers, announce.keepers

    @property
    def keeper(self) -> Route | None:
        """Whose agent keeps this worker's records; None when no other node does."""
        node = self._keepers.get(self._identity.node, "")
        address = self._peers.get(node, "")
        return Route(node, address) if address and node != self._identity.node else None

    def dial_store(self, generation: Generation) -> Dial:
        """How to reach the store of a generation: over this node's own agent, or that of the node it names."""
        identity, node = self._identity, generation.store
        if node in ("", identity.node):
            return lambda own: _dial_own_agent(identity, own)
        address = self._peers.get(node, "")
        if not address:
            raise ProtectionError(
                f"generation {generation.number} keeps its store on {node}, and nobody said where that is"
            )
        return lambda own: self.dial(Route(node, address), "store", own)

    def dial(
        self, route: Route, role: Literal["store", "keep"], own: Own, timeout_s: float = CONNECT_TIMEOUT_S
    ) -> socket.socket:
        """An authenticated connection to another node's agent. Raises OSError, ProtectionError or WireError."""
        identity = self._identity
        host, port = parse_address(route.address)
        family, kind, protocol, _, remote = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            own(sock)
            sock.settimeout(timeout_s)
            sock.connect(remote)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_hostname=host)
                own(sock)
            hello = PeerHello(
                version=PROTOCOL_VERSION,
                node=identity.node,
                to=route.address,
                role=role,
                worker=identity.worker,
            )
            _introduce(sock, identity.token, hello)
        except BaseException:
            sock.close()
            raise
        return sock


def _introduce(sock: socket.socket, token: str, hello: PeerHello) -> None:
    """The caller's half of the handshake. Raises WireError (no such agent) or ProtectionError (refused)."""
    banner = b""
    while len(banner) < handshake.BANNER_BYTES:
        part = sock.recv(handshake.BANNER_BYTES - len(banner))
        if not part:
            raise WireError("who answers there closed the connection at once")
        banner += part
    handshake.check_banner(banner)
    greeting = handshake.greet(token, banner, codec.encode(hello))
    framing.send_frame(sock, greeting)
    answer = framing.recv_frame(sock)
    if answer is None:
        raise WireError("the agent closed the connection: does it have this job's token?")
    message = codec.decode(handshake.message_of(token, banner, greeting, answer))
    if isinstance(message, Fenced):
        raise ProtectionError(f"the agent refused worker {hello.worker}: {message.reason}")
    if not isinstance(message, PeerWelcome):
        raise WireError(f"{type(message).__name__} is no answer to a hello")


def _dial_own_agent(identity: Identity, own: Own) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        own(sock)
        sock.settimeout(CONNECT_TIMEOUT_S)
        sock.connect(identity.socket_path)
        framing.send_frame(sock, codec.encode(identity.hello("store")))
    except BaseException:
        sock.close()
        raise
    return sock

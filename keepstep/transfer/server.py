"""A source: lends its state's memory to targets that carry the job's token. It only ever reads.

One daemon thread per connection; torch and the sockets release the interpreter while they copy, so the
main thread computes on. The owner must not change a buffer between `offer` and the return of `withdraw`.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from keepstep.errors import InvariantError, WireError
from keepstep.transfer.checksum import checksum
from keepstep.transfer.link import (
    CHUNK,
    GREETING_BYTES,
    MAX_REFUSAL_BYTES,
    REFUSED_PIECE,
    REQUEST,
    answer,
    ask,
    be_patient,
    is_greeting,
    read_into,
    shut,
)
from keepstep.transfer.manifest import Manifest
from keepstep.wire.address import format_address
from keepstep.wire.framing import MAX_FRAME_BYTES

GREETING_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 60.0  # a target that takes nothing for so long is dropped
_WATCH_INTERVAL_S = 0.5  # how often a waiting connection looks whether its peer is still there
_DRAIN_TIMEOUT_S, _DRAIN_BYTES = 1.0, 64 << 10
_MAX_REQUEST_BYTES = 64 << 20


@dataclass(eq=False)
class _Offer:
    manifest: Manifest
    text: bytes
    buffers: list[memoryview]
    users: set[socket.socket] = field(default_factory=set)
    sending: int = 0
    taken: bool = False
    withdrawn: bool = False


class StateServer:
    """Listens on `host` (a local address, IPv4 or IPv6) and a free port, until `close`. Raises OSError.

    `tls`: for connections from targets; None: without TLS. `on_note(key, step)` hears what a target says about
    itself (`tell_source`), on a thread of the server's.
    """

    def __init__(
        self,
        host: str,
        token: str,
        *,
        max_connections: int = 64,
        tls: ssl.SSLContext | None = None,
        on_note: Callable[[str, int | None], None] | None = None,
    ) -> None:
        self._on_note = on_note
        self._awaited: Counter[str] = Counter()
        self._tls = tls
        self._token = token
        self._max_connections = max_connections
        self._changed = threading.Condition()
        self._offers: dict[str, _Offer] = {}
        self._connections: set[socket.socket] = set()
        self._closed = False
        family, kind, protocol, _, local = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._listener = socket.socket(family, kind, protocol)
        try:
            self._listener.bind(local)
            self._listener.listen(max_connections)
        except BaseException:
            self._listener.close()
            raise
        self.address = format_address(host, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="keepstep-transfer", daemon=True).start()

    def offer(self, key: str, manifest: Manifest, buffers: Sequence[memoryview]) -> None:
        """Serve these bytes under `key`, to those who wait for it too.

        Raises ValueError: the key is taken, the buffers do not fit the manifest, the manifest is too large.
        """
        flat = [buffer.cast("B") if buffer.nbytes else memoryview(b"") for buffer in buffers]
        if [buffer.nbytes for buffer in flat] != [spec.bytes for spec in manifest.tensors]:
            raise ValueError("the buffers' sizes are not those of the manifest")
        text = manifest.to_json()
        if len(text) > MAX_FRAME_BYTES:
            raise ValueError(f"a manifest of {len(text)} bytes is larger than the limit of {MAX_FRAME_BYTES}")
        with self._changed:
            if key in self._offers:
                raise ValueError(f"{key!r} is already offered; withdraw it first")
            self._offers[key] = _Offer(manifest, text, flat)
            self._changed.notify_all()

    def taken(self, key: str) -> bool:
        """Whether a target has asked what is offered under `key` now: it is about to copy it, or has."""
        with self._changed:
            offer = self._offers.get(key)
            return offer is not None and offer.taken

    def awaited(self, key: str) -> bool:
        """Whether a target waits for an offer under `key` at this moment."""
        with self._changed:
            return self._awaited[key] > 0

    def withdraw(self, key: str) -> None:
        """Serve `key` no longer. When this returns, its memory is no longer read and may change."""
        with self._changed:
            offer = self._offers.pop(key, None)
            if offer is None:
                return
            offer.withdrawn = True
            for sock in offer.users:
                shut(sock)  # wakes a thread that is in the middle of sending
            if not self._changed.wait_for(lambda: offer.sending == 0, timeout=GREETING_TIMEOUT_S):
                raise InvariantError(
                    f"{key!r} is still being sent {GREETING_TIMEOUT_S} s after its sockets were shut"
                )

    def close(self) -> None:
        """Withdraw everything and close every socket; the port is free afterwards. Again: no effect."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            keys = list(self._offers)
            self._changed.notify_all()
        for key in keys:
            self.withdraw(key)
        shut(self._listener)  # wakes accept(); close() alone would not
        self._listener.close()
        with self._changed:
            for sock in self._connections:
                shut(sock)
            self._changed.wait_for(lambda: not self._connections, timeout=GREETING_TIMEOUT_S)

    # ---- threads ------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # out of file descriptors, say: others may be closed meanwhile
                continue
            with self._changed:
                full = self._closed or len(self._connections) >= self._max_connections
                if not full:
                    self._connections.add(sock)
            if full:
                sock.close()
                continue
            threading.Thread(
                target=self._serve, args=(sock,), name="keepstep-transfer-out", daemon=True
            ).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                sock = self._encrypt(sock, self._tls)
            if not is_greeting(_read_greeting(sock), self._token):
                ask(sock, {"refused": "wrong token"})
                _drain(sock)
                return
            question = answer(sock)
            if question is not None:
                self._reply(sock, question)
        except (OSError, WireError):
            pass  # the target is gone, or talks nonsense: its affair, and it knows
        finally:
            with self._changed:
                self._connections.discard(sock)
                self._changed.notify_all()
            sock.close()

    def _encrypt(self, plain: socket.socket, tls: ssl.SSLContext) -> ssl.SSLSocket:
        """Shake hands within one deadline. The plain socket is taken over by the one that is returned."""
        plain.settimeout(GREETING_TIMEOUT_S)
        sock = tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        with self._changed:
            self._connections.discard(plain)
            self._connections.add(sock)
        try:
            sock.do_handshake()
        except BaseException:
            with self._changed:
                self._connections.discard(sock)
                self._changed.notify_all()
            sock.close()
            raise
        return sock

    def _reply(self, sock: socket.socket, question: dict[str, Any]) -> None:
        key, wait_s, identity = question.get("key"), question.get("wait_s"), question.get("identity", "")
        if not isinstance(key, str) or not isinstance(wait_s, (int, float)) or not isinstance(identity, str):
            ask(sock, {"refused": "not a question of this protocol version"})
            return
        if question.get("op") == "note":
            held = question.get("held")
            if self._on_note is None or not (held is None or type(held) is int):
                ask(sock, {"refused": "nothing is noted here"})
                return
            self._on_note(key, held)
            ask(sock, {"ready": True})
            return
        with self._changed:
            self._awaited[key] += 1
        try:
            after = question.get("after", -1)
            offer = self._wait_for(key, sock, min(wait_s, 3600.0), after if type(after) is int else -1)
        finally:
            with self._changed:
                self._awaited[key] -= 1
                self._awaited += Counter()  # forgets what nobody waits for
        if offer is None:
            ask(sock, {"refused": f"{key!r} was not offered within {wait_s:.1f} s"})
        elif question.get("op") == "manifest":
            offer.taken = True
            sock.sendall(len(offer.text).to_bytes(4, "big") + offer.text)
        elif question.get("op") != "stream":
            ask(sock, {"refused": "unknown operation"})
        elif identity != offer.manifest.identity():
            ask(sock, {"refused": f"{key!r} holds another state here (step {offer.manifest.step})"})
        else:
            self._stream(sock, offer)

    def _wait_for(self, key: str, sock: socket.socket, wait_s: float, after: int) -> _Offer | None:
        """The offer under `key`, once there is one of a step beyond `after`."""
        until = time.monotonic() + wait_s

        def found() -> _Offer | None:
            offer = self._offers.get(key)
            return offer if offer is not None and offer.manifest.step > after else None

        while True:
            with self._changed:
                left = min(until - time.monotonic(), _WATCH_INTERVAL_S)
                self._changed.wait_for(lambda: found() or self._closed, timeout=max(left, 0.0))
                offer = found()
            if offer is not None or self._closed or time.monotonic() >= until:
                return offer
            readable, _, _ = select.select([sock], [], [], 0)
            if readable and not socket.socket.recv(
                sock, 1, socket.MSG_PEEK
            ):  # below TLS: only whether it ends
                raise ConnectionResetError("the target is gone")

    def _stream(self, sock: socket.socket, offer: _Offer) -> None:
        with self._changed:
            if offer.withdrawn:
                return
            offer.users.add(sock)
        try:
            ask(sock, {"ready": True})
            be_patient(sock, STALL_TIMEOUT_S)
            request = bytearray(REQUEST.size)
            while True:
                read_into(sock, memoryview(request))
                piece, offset, length = REQUEST.unpack(request)
                fits = piece < len(offer.buffers) and length <= _MAX_REQUEST_BYTES
                if not fits or offset + length > offer.buffers[piece].nbytes:
                    _refuse(sock, f"piece {piece} from {offset}, {length} bytes: not in this state")
                    return
                with self._changed:
                    if offer.withdrawn:
                        return
                    offer.sending += 1
                try:
                    data = offer.buffers[piece][offset : offset + length]
                    _send_chunk(sock, CHUNK.pack(piece, offset, length, checksum(data)), data)
                finally:
                    with self._changed:
                        offer.sending -= 1
                        if offer.withdrawn:
                            self._changed.notify_all()
        finally:
            with self._changed:
                offer.users.discard(sock)


def _read_greeting(sock: socket.socket) -> bytes:
    until, received = time.monotonic() + GREETING_TIMEOUT_S, b""
    while len(received) < GREETING_BYTES:  # one deadline for all of it: a stranger may drip
        sock.settimeout(max(until - time.monotonic(), 0.001))
        part = sock.recv(GREETING_BYTES - len(received))
        if not part:
            raise ConnectionResetError("closed the connection")
        received += part
    sock.settimeout(GREETING_TIMEOUT_S)
    return received


def _drain(sock: socket.socket) -> None:
    # To close with unread bytes is a reset, which may overtake the answer: read on until the peer has it.
    socket.socket.shutdown(sock, socket.SHUT_WR)
    until, left = time.monotonic() + _DRAIN_TIMEOUT_S, _DRAIN_BYTES
    while left > 0 and (timeout := until - time.monotonic()) > 0:
        sock.settimeout(timeout)
        part = sock.recv(4096)
        if not part:
            return
        left -= len(part)


def _send_chunk(sock: socket.socket, head: bytes, data: memoryview) -> None:
    if isinstance(sock, ssl.SSLSocket):
        sock.sendall(head)
        sock.sendall(data)
        return
    sent = sock.sendmsg([head, data])
    if sent < len(head):
        sock.sendall(head[sent:])
        sent = len(head)
    sock.sendall(data[sent - len(head) :])


def _refuse(sock: socket.socket, reason: str) -> None:
    text = reason.encode()[:MAX_REFUSAL_BYTES]
    sock.sendall(CHUNK.pack(REFUSED_PIECE, 0, len(text), 0) + text)

"""A target: asks sources for their manifest, and copies state from all of them at once into its own memory."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keepstep.core.transfer_plan import Stripe, plan_stripes
from keepstep.errors import WireError
from keepstep.transfer.checksum import checksum
from keepstep.transfer.errors import TransferCancelledError, TransferError
from keepstep.transfer.link import (
    CHUNK,
    CHUNK_BYTES,
    MAX_REFUSAL_BYTES,
    REFUSED_PIECE,
    REQUEST,
    answer,
    ask,
    be_patient,
    greeting,
    read_into,
    shut,
)
from keepstep.transfer.manifest import Manifest
from keepstep.transfer.shares import Shares
from keepstep.wire.address import parse_address
from keepstep.wire.framing import recv_frame

CONNECT_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 5.0  # a source that sends nothing for so long, although asked, is given up
WINDOW_BYTES = 4 << 20  # asked for and not yet arrived, per source: hides the way there and back
WINDOW_CHUNKS = 64
_POLL_INTERVAL_S = 0.005  # an Event cannot be waited for together with a condition
_WAIT_SHARE = 0.9  # of the time left a source waits for an offer: its "not offered" then comes in time


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What a copy took. `sources`: addresses that delivered; `replanned`: stripes taken over from lost ones."""

    bytes: int
    seconds: float
    sources: tuple[str, ...]
    replanned: int


def fetch_manifest(
    address: str,
    token: str,
    key: str,
    deadline_s: float,
    *,
    after: int = -1,
    tls: ssl.SSLContext | None = None,
) -> Manifest:
    """What the source offers under `key`; waits there, at most `deadline_s`, until it offers it.

    `after`: only the state of a step beyond this one will do.

    Raises TransferError, which names the source and the reason.
    """
    until = time.monotonic() + deadline_s
    try:
        with _connect(address, token, min(deadline_s, CONNECT_TIMEOUT_S), tls) as sock:
            left = max(until - time.monotonic(), 0.001)
            ask(sock, {"op": "manifest", "key": key, "wait_s": _WAIT_SHARE * left, "after": after})
            sock.settimeout(left)
            payload = recv_frame(sock)
            if payload is None:
                raise WireError("closed the connection without an answer")
            if payload.startswith(b'{"refused"'):
                raise WireError(_refusal(json.loads(payload)))
            return Manifest.from_json(payload)
    except (OSError, WireError, ValueError) as error:
        raise TransferError(f"no manifest of {key!r} from {address}: {_reason(error)}") from None


def tell_source(
    address: str, token: str, key: str, held: int | None, *, tls: ssl.SSLContext | None = None
) -> None:
    """Tell a source which step's state is held of what it offers under `key`; None: none in time.

    Raises TransferError, which names the source and the reason.
    """
    try:
        with _connect(address, token, CONNECT_TIMEOUT_S, tls) as sock:
            ask(sock, {"op": "note", "key": key, "wait_s": 0.0, "held": held})
            sock.settimeout(CONNECT_TIMEOUT_S)
            reply = answer(sock)
            if reply is None or reply.get("ready") is not True:
                raise WireError("closed the connection" if reply is None else _refusal(reply))
    except (OSError, WireError, ValueError) as error:
        raise TransferError(f"{address} was not told of {key!r}: {_reason(error)}") from None


def receive(
    sources: Sequence[str],
    token: str,
    key: str,
    manifest: Manifest,
    buffers: Sequence[memoryview],
    deadline_s: float,
    cancelled: threading.Event,
    *,
    stall_s: float = STALL_TIMEOUT_S,
    tls: ssl.SSLContext | None = None,
) -> Received:
    """Fill `buffers` (one per tensor of the manifest, the target's own memory) from all sources at once.

    On return every byte is verified. Raises TransferError (which source failed, and why; the buffers then
    hold no state), TransferCancelledError as soon as `cancelled` is set, ValueError when the buffers do not
    fit the manifest. No thread writes into the buffers afterwards.
    """
    begin = time.monotonic()
    views = _checked(buffers, manifest)
    numbers = range(len(set(sources)))
    addresses = list(dict.fromkeys(sources))
    if not addresses:
        raise TransferError(f"no source for {key!r}")
    shares = Shares(plan_stripes([len(view) for view in views], list(numbers), CHUNK_BYTES), list(numbers))
    stop_at = begin + deadline_s
    question = {"op": "stream", "key": key, "identity": manifest.identity()}
    streams = [
        _Stream(number, addresses[number], token, question, views, shares, stop_at, stall_s, tls)
        for number in numbers
    ]
    try:
        for stream in streams:
            stream.start()
        while not shares.wait(_POLL_INTERVAL_S):
            if cancelled.is_set():
                raise TransferCancelledError(f"the copy of {key!r} was cancelled")
            if time.monotonic() >= stop_at:
                shares.stop()
    finally:
        shares.stop()
        for stream in streams:
            stream.shut()
        for stream in streams:
            if stream.connected:  # one that still connects is left behind: it will find nothing to do
                stream.join()
    if not shares.complete:
        reasons = {addresses[number]: reason for number, reason in shares.failures.items()}
        late = [address for address in addresses if address not in reasons]
        reasons |= dict.fromkeys(late, f"not finished within {deadline_s:.1f} s")
        raise TransferError(
            f"no copy of {key!r}: " + "; ".join(f"{who}: {why}" for who, why in reasons.items())
        )
    return Received(
        bytes=sum(shares.arrived_bytes.values()),
        seconds=time.monotonic() - begin,
        sources=tuple(addresses[number] for number, count in shares.arrived_bytes.items() if count),
        replanned=shares.replanned,
    )


class _Stream(threading.Thread):
    """One source's part of a copy: asks ahead, reads into place, verifies."""

    def __init__(
        self,
        number: int,
        address: str,
        token: str,
        question: dict[str, str],
        views: Sequence[memoryview],
        shares: Shares,
        stop_at: float,
        stall_s: float,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(name=f"keepstep-transfer-in-{number}", daemon=True)
        self._number = number
        self._address = address
        self._token = token
        self._question = question
        self._views = views
        self._shares = shares
        self._stop_at = stop_at
        self._stall_s = stall_s
        self._tls = tls
        self._sock: socket.socket | None = None

    def run(self) -> None:
        try:
            left = self._stop_at - time.monotonic()
            timeout_s = max(min(left, CONNECT_TIMEOUT_S), 0.001)
            with _connect(self._address, self._token, timeout_s, self._tls) as sock:
                self._sock = sock
                if self._shares.over:  # whoever ended it while we connected could not shut the socket
                    return
                self._open(sock)
                be_patient(sock, self._stall_s)
                self._copy(sock)
        except Exception as error:  # whatever it is, the other sources must hear of it
            self._shares.lost(self._number, _reason(error))
        finally:
            self._sock = None

    @property
    def connected(self) -> bool:
        """Whether it has a socket, and so may be writing into the buffers."""
        return self._sock is not None

    def shut(self) -> None:
        """End it now: a blocked read returns at once."""
        sock = self._sock
        if sock is not None:
            shut(sock)

    def _open(self, sock: socket.socket) -> None:
        left = max(self._stop_at - time.monotonic(), 0.001)
        ask(sock, {**self._question, "wait_s": _WAIT_SHARE * left})
        sock.settimeout(left)
        reply = answer(sock)
        if reply is None:
            raise ConnectionResetError("closed the connection")
        if not reply.get("ready"):
            raise WireError(_refusal(reply))

    def _copy(self, sock: socket.socket) -> None:
        asked: deque[Stripe] = deque()
        in_flight = 0
        header = memoryview(bytearray(CHUNK.size))
        while True:
            requests = b""
            while in_flight < WINDOW_BYTES and len(asked) < WINDOW_CHUNKS:
                stripe = self._shares.take(self._number, wait=not asked)
                if stripe is None:
                    break
                asked.append(stripe)
                in_flight += stripe.length
                requests += REQUEST.pack(stripe.piece, stripe.offset, stripe.length)
            if requests:
                sock.sendall(requests)
            if not asked:
                return
            stripe = asked.popleft()
            in_flight -= stripe.length
            self._read(sock, stripe, header)

    def _read(self, sock: socket.socket, stripe: Stripe, header: memoryview) -> None:
        read_into(sock, header)
        piece, offset, length, expected = CHUNK.unpack(header)
        if piece == REFUSED_PIECE and length <= MAX_REFUSAL_BYTES:
            text = bytearray(length)
            read_into(sock, memoryview(text))
            raise WireError(text.decode(errors="replace"))
        if (piece, offset, length) != (stripe.piece, stripe.offset, stripe.length):
            raise WireError(f"announced piece {piece} from {offset}, {length} bytes, which nobody asked for")
        data = self._views[piece][offset : offset + length]
        read_into(sock, data)
        if checksum(data) == expected:
            self._shares.arrived(self._number, stripe)
        elif not self._shares.spoilt(self._number, stripe):
            raise WireError("several chunks came with a wrong checksum")


def _connect(address: str, token: str, timeout_s: float, tls: ssl.SSLContext | None) -> socket.socket:
    sock = socket.create_connection(parse_address(address), timeout=timeout_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            sock = tls.wrap_socket(sock)
        sock.sendall(greeting(token))
    except BaseException:
        sock.close()
        raise
    return sock


def _checked(buffers: Sequence[memoryview], manifest: Manifest) -> list[memoryview]:
    if len(buffers) != len(manifest.tensors):
        raise ValueError(f"{len(buffers)} buffers for the manifest's {len(manifest.tensors)} tensors")
    for buffer, spec in zip(buffers, manifest.tensors, strict=True):
        if buffer.nbytes != spec.bytes:
            raise ValueError(f"{spec.name}: {buffer.nbytes} bytes here, {spec.bytes} bytes at the source")
        if buffer.readonly and buffer.nbytes:
            raise ValueError(f"{spec.name}: its buffer cannot be written")
    return [buffer.cast("B") if buffer.nbytes else memoryview(b"") for buffer in buffers]


def _refusal(reply: dict[str, Any]) -> str:
    return str(reply.get("refused", "answered neither yes nor no"))[:MAX_REFUSAL_BYTES]


def _reason(error: BaseException) -> str:
    if isinstance(error, (TimeoutError, BlockingIOError)):
        return "sent nothing for too long"
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return "closed the connection"
    return str(error) or type(error).__name__

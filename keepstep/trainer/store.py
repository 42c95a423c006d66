"""The store of a generation, as torch sees it: a `dist.Store` over an authenticated connection to an agent.

Which agent, this node's own or another's, is the dialler's affair. One client per generation and connection, so that cutting it (a newer generation came) frees
whoever waits in it. It knows nothing of generations: the caller prefixes the keys.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from keepstep.errors import KeepstepError, ProtectionError
from keepstep.wire import codec, framing
from keepstep.wire.messages import StoreReply, StoreRequest

DEFAULT_TIMEOUT_S = 60.0


class StoreCut(ProtectionError):  # noqa: N818 - reads better at the call sites
    """The store was cut on purpose, or its agent is gone."""


class AgentStore(dist.Store):
    """Keys and values held by an agent. Raises StoreCut once `cut()` or broken, TimeoutError when late.

    Nothing is connected before `connect`, so that whoever may have to cut it can know it first.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix
        self._timeout_s = DEFAULT_TIMEOUT_S
        self._requests = itertools.count(1)
        self._lock = threading.Lock()
        self._cut = False
        self._shown = threading.Lock()  # guards which socket a cut shuts down
        self._socket: socket.socket | None = None

    def connect(self, dial: Callable[[Callable[[socket.socket], None]], socket.socket]) -> None:
        """Connect by `dial`, which tells of its socket before it blocks. Raises StoreCut."""
        with self._lock:
            try:
                dial(self._own)
            except (OSError, KeepstepError) as error:
                self._cut = True
                raise StoreCut(f"the generation's store cannot be reached: {error}") from error

    def _own(self, sock: socket.socket) -> None:
        with self._shown:
            if self._cut:
                raise StoreCut("the store of this generation is cut")
            self._socket = sock

    def cut(self) -> None:
        """Free everybody who waits in this store, or for its connection; it never works again."""
        with self._shown:
            self._cut = True
            if self._socket is not None:
                try:
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # below TLS, from any thread
                except OSError:
                    pass

    def close(self) -> None:
        """Cut the connection and give back its descriptor."""
        self.cut()
        with self._lock:
            if self._socket is not None:
                self._socket.close()

    def _ask(
        self,
        op: str,
        keys: Sequence[str],
        *,
        value: bytes = b"",
        expected: bytes = b"",
        amount: int = 0,
        timeout_s: float | None = None,
    ) -> StoreReply:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        request = StoreRequest(
            request=next(self._requests),
            op=op,  # type: ignore[arg-type]
            keys=tuple(self._prefix + key for key in keys),
            value=value,
            expected=expected,
            amount=amount,
            timeout_s=limit_s,
        )
        with self._lock:
            if self._cut or self._socket is None:
                raise StoreCut("the store of this generation is cut")
            try:
                self._socket.settimeout(limit_s + 10.0)
                framing.send_frame(self._socket, codec.encode(request))
                frame = framing.recv_frame(self._socket)
            except OSError as error:
                self._cut = True
                raise StoreCut(f"the store's connection broke: {error}") from error
            if frame is None:
                self._cut = True
                raise StoreCut("the store's connection was closed")
            reply = codec.decode(frame)
        if not isinstance(reply, StoreReply) or reply.request != request.request:
            raise StoreCut(f"the store answered out of turn: {type(reply).__name__}")
        if not reply.ok:
            if reply.detail == "timeout":
                raise TimeoutError(f"{op} {', '.join(keys)}: not there after {limit_s:.1f} s")
            raise StoreCut(f"{op} {', '.join(keys)}: {reply.detail}")
        return reply

    # ---- the names that torch calls -------------------------------------------------------------

    def set(self, key: str, value: bytes | str) -> None:
        self._ask("set", [key], value=value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._ask("get", [key]).values[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", keys, timeout_s=None if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys).number)

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", [key], amount=amount).number

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        old = expected.encode() if isinstance(expected, str) else bytes(expected)
        new = desired.encode() if isinstance(desired, str) else bytes(desired)
        return self._ask("compare_set", [key], value=new, expected=old).values[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]).number)

    def num_keys(self) -> int:
        return self._ask("num_keys", []).number

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def get_within(self, key: str, timeout_s: float) -> bytes:
        """The value of `key`, waited for at most `timeout_s` seconds (TimeoutError)."""
        return self._ask("get", [key], timeout_s=timeout_s).values[0]

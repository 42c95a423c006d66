"""The store of a generation, as torch sees it: a `dist.Store` over the agent's authenticated socket.

One client per generation and connection, so that cutting it (a newer generation came) frees
whoever waits in it. It knows nothing of generations: the caller prefixes the keys.
"""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from keepstep.errors import ProtectionError
from keepstep.wire import codec, framing
from keepstep.wire.messages import Hello, StoreReply, StoreRequest

DEFAULT_TIMEOUT_S = 60.0


class StoreCut(ProtectionError):  # noqa: N818 - reads better at the call sites
    """The store was cut on purpose, or its agent is gone."""


class AgentStore(dist.Store):
    """Keys and values held by an agent. Raises StoreCut once `cut()` or broken, TimeoutError when late."""

    def __init__(self, path: str, hello: Hello, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix
        self._timeout_s = DEFAULT_TIMEOUT_S
        self._requests = itertools.count(1)
        self._lock = threading.Lock()
        self._cut = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(10.0)
        try:
            self._socket.connect(path)
            framing.send_frame(self._socket, codec.encode(hello))
        except OSError as error:
            raise StoreCut(f"the agent's store at {path} cannot be reached: {error}") from error

    def cut(self) -> None:
        """Free everybody who waits in this store; it never works again."""
        self._cut = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Cut the connection and give back its descriptor."""
        self.cut()
        with self._lock:
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
            if self._cut:
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

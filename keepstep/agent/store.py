"""A generation's store: keys and values in memory, served to workers that connect their groups.

The semantics are those of torch's Store, without its listener. It does not know sockets: an answer
is a call, given at once or when the keys have come.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from keepstep.wire.messages import StoreReply, StoreRequest

MAX_VALUE_BYTES = 16 << 20
MAX_STORE_BYTES = 512 << 20
MAX_KEYS = 100_000
MAX_KEY_CHARS = 4096
MAX_WAITS = 10_000
MAX_TIMEOUT_S = 3600.0

Answer = Callable[[StoreReply], None]

_GENERATION = re.compile(r"g(\d{1,18})/")


class _RefusedError(Exception):
    """The request cannot be served; the message goes back to the worker."""


@dataclass(eq=False, slots=True)
class _Wait:
    """A blocked `get` or `wait`, until `missing` is empty."""

    request: StoreRequest
    answer: Answer
    missing: set[str]
    timer: asyncio.TimerHandle | None = field(default=None)


class GenerationStore:
    """One node's store. Keys start with `g<generation>/`; those of past generations are dropped."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._oldest = 0
        self._waits: dict[str, set[_Wait]] = {}
        self._wait_count = 0

    def announce(self, generation: int) -> None:
        """Keep this generation and the one before it; whoever still waits in an older one is told."""
        self._oldest = max(self._oldest, generation - 1)
        for key in [key for key in self._values if self._is_past(key)]:
            self._drop(key)
        for wait in {wait for key, waits in self._waits.items() if self._is_past(key) for wait in waits}:
            self._give_up(wait, "this generation is over")

    def serve(self, request: StoreRequest, answer: Answer) -> Callable[[], None] | None:
        """Answer at once, or later: then the returned call gives the wait up (its connection closed)."""
        try:
            self._check(request)
            reply = self._blocking(request, answer) if request.op in ("get", "wait") else self._do(request)
        except _RefusedError as refused:
            reply = StoreReply(request=request.request, ok=False, detail=str(refused))
        if isinstance(reply, _Wait):
            wait = reply
            return lambda: self._forget(wait)
        answer(reply)
        return None

    def _check(self, request: StoreRequest) -> None:
        one_key = request.op in ("set", "add", "compare_set")
        if one_key and len(request.keys) != 1:
            raise _RefusedError(f"{request.op} takes one key, not {len(request.keys)}")
        if not request.keys and request.op != "num_keys":
            raise _RefusedError(f"{request.op} needs a key")
        if len(request.value) > MAX_VALUE_BYTES:
            raise _RefusedError(f"value of {len(request.value)} bytes is larger than {MAX_VALUE_BYTES}")
        for key in request.keys:
            if not key or len(key) > MAX_KEY_CHARS:
                raise _RefusedError(f"a key has 1 to {MAX_KEY_CHARS} characters, not {len(key)}")
            if self._is_past(key) and request.op not in ("delete", "num_keys"):
                raise _RefusedError("this generation is over")

    def _do(self, request: StoreRequest) -> StoreReply:
        number = 0
        values: tuple[bytes, ...] = ()
        key = request.keys[0] if request.keys else ""
        match request.op:
            case "set":
                self._set(key, request.value)
            case "check":
                number = int(all(key in self._values for key in request.keys))
            case "add":
                number = self._add(key, request.amount)
            case "compare_set":
                values = (self._compare_set(key, request.expected, request.value),)
            case "delete":
                number = sum(self._drop(key) for key in request.keys)
            case "num_keys":
                number = sum(existing.startswith(key) for existing in self._values)
        return StoreReply(request=request.request, ok=True, number=number, values=values)

    def _blocking(self, request: StoreRequest, answer: Answer) -> StoreReply | _Wait:
        missing = {key for key in request.keys if key not in self._values}
        if not missing:
            return self._found(request)
        if request.timeout_s <= 0:
            raise _RefusedError("timeout")
        if self._wait_count >= MAX_WAITS:
            raise _RefusedError(f"more than {MAX_WAITS} workers' requests are waiting")
        wait = _Wait(request, answer, missing)
        wait.timer = asyncio.get_running_loop().call_later(
            min(request.timeout_s, MAX_TIMEOUT_S), self._give_up, wait, "timeout"
        )
        self._wait_count += 1
        for key in missing:
            self._waits.setdefault(key, set()).add(wait)
        return wait

    def _set(self, key: str, value: bytes) -> None:
        old = self._values.get(key)
        if old is None and len(self._values) >= MAX_KEYS:
            raise _RefusedError(f"the store holds {MAX_KEYS} keys, its limit")
        grown = self._bytes + len(value) - len(old or b"")
        if grown > MAX_STORE_BYTES:
            raise _RefusedError(f"the store would hold more than {MAX_STORE_BYTES} bytes")
        self._values[key] = value
        self._bytes = grown
        for wait in list(self._waits.get(key, ())):
            wait.missing.discard(key)
            self._unlink(wait, key)
            if not wait.missing:
                self._forget(wait)
                wait.answer(self._found(wait.request))

    def _add(self, key: str, amount: int) -> int:
        text = self._values.get(key, b"0")
        try:
            number = int(text) + amount
        except ValueError:
            raise _RefusedError(f"{key} holds {len(text)} bytes that are no number") from None
        if not -(1 << 63) <= number < 1 << 63:
            raise _RefusedError(f"{key} would leave the range of 64 bits")
        self._set(key, str(number).encode())
        return number

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """As torch's Store: a missing key is set when nothing is expected, else `expected` comes back."""
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._set(key, desired)
            return desired
        return expected if current is None else current

    def _drop(self, key: str) -> bool:
        value = self._values.pop(key, None)
        self._bytes -= len(value or b"")
        return value is not None

    def _is_past(self, key: str) -> bool:
        found = _GENERATION.match(key)
        return found is not None and int(found[1]) < self._oldest

    def _found(self, request: StoreRequest) -> StoreReply:
        values = tuple(self._values.get(key, b"") for key in request.keys) if request.op == "get" else ()
        return StoreReply(request=request.request, ok=True, values=values)

    def _give_up(self, wait: _Wait, detail: str) -> None:
        self._forget(wait)
        wait.answer(StoreReply(request=wait.request.request, ok=False, detail=detail))

    def _forget(self, wait: _Wait) -> None:
        if wait.timer is None:
            return
        wait.timer.cancel()
        wait.timer = None
        self._wait_count -= 1
        for key in list(wait.missing):
            self._unlink(wait, key)

    def _unlink(self, wait: _Wait, key: str) -> None:
        waits = self._waits.get(key)
        if waits is not None:
            waits.discard(wait)
            if not waits:
                del self._waits[key]

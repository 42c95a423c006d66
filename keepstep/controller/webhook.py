"""Tells a URL of each incident, when it opens and when it is over. It never holds a decision up.

Messages wait in a bounded queue and are tried again, with growing and random pauses, until they are too old. Each is
signed, so that the receiver knows who sent it and when. A failure is said once, until messages arrive again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from keepstep import __version__

MAX_WAITING = 100
MAX_AGE_S = 900.0
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 60.0
REQUEST_TIMEOUT_S = 10.0
CLOSING_S = 5.0
MAX_TEXT = 2000

SIGNATURE = "Keepstep-Signature"
TIMESTAMP = "Keepstep-Timestamp"
DELIVERY = "Keepstep-Delivery"

# What one delivery keeps of an incident; evidence stays in the ledger and in the bundle.
FIELDS = (
    *("number", "state", "cause", "reason", "victims", "time_s", "generations", "replacements", "resolution"),
    *("verdict", "total_s", "phases_s", "steps_lost", "steps_recomputed", "transfer_bytes", "bit_exact"),
    *("would", "blame"),
)


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """What the header holds: HMAC-SHA256, in hex, over the timestamp, a dot and the body."""
    digest = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    return f"sha256={digest}"


@dataclass(slots=True)
class _Message:
    body: bytes
    queued_s: float
    tries: int = 0
    number: str = field(default_factory=lambda: uuid.uuid4().hex)


class Webhook:
    """Deliver to `url`. `start` it in the controller's loop; `tell` may be called from then on."""

    def __init__(
        self,
        url: str,
        secret: str | None,
        job: str,
        say: Callable[[str, str], None],
        *,
        first_pause_s: float = FIRST_PAUSE_S,
        max_age_s: float = MAX_AGE_S,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._url, self._secret, self._job, self._say = url, secret, job, say
        self._first_pause_s = first_pause_s
        self._max_age_s = max_age_s
        self._request_timeout_s = request_timeout_s
        self._waiting: deque[_Message] = deque()
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._said_failing = False
        self.counts = {"delivered": 0, "retried": 0, "dropped": 0}

    def start(self) -> None:
        """Begin to deliver what waits and what comes."""
        self._task = asyncio.create_task(self._deliver_all(), name="webhook")

    def tell(self, event: str, incident: Mapping[str, Any]) -> None:
        """Queue one message and return at once. `event`: "incident.opened" or "incident.closed"."""
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()  # the newest news counts
            self._drop("too many messages wait for it")
        self._waiting.append(_Message(self._body(event, incident), time.monotonic()))
        self._more.set()

    def numbers(self) -> dict[str, int]:
        """For the metrics: how deliveries ended, and how many wait."""
        return {**self.counts, "waiting": len(self._waiting)}

    async def close(self, timeout_s: float = CLOSING_S) -> None:
        """The job ends: what still waits gets `timeout_s`."""
        if self._task is None:
            return
        deadline_s = time.monotonic() + timeout_s
        while self._waiting and time.monotonic() < deadline_s and not self._task.done():
            await asyncio.sleep(0.02)
        for _ in self._waiting:
            self._drop("the job has ended")
        self._waiting.clear()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    def _body(self, event: str, incident: Mapping[str, Any]) -> bytes:
        told = {name: incident[name] for name in FIELDS if name in incident}
        message = {"event": event, "job": self._job, "sent_by": f"keepstep {__version__}", "incident": told}
        text = json.dumps(_bounded(message), sort_keys=True, default=str)
        return text.encode()

    async def _deliver_all(self) -> None:
        # Redirects are not followed: a signed message goes where the user said, or nowhere.
        async with httpx.AsyncClient(
            timeout=self._request_timeout_s, follow_redirects=False, trust_env=False
        ) as client:
            while True:
                while not self._waiting:
                    self._more.clear()
                    await self._more.wait()
                await self._deliver(client, self._waiting[0])

    async def _deliver(self, client: httpx.AsyncClient, message: _Message) -> None:
        problem = await self._post(client, message)
        if problem is None:
            self.counts["delivered"] += 1
            if self._said_failing:
                self._said_failing = False
                self._say("the webhook takes messages again", "info")
            self._done(message)
            return
        if not self._said_failing:
            self._said_failing = True
            self._say(f"the webhook cannot be told of an incident ({problem}); it is tried again", "warning")
        message.tries += 1
        longest_s = min(LAST_PAUSE_S, self._first_pause_s * 2 ** min(message.tries - 1, 10))
        pause_s = longest_s * random.uniform(0.5, 1.0)
        if time.monotonic() + pause_s - message.queued_s > self._max_age_s:
            self._drop(problem)
            self._done(message)
            return
        self.counts["retried"] += 1
        await asyncio.sleep(pause_s)

    async def _post(self, client: httpx.AsyncClient, message: _Message) -> str | None:
        """None when it was taken, else why not."""
        timestamp = str(int(time.time()))
        headers = {"Content-Type": "application/json", TIMESTAMP: timestamp, DELIVERY: message.number}
        if self._secret is not None:
            headers[SIGNATURE] = signature(self._secret, timestamp, message.body)
        try:
            # Streamed: of the answer only the status counts, whatever its length.
            async with asyncio.timeout(self._request_timeout_s):
                async with client.stream("POST", self._url, content=message.body, headers=headers) as answer:
                    code = answer.status_code
        except (httpx.HTTPError, OSError, TimeoutError, ValueError) as error:
            return f"{type(error).__name__}: {str(error)[:200]}".removesuffix(": ")
        return None if 200 <= code < 300 else f"it answered {code}"

    def _done(self, message: _Message) -> None:
        if self._waiting and self._waiting[0] is message:
            self._waiting.popleft()

    def _drop(self, why: str) -> None:
        self.counts["dropped"] += 1
        if self.counts["dropped"] == 1:
            self._say(f"a message to the webhook is given up: {why}", "warning")


def _bounded(value: Any) -> Any:
    """The same with long texts and long lists cut: the ledger has them whole."""
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else value[:MAX_TEXT] + "..."
    if isinstance(value, Mapping):
        return {str(key): _bounded(item) for key, item in list(value.items())[:MAX_WAITING]}
    if isinstance(value, list | tuple):
        return [_bounded(item) for item in value[:MAX_WAITING]]
    return value

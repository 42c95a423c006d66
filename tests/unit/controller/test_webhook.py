"""The webhook against a real HTTP server that fails, hangs, redirects and recovers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from keepstep.controller.incidents import IncidentBook
from keepstep.controller.webhook import MAX_WAITING, Webhook

SECRET = "a secret of the receiver"


class Receiver:
    """`answers`: what each request gets, in order, the last one for ever: a status, or "hang"."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.answers: list[int | str] = [204]
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.released = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.seen.append((self.path, dict(self.headers.items()), body))
                answer = receiver.answers.pop(0) if len(receiver.answers) > 1 else receiver.answers[0]
                if answer == "hang":
                    receiver.released.wait(20)
                    return
                self.send_response(int(answer))
                if answer == 302:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_address[1]}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver()
    yield one
    one.close()


def incident(number: int = 1, **more: Any) -> dict[str, Any]:
    return {"number": number, "cause": "death", "reason": "rank 1 died", "evidence": {"1": "secret"}, **more}


class Story:
    """One webhook in a loop of its own, and what it said."""

    def __init__(self, url: str, secret: str | None = SECRET, **limits: float) -> None:
        self.said: list[str] = []
        limits = {"first_pause_s": 0.02, "request_timeout_s": 0.5, **limits}
        self.hook = Webhook(url, secret, "job-1", lambda text, level: self.said.append(text), **limits)

    async def until(self, found: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not found():
                await asyncio.sleep(0.01)


def test_begin_and_end_of_an_incident_arrive_signed(receiver: Receiver) -> None:
    async def run() -> None:
        story = Story(receiver.url)
        book = IncidentBook()
        book.on_change = story.hook.tell
        story.hook.start()
        book.add("incident", incident(), 1.0)
        book.add("incident_phase", incident(generations=[1]), 2.0)
        book.add("incident_closed", incident(resolution="rebuilt", total_s=0.2), 3.0)
        await story.until(lambda: len(receiver.seen) == 2)
        await story.hook.close()
        assert story.hook.numbers() == {"delivered": 2, "retried": 0, "dropped": 0, "waiting": 0}
        assert story.said == []

    asyncio.run(run())
    bodies = [json.loads(body) for _, _, body in receiver.seen]
    assert [body["event"] for body in bodies] == ["incident.opened", "incident.closed"]
    assert bodies[1]["incident"]["state"] == "closed" and bodies[1]["incident"]["resolution"] == "rebuilt"
    assert all(body["job"] == "job-1" and "evidence" not in body["incident"] for body in bodies)
    for _, headers, body in receiver.seen:  # as docs/metrics.md tells a receiver to check it
        signed = headers["Keepstep-Timestamp"].encode() + b"." + body
        expected = hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()
        assert headers["Keepstep-Signature"] == f"sha256={expected}"
        assert abs(time.time() - int(headers["Keepstep-Timestamp"])) < 300
        assert headers["Content-Type"] == "application/json"
    assert len({headers["Keepstep-Delivery"] for _, headers, _ in receiver.seen}) == 2


def test_a_receiver_that_fails_and_hangs_is_tried_again_and_said_once(receiver: Receiver) -> None:
    receiver.answers = [500, "hang", 503, 200]

    async def run() -> None:
        story = Story(receiver.url)
        story.hook.start()
        began_s = time.monotonic()
        story.hook.tell("incident.opened", incident(1))
        story.hook.tell("incident.closed", incident(1))
        assert time.monotonic() - began_s < 0.2, "the decision does not wait for the receiver"
        await story.until(lambda: story.hook.counts["delivered"] == 2)
        await story.hook.close()
        assert story.hook.counts["retried"] == 3
        assert len(story.said) == 2 and "it answered 500" in story.said[0] and "again" in story.said[1]

    asyncio.run(run())
    numbers = [headers["Keepstep-Delivery"] for _, headers, _ in receiver.seen]
    assert len(set(numbers[:4])) == 1, "a repetition is recognised by its number"


def test_redirects_are_not_followed_and_an_old_message_is_given_up(receiver: Receiver) -> None:
    receiver.answers = [302]

    async def run() -> None:
        story = Story(receiver.url, secret=None, max_age_s=0.3)
        story.hook.start()
        story.hook.tell("incident.opened", incident())
        await story.until(lambda: story.hook.counts["dropped"] == 1)
        await story.hook.close()
        assert "it answered 302" in story.said[0] and "given up" in story.said[1]

    asyncio.run(run())
    assert {path for path, _, _ in receiver.seen} == {"/hook"}
    assert all("Keepstep-Signature" not in headers for _, headers, _ in receiver.seen)


def test_a_receiver_that_is_not_there_costs_a_bounded_queue_and_a_bounded_farewell() -> None:
    async def run() -> None:
        story = Story("http://127.0.0.1:9/nobody", first_pause_s=5.0)
        story.hook.start()
        for number in range(MAX_WAITING + 50):
            story.hook.tell("incident.opened", incident(number, reason="x" * 10_000))
        assert story.hook.numbers()["waiting"] == MAX_WAITING
        await story.until(lambda: bool(story.said))
        began_s = time.monotonic()
        await story.hook.close(timeout_s=0.2)
        assert time.monotonic() - began_s < 5.0
        assert story.hook.numbers()["waiting"] == 0 and story.hook.counts["dropped"] == MAX_WAITING + 50
        assert len(story.said) == 2, "each failure is said once"

    asyncio.run(run())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_https_without_a_trusted_certificate_gets_nothing(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:prime256v1",
                "-nodes",
            ),
            *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    receiver = Receiver(context)

    async def run() -> None:
        story = Story(receiver.url)
        story.hook.start()
        story.hook.tell("incident.opened", incident())
        await story.until(lambda: bool(story.said))
        await story.hook.close(timeout_s=0.1)
        assert story.hook.counts["delivered"] == 0 and "certificate verify failed" in story.said[0].lower()

    try:
        asyncio.run(run())
        assert receiver.seen == []
    finally:
        receiver.close()

"""The agent's metrics listener: a token or loopback, GET only, and nobody holds it up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from keepstep.agent import metrics_listener
from keepstep.agent.metrics_listener import MetricsAddress, MetricsListener
from keepstep.errors import UsageError
from keepstep.wire.tokens import read_token

TOKEN = "the job's own token, long enough"


async def ask(port: int, request: str, token: str | None = TOKEN) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    shown = "" if token is None else f"Authorization: Bearer {token}\r\n"
    writer.write(f"{request} HTTP/1.1\r\nHost: x\r\n{shown}\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer.decode()


def with_listener(story: Callable[[int], Awaitable[None]], *, open_to_all: bool = False) -> None:
    async def run() -> None:
        address = MetricsAddress(port=0, open=open_to_all)
        listener = MetricsListener(address, TOKEN, lambda: b"keepstep_x 1\n", "text/plain; version=0.0.4")
        running = asyncio.create_task(listener.run())
        async with asyncio.timeout(20):
            while not listener.url:
                await asyncio.sleep(0.01)
            await story(int(listener.url.rsplit(":", 1)[1].partition("/")[0]))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(run())


def test_only_a_token_of_the_job_opens_it_and_only_metrics_are_there() -> None:
    async def story(port: int) -> None:
        for token in (TOKEN, read_token(TOKEN)):
            answer = await ask(port, "GET /metrics", token)
            assert answer.startswith("HTTP/1.1 200") and answer.endswith("keepstep_x 1\n")
        for token in (None, "", "wrong", TOKEN[:-1]):
            assert (await ask(port, "GET /metrics", token)).startswith("HTTP/1.1 401")
        assert (await ask(port, "GET /")).startswith("HTTP/1.1 404")
        assert (await ask(port, "POST /metrics")).startswith("HTTP/1.1 405")
        assert "keepstep_x" not in await ask(port, "HEAD /metrics")
        assert (await ask(port, "GET / /metrics")).startswith("HTTP/1.1 400")

    with_listener(story)


def test_processes_of_this_machine_need_no_token_when_it_is_open() -> None:
    async def story(port: int) -> None:
        assert (await ask(port, "GET /metrics", None)).startswith("HTTP/1.1 200")

    with_listener(story, open_to_all=True)


def test_those_who_ask_slowly_or_too_much_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_listener, "REQUEST_TIMEOUT_S", 0.5)

    async def story(port: int) -> None:
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        assert (await ask(port, "GET /metrics")).startswith("HTTP/1.1 200")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 200_000)
        try:
            assert await asyncio.wait_for(reader.read(), 10) == b""
        except ConnectionResetError:
            pass
        for reader, writer in slow:
            assert await asyncio.wait_for(reader.read(), 10) == b"", "closed at the deadline"
            writer.close()

    with_listener(story)


def test_a_port_in_use_is_one_line() -> None:
    async def story(port: int) -> None:
        second = MetricsListener(MetricsAddress(port=port), TOKEN, lambda: b"", "text/plain")
        with pytest.raises(UsageError, match=f"--metrics-port {port} on 127.0.0.1 is in use"):
            await second.run()

    with_listener(story)

"""The controller's API: only with the token, only on its own address, and gone when the job has ended."""

from __future__ import annotations

import asyncio
import http.client
import json
from pathlib import Path

import pytest

from keepstep.controller.server import bind
from keepstep.core import actions as act
from keepstep.core import events as evt
from keepstep.errors import UsageError
from keepstep.wire.codec import encode
from tests.unit.controller.scripted import (
    END,
    TOKEN,
    Job,
    ScriptedMachine,
    agent,
    play,
    until,
)


def test_the_api_answers_with_the_token_only(tmp_path: Path) -> None:
    machine = ScriptedMachine(
        {
            evt.WorkerParked: (act.Persist(kind="incident", body={"number": 1, "reason": "why"}),),
            evt.StopRequested: END,
        }
    )

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        for path in ("/api/status", "/api/incidents", "/api/incidents/1", "/api/stop", "/", "/nonsense"):
            for token in (None, "guess", TOKEN + "x", TOKEN[:-1], "é"):
                status, body = await job.request("GET", path, token and token.encode().decode("latin-1"))
                assert status == 401 and TOKEN not in json.dumps(body)
        assert (await job.request("POST", "/api/stop", "guess"))[0] == 401
        async with agent(job) as socket:
            await socket.send(encode(evt.WorkerParked(worker=1, readiness="warm")))
            await until(lambda: job.controller.incidents.count() == 1)
        status, body = await job.request("GET", "/api/status")
        assert status == 200 and body["job"] == "j" and body["incident"]["reason"] == "why"
        status, body = await job.request("GET", "/api/incidents")
        assert status == 200 and [one["number"] for one in body["incidents"]] == [1]
        assert (await job.request("GET", "/api/incidents/1"))[1]["reason"] == "why"
        assert await job.request("GET", "/api/incidents/2") == (404, {"error": "there is no incident 2"})
        assert (await job.request("GET", "/nonsense"))[0] == 404
        assert (await job.request("GET", "/api/stop"))[0] == 405
        for wrong in (b"{", b"[]", b'{"hard": 1}', b'{"soft": true}', b"[" * 50_000):
            assert (await job.request("POST", "/api/stop", body=wrong))[0] == 400
        assert (await job.request("POST", "/api/stop", body=bytes(100_000)))[0] == 413
        assert not any(isinstance(event, evt.StopRequested) for event in machine.told)
        assert await job.request("POST", "/api/stop", body=b'{"hard": true}') == (
            202,
            {"stopping": True, "hard": True},
        )

    play(tmp_path, machine, story)
    assert machine.told[-1] == evt.StopRequested(signal="API", hard=True)


def test_a_port_in_use_is_one_clear_line() -> None:
    taken = bind("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with pytest.raises(UsageError, match=f"port {port} on 127.0.0.1 is in use") as caught:
        bind("127.0.0.1", port)
    assert "\n" not in str(caught.value)
    taken.close()


def test_the_listener_is_on_the_loopback_and_gone_after_stop(tmp_path: Path) -> None:
    machine = ScriptedMachine({evt.StopRequested: END})
    urls: list[str] = []

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        urls.append(job.server.url)
        assert job.server._sock.getsockname()[0] == "127.0.0.1"
        job.controller.request_stop("SIGINT")

    play(tmp_path, machine, story)
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(urls[0].removeprefix("http://"), timeout=5).connect()

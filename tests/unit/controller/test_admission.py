"""Who the controller takes as an agent, what it believes, and what the reader's token may do."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from keepstep.controller.rundir import RunDirectory
from keepstep.core import actions as act
from keepstep.core import events as evt
from keepstep.core.types import Generation
from keepstep.wire.codec import encode
from keepstep.wire.messages import AgentHello
from keepstep.wire.tokens import read_token
from tests.unit.controller.scripted import END, HELLO, TOKEN, Job, ScriptedMachine, agent, play, until

BEGIN = (
    act.StartWorker(worker=4, node="n", slot=0, reason="first"),
    act.Announce(generation=Generation(number=0, ranks=(4, 5), fresh=True), reason="begin"),
)


def machine() -> ScriptedMachine:
    return ScriptedMachine({evt.StopRequested: END, evt.AgentJoined: BEGIN})


async def refusal(job: Job, hello: AgentHello) -> tuple[int, str]:
    """How an agent with this hello is turned away."""
    async with connect(job.websocket_url, proxy=None) as sock:
        await sock.send(encode(hello))
        with pytest.raises(ConnectionClosed) as closed:
            await sock.recv(decode=False)
        assert closed.value.rcvd is not None
        return closed.value.rcvd.code, closed.value.rcvd.reason


async def drain(sock: ClientConnection) -> None:
    """Read on until the connection ends."""
    while True:
        await sock.recv(decode=False)


def tell(tmp_path: Path, story: Any) -> Job:
    async def whole(job: Job, running: asyncio.Task[int]) -> None:
        await story(job)
        job.controller.request_stop("SIGTERM")

    job, _ = play(tmp_path, machine(), whole)
    return job


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        found.listen()
        yield found


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"node": "../etc"}, "a node's name is"),
        ({"node": ""}, "a node's name is"),
        ({"node": "n" * 65}, "a node's name is"),
        ({"slots": 0}, "a node offers 1 to"),
        ({"slots": 1 << 40}, "a node offers 1 to"),
        ({"labels": {"rack": "r" * 1000}}, "a node has at most"),
        ({"workers": (-1,)}, "workers have numbers"),
        ({"peer": "no-port"}, "not HOST:PORT"),
        ({"token": read_token(TOKEN)}, "this token may only read"),
    ],
)
def test_what_an_agent_says_of_itself_is_checked(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    async def story(job: Job) -> None:
        code, reason = await refusal(job, replace(HELLO, **changed))
        assert 4400 <= code < 4500 and said in reason

    told = tell(tmp_path, story).machine.told
    assert not any(isinstance(event, evt.AgentJoined) for event in told)


def test_an_agent_that_others_could_not_reach_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        peer = f"127.0.0.1:{closed.getsockname()[1]}"  # nobody listens there

        async def story(job: Job) -> None:
            code, reason = await refusal(job, replace(HELLO, peer=peer))
            assert code == 4404 and peer in reason and "--advertise" in reason

        job = tell(tmp_path, story)
    (line,) = [text for text, _ in job.said if "refused" in text]
    assert peer in line and "its connection comes from 127.0.0.1" in line and "--advertise" in line


def test_an_agent_that_can_be_reached_is_taken(tmp_path: Path, listener: socket.socket) -> None:
    async def story(job: Job) -> None:
        async with agent(job, replace(HELLO, peer=f"127.0.0.1:{listener.getsockname()[1]}")):
            pass

    assert any(isinstance(event, evt.AgentJoined) for event in tell(tmp_path, story).machine.told)


def test_a_name_belongs_to_one_agent_at_a_time(tmp_path: Path) -> None:
    async def story(job: Job) -> None:
        async with agent(job):
            code, reason = await refusal(job, replace(HELLO, pid=os.getpid()))
            assert code == 4410 and "give this one --node" in reason
        async with agent(job, replace(HELLO, pid=os.getpid())):
            pass  # the first one has left

    tell(tmp_path, story)


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        (evt.WorkerExited(worker=7, status=0), "worker 7 lives on m, and n speaks for it"),
        (evt.ProbeAnswered(node="m", by="m", outcome="silent"), "n speaks for m"),
        (evt.NodeProgressed(node="m", generation=0, published=1, steps={}), "n speaks for m"),
        (evt.Complained(worker=4, generation=3, reason=""), "generation 3 was never announced"),
        (
            evt.FingerprintTaken(worker=4, rank=2, step=1, shard="", digest=""),
            "there is no rank 2 in a world of 2",
        ),
        (evt.WorkerExited(worker=4, status=0, step=-3), "step cannot be -3"),
    ],
)
def test_an_agent_that_lies_is_cut_off_and_the_lie_is_said(tmp_path: Path, lie: evt.Event, said: str) -> None:
    async def story(job: Job) -> None:
        async with agent(job, replace(HELLO, node="m", workers=(7,))), agent(job) as liar:
            await until(lambda: len(job.machine.told) == 2)
            await liar.send(encode(lie))
            with pytest.raises(ConnectionClosed) as closed:
                await drain(liar)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4400

    job = tell(tmp_path, story)
    assert any(said in text for text, level in job.said if level == "error")
    assert not any(type(event) is type(lie) for event in job.machine.told)


def test_an_agent_cannot_claim_the_workers_of_another(tmp_path: Path) -> None:
    async def story(job: Job) -> None:
        async with agent(job, replace(HELLO, node="m", workers=(7,))):
            _, reason = await refusal(job, replace(HELLO, workers=(7,)))
            assert "worker 7 lives on m" in reason

    tell(tmp_path, story)


def test_the_readers_token_reads_and_nothing_else(tmp_path: Path) -> None:
    reader = read_token(TOKEN)

    async def story(job: Job) -> None:
        for path in ("/api/status", "/api/incidents"):
            status, _ = await job.request("GET", path, token=reader)
            assert status == 200
        status, body = await job.request("POST", "/api/stop", token=reader)
        assert status == 403 and "may only read" in body["error"]
        assert not any(isinstance(event, evt.StopRequested) for event in job.machine.told)

    tell(tmp_path, story)


def test_both_tokens_lie_in_the_run_directory_for_their_owner_only(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.make()
    run.publish_address("http://127.0.0.1:1", "j", TOKEN, read_token(TOKEN))
    for file, text in ((run.token_file, TOKEN), (run.read_token_file, read_token(TOKEN))):
        assert file.read_text() == text and file.stat().st_mode & 0o777 == 0o600
    assert read_token(TOKEN) != read_token(TOKEN + "x") and TOKEN not in read_token(TOKEN)
    run.withdraw_address()
    assert not run.token_file.exists() and not run.read_token_file.exists()

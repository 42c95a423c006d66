"""The controller's promises to its agents: order, patience and bounds; and that only friends get in."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from keepstep.controller import agents
from keepstep.controller.heartbeats import Heartbeats
from keepstep.core import actions as act
from keepstep.core import events as evt
from keepstep.core.types import Generation
from keepstep.wire.codec import encode
from keepstep.wire.messages import AgentHello, Heartbeat, Stop
from tests.unit.controller.scripted import (
    DEADLINE_S,
    END,
    HELLO,
    SPEC,
    TOKEN,
    Job,
    ScriptedMachine,
    agent,
    heard,
    play,
    until,
)


def test_actions_reach_the_agent_of_the_node_in_order_and_its_events_come_back(tmp_path: Path) -> None:
    generation = Generation(number=0, ranks=(4, 5), fresh=True)
    machine = ScriptedMachine(
        {
            evt.AgentJoined: (
                act.StartWorker(worker=4, node="n", slot=0, reason="first"),
                act.StandBy(worker=4, rehearse_rank=1),
                act.Announce(generation=generation, reason="begin"),
                act.KillWorker(worker=4, reason="fenced"),
                act.KillWorker(worker=99, reason="unknown to every node"),
                act.Release(workers=(4,)),
            ),
            evt.WorkerExited: END,
        }
    )

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        async with agent(job) as socket:
            got = [await heard(socket) for _ in range(5)]
            assert [type(one) for one in got] == [
                act.StartWorker,
                act.StandBy,
                act.Announce,
                act.KillWorker,
                act.Release,
            ]
            assert got[2].generation == generation
            await socket.send(encode(evt.WorkerExited(worker=4, status=-9, first_evidence_s=-1.5)))
            assert await heard(socket) == Stop(hard=False, exit_code=5, reason="over")

    play(tmp_path, machine, story)
    assert machine.told[0] == evt.AgentJoined(node="n", slots=3, workers=())
    exited = machine.told[1]
    assert isinstance(exited, evt.WorkerExited) and (exited.worker, exited.status) == (4, -9)
    assert exited.first_evidence_s is not None
    assert 1.5 <= time.monotonic() - exited.first_evidence_s < DEADLINE_S, (
        "an age, counted back from our clock"
    )


def test_a_returning_agent_gets_what_is_said_after_its_return_and_is_not_declared_lost(
    tmp_path: Path,
) -> None:
    # What was said before the machine knew of the return was meant for another agent, perhaps a dead one.
    machine = ScriptedMachine(
        {
            evt.WorkerParked: (act.StartWorker(worker=7, node="n", slot=1, reason="r"),),
            evt.AgentJoined: lambda event: [
                act.StartWorker(worker=8, node="n", slot=1, reason="r") for _ in event.workers
            ],
            evt.AgentLost: END,
            evt.StopRequested: END,
        }
    )

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        async with agent(job):
            pass
        await until(lambda: len(machine.told) == 2)
        await job.controller._events.put(evt.WorkerParked(worker=1, readiness="warm"))
        await until(lambda: len(machine.told) == 3)
        async with agent(job, AgentHello(**{**_fields(HELLO), "workers": (8,)})) as socket:
            assert (await heard(socket)).worker == 8
            job.controller.request_stop("SIGTERM")
            assert isinstance(await heard(socket), Stop)

    play(tmp_path, machine, story)
    assert [type(event) for event in machine.told[:4]] == [
        *(evt.AgentJoined, evt.AgentDisconnected, evt.WorkerParked, evt.AgentJoined)
    ]
    assert machine.told[3] == evt.AgentJoined(node="n", slots=3, workers=(8,))


def _fields(hello: AgentHello) -> dict[str, Any]:
    return {name: getattr(hello, name) for name in hello.__dataclass_fields__}


def test_an_agent_that_says_nothing_is_silent_until_it_speaks(tmp_path: Path) -> None:
    machine = ScriptedMachine({evt.AgentHeard: END})

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        async with agent(job) as socket:
            for _ in range(15):
                await asyncio.sleep(0.1)
                await socket.send(encode(Heartbeat(node="n", sent_ns=1)))
            assert not any(isinstance(event, evt.AgentSilent) for event in machine.told)
            await until(lambda: any(isinstance(event, evt.AgentSilent) for event in machine.told))
            await socket.send(encode(Heartbeat(node="n", sent_ns=2)))
            await running

    play(tmp_path, machine, story)
    silent = next(event for event in machine.told if isinstance(event, evt.AgentSilent))
    assert silent.node == "n" and silent.silent_s > 1.0


def test_a_controller_whose_loop_stood_still_calls_nobody_silent(tmp_path: Path) -> None:
    machine = ScriptedMachine({evt.StopRequested: END})

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        async with agent(job) as socket:
            await until(lambda: bool(machine.told))
            time.sleep(2.5)
            await socket.send(encode(Heartbeat(node="n", sent_ns=1)))
            await asyncio.sleep(0.3)
            job.controller.request_stop("SIGTERM")

    play(tmp_path, machine, story)
    assert not any(isinstance(event, evt.AgentSilent) for event in machine.told)


def test_agents_are_told_to_speak_less_often_when_there_are_many() -> None:
    told: list[Any] = []
    links = {f"n{number}": agents.AgentLink(f"n{number}") for number in range(1000)}
    beats = Heartbeats(links, SPEC, told.append, 1.0)
    first, last = links["n0"], links["n999"]
    first.heartbeat_s, first._tasks = 0.25, (object(),)  # type: ignore[assignment]
    assert beats.welcome(last).heartbeat_s == 0.5 == first.heartbeat_s
    assert first._waiting.get_nowait().heartbeat_s == 0.5
    assert beats.welcome(last).heartbeat_s == 0.5 and first._waiting.empty(), "told once"


def test_an_agent_that_takes_no_messages_is_lost_and_the_queue_stays_bounded(tmp_path: Path) -> None:
    flood = [act.StandBy(worker=4, rehearse_rank=1)] * (agents.MAX_WAITING_MESSAGES + 50)
    machine = ScriptedMachine(
        {
            evt.AgentJoined: (act.StartWorker(worker=4, node="n", slot=0, reason="r"),),
            evt.StateReceived: flood,
            evt.AgentLost: END,
        }
    )

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        async with agent(job):
            pass
        await until(lambda: not job.controller._links["n"].connected)
        await job.controller._events.put(
            evt.StateReceived(worker=4, generation=0, transfer_s=0.0, bytes=0, sources=())
        )
        await running

    play(tmp_path, machine, story)
    assert "takes no messages" in machine.told[-1].reason  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("first", "code", "said"),
    [
        (encode(AgentHello(**{**_fields(HELLO), "token": "guess"})), 4401, "token"),
        (encode(AgentHello(**{**_fields(HELLO), "token": ""})), 4401, "token"),
        (encode(AgentHello(**{**_fields(HELLO), "version": 99})), 4400, "protocol 99"),
        (encode(evt.WorkerParked(worker=1, readiness="warm")), 4400, "expected AgentHello"),
        (b"\x80\x04}.", 4400, "JSON"),
        (b"", 4400, "JSON"),
    ],
)
def test_a_stranger_is_turned_away_with_the_reason(
    tmp_path: Path, first: bytes, code: int, said: str
) -> None:
    machine = ScriptedMachine({evt.StopRequested: END})

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        async with connect(job.websocket_url, proxy=None) as socket:
            await socket.send(first)
            with pytest.raises(ConnectionClosed) as closed:
                await heard(socket)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == code
        assert said in closed.value.rcvd.reason and TOKEN not in closed.value.rcvd.reason
        job.controller.request_stop("SIGTERM")

    play(tmp_path, machine, story)
    assert [type(event) for event in machine.told] == [evt.StopRequested]


@pytest.mark.parametrize(
    "message",
    [
        encode(evt.StopRequested(signal="SIGTERM")),
        encode(evt.AgentLost(node="other", reason="")),
        encode(evt.PersistFailed(reason="")),
        encode(HELLO),
        b'{"type": "WorkerParked"}',
    ],
)
def test_an_agent_that_says_what_it_may_not_is_cut_off(tmp_path: Path, message: bytes) -> None:
    machine = ScriptedMachine({evt.StopRequested: END, evt.AgentLost: ()})

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        async with agent(job) as socket:
            await socket.send(message)
            with pytest.raises(ConnectionClosed) as closed:
                await heard(socket)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4400
        job.controller.request_stop("SIGINT")

    play(tmp_path, machine, story)
    assert [event.signal for event in machine.told if isinstance(event, evt.StopRequested)] == ["SIGINT"]


def test_a_message_beyond_the_size_limit_closes_the_connection(tmp_path: Path) -> None:
    machine = ScriptedMachine({evt.StopRequested: END})

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        async with agent(job) as socket:
            with contextlib.suppress(ConnectionClosed):
                await socket.send(bytes((16 << 20) + 1))
            with pytest.raises(ConnectionClosed):
                await heard(socket)
        job.controller.request_stop("SIGINT")

    play(tmp_path, machine, story)


def test_a_newer_connection_of_a_node_replaces_the_older_one(tmp_path: Path) -> None:
    machine = ScriptedMachine(
        {evt.WorkerParked: (act.StartWorker(worker=3, node="n", slot=0, reason="r"),), evt.StopRequested: END}
    )

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        async with agent(job) as old, agent(job) as new:
            with pytest.raises(ConnectionClosed):
                await heard(old)
            await new.send(encode(evt.WorkerParked(worker=1, readiness="warm")))
            assert (await heard(new)).worker == 3
            job.controller.request_stop("SIGINT")
            assert isinstance(await heard(new), Stop)

    play(tmp_path, machine, story)


def test_a_second_stop_while_agents_leave_is_a_hard_one(tmp_path: Path) -> None:
    machine = ScriptedMachine({evt.StopRequested: END})

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        async with agent(job) as socket:
            job.controller.request_stop("SIGINT")
            assert await heard(socket) == Stop(hard=False, exit_code=5, reason="over")
            job.controller.request_stop("SIGINT", hard=True)
            assert await heard(socket) == Stop(hard=True, exit_code=5, reason="over")

    play(tmp_path, machine, story)

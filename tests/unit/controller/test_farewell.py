"""The end of a job is told to whoever hears it; nobody waits long for a node that cannot."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from keepstep.controller.farewell import FAREWELL_TIMEOUT_S, SILENT_S
from keepstep.core import actions as act
from keepstep.core import events as evt
from keepstep.wire.codec import encode
from keepstep.wire.messages import Heartbeat, Stop
from tests.unit.controller.scripted import END, HELLO, Job, ScriptedMachine, agent, heard, play, until


def test_an_agent_that_says_nothing_any_more_is_not_waited_for(tmp_path: Path) -> None:
    machine = ScriptedMachine({evt.StopRequested: END})

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        async with agent(job) as socket:
            job.controller.request_stop("SIGTERM")
            assert isinstance(await heard(socket), Stop)
            began_s = time.monotonic()
            for _ in range(4):  # it is busy ending its workers, and says so
                await asyncio.sleep(0.5)
                await socket.send(encode(Heartbeat(node=HELLO.node, sent_ns=1)))
            assert not running.done()
            await running
            assert 2.0 + SILENT_S - 0.5 < time.monotonic() - began_s < FAREWELL_TIMEOUT_S - 2

    play(tmp_path, machine, story)


def test_an_agent_that_is_dropped_may_join_again(tmp_path: Path) -> None:
    dropped = (act.DropAgent(node=HELLO.node, reason="it was given up"),)
    machine = ScriptedMachine({evt.NodeProgressed: dropped, evt.StopRequested: END})

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        async with agent(job) as socket:
            await socket.send(encode(evt.NodeProgressed(node="n", generation=0, published=1, steps={1: 1})))
            await asyncio.wait_for(socket.wait_closed(), 10)
        async with agent(job):
            await until(lambda: sum(isinstance(told, evt.AgentJoined) for told in machine.told) == 2)
            job.controller.request_stop("SIGTERM", hard=True)

    play(tmp_path, machine, story)

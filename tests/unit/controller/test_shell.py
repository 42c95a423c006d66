"""The controller's promises: entries are durable before what follows is done, and it ends in order."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keepstep.controller.ledger import LedgerReader
from keepstep.controller.shell import BROKEN_EXIT_CODE
from keepstep.core import actions as act
from keepstep.core import events as evt
from keepstep.errors import InvariantError
from keepstep.wire.codec import encode
from keepstep.wire.messages import Stop
from tests.unit.controller.scripted import (
    END,
    Job,
    ScriptedMachine,
    agent,
    heard,
    play,
    until,
)


def test_an_entry_is_on_the_disk_before_the_actions_behind_it_are_done(tmp_path: Path) -> None:
    on_disk_when_said: list[int] = []
    machine = ScriptedMachine(
        {
            evt.StopRequested: (
                act.Persist(kind="incident", body={"number": 1}),
                act.Persist(kind="generation", body={"number": 1}),
                act.Say(text="now"),
                act.Persist(kind="end", body={}),
                *END,
            )
        }
    )

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        def look(text: str, level: str) -> None:
            with LedgerReader(tmp_path / "ledger.sqlite") as reader:
                on_disk_when_said.append(len(reader.entries()))

        job.controller._say = look
        job.controller.request_stop("SIGTERM")

    _, code = play(tmp_path, machine, story)
    assert code == 5 and on_disk_when_said == [2]
    with LedgerReader(tmp_path / "ledger.sqlite") as reader:
        assert [entry.kind for entry in reader.entries()] == ["incident", "generation", "end"]


def progress(step: int) -> evt.NodeProgressed:
    return evt.NodeProgressed(node="n", generation=0, published=step, steps={1: step})


def test_a_ledger_that_cannot_be_written_is_said_once_and_the_job_goes_on(tmp_path: Path) -> None:
    machine = ScriptedMachine(
        {
            evt.NodeProgressed: (act.Persist(kind="incident", body={"number": 7}), act.Say(text="went on")),
            evt.PersistFailed: lambda event: [act.Say(text=event.reason, level="error")],
            evt.StopRequested: (act.Persist(kind="end", body={}), *END),
        }
    )

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        async with agent(job) as socket:
            blocker = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
            blocker.execute(
                "CREATE TRIGGER full BEFORE INSERT ON entries BEGIN SELECT RAISE(ABORT, 'disk full'); END"
            )
            for step in range(3):
                await socket.send(encode(progress(step)))
            await until(lambda: sum(text == "went on" for text, _ in job.said) == 3)
            status, body = await job.request("GET", "/api/incidents/7")
            assert status == 200 and body["number"] == 7
            blocker.execute("DROP TRIGGER full")
            blocker.close()
            job.controller.request_stop("SIGTERM")
            assert isinstance(await heard(socket), Stop)

    job, _ = play(tmp_path, machine, story)
    assert sum(isinstance(event, evt.PersistFailed) for event in machine.told) == 1
    assert [text for text, level in job.said if level == "error"] == [
        f"cannot write {tmp_path}/ledger.sqlite: disk full"
    ]
    with LedgerReader(tmp_path / "ledger.sqlite") as reader:
        entries = reader.entries()
        assert reader.verify().flaw is None
    assert [entry.kind for entry in entries] == ["note", "end"]
    assert "3 entries before this one could not be written" in entries[0].body


def test_deadlines_of_the_machine_are_kept_without_any_event(tmp_path: Path) -> None:
    machine = ScriptedMachine({evt.Ticked: END})
    machine.deadline_s = time.monotonic() + 0.2

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        await running

    begun = time.monotonic()
    _, code = play(tmp_path, machine, story)
    assert code == 5 and [type(event) for event in machine.told] == [evt.Ticked]
    assert time.monotonic() - begun >= 0.2


def test_a_broken_machine_ends_the_job_and_stops_the_agents_at_once(tmp_path: Path) -> None:
    def break_down(event: Any) -> Sequence[act.Action]:
        raise InvariantError("the story")

    async def story(job: Job, running: asyncio.Task[int]) -> None:
        async with agent(job) as socket:
            await socket.send(encode(evt.WorkerParked(worker=1, readiness="warm")))
            assert await heard(socket) == Stop(hard=True, exit_code=BROKEN_EXIT_CODE, reason="internal error")

    job, code = play(tmp_path, ScriptedMachine({evt.WorkerParked: break_down}), story)
    assert code == BROKEN_EXIT_CODE and job.said[-1][1] == "error"

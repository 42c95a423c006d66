"""The controller's promises: entries are durable before what follows is done, and only friends get in."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from keepstep.controller import agents
from keepstep.controller.api import build_app
from keepstep.controller.heartbeats import Heartbeats
from keepstep.controller.ledger import Ledger, LedgerReader
from keepstep.controller.server import Server, bind
from keepstep.controller.shell import BROKEN_EXIT_CODE, Controller
from keepstep.core import actions as act
from keepstep.core import events as evt
from keepstep.core.job import JobConfig, JobMachine
from keepstep.core.types import Generation
from keepstep.errors import InvariantError, UsageError
from keepstep.wire.codec import decode, encode
from keepstep.wire.messages import PROTOCOL_VERSION, AgentHello, AgentWelcome, Heartbeat, JobSpec, Stop

TOKEN = "the-job-s-token"
SPEC = JobSpec(job="j", script="s.py", args=("a",), world_size=2)
DEADLINE_S = 20


class ScriptedMachine:
    """Answers an event by its type; remembers what it was told."""

    def __init__(
        self, answers: dict[type, Sequence[act.Action] | Callable[[Any], Sequence[act.Action]]]
    ) -> None:
        self.answers = answers
        self.told: list[evt.Event] = []
        self.deadline_s: float | None = None

    def step(self, event: evt.Event, now_s: float) -> list[act.Action]:
        self.told.append(event)
        answer = self.answers.get(type(event), ())
        return list(answer(event) if callable(answer) else answer)

    def next_deadline_s(self, now_s: float) -> float | None:
        return self.deadline_s

    def snapshot(self) -> dict[str, Any]:
        return JobMachine(JobConfig(world_size=2, job="j")).snapshot()


class Job:
    """A controller that is running, with what a test looks at."""

    def __init__(self, folder: Path, machine: ScriptedMachine, **options: Any) -> None:
        self.machine = machine
        self.said: list[tuple[str, str]] = []
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.controller = Controller(
            machine=machine,
            spec=SPEC,
            token=TOKEN,
            ledger=self.ledger,
            say=lambda text, level: self.said.append((text, level)),
            **options,
        )
        self.server = Server(build_app(self.controller), bind("127.0.0.1", 0))

    @property
    def websocket_url(self) -> str:
        return self.server.url.replace("http", "ws", 1) + "/agent"

    async def request(
        self, method: str, path: str, token: str | None = TOKEN, body: bytes | None = None
    ) -> tuple[int, Any]:
        def ask() -> tuple[int, Any]:
            connection = http.client.HTTPConnection(
                self.server.url.removeprefix("http://"), timeout=DEADLINE_S
            )
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            with contextlib.closing(connection):
                connection.request(method, path, body=body, headers=headers)
                answer = connection.getresponse()
                return answer.status, json.loads(answer.read())

        return await asyncio.to_thread(ask)


HELLO = AgentHello(version=PROTOCOL_VERSION, token=TOKEN, node="n", slots=3, pid=1, advertise="127.0.0.1")
END = (act.EndJob(exit_code=5, reason="over"),)


@contextlib.asynccontextmanager
async def agent(job: Job, hello: AgentHello = HELLO) -> AsyncIterator[ClientConnection]:
    async with connect(job.websocket_url, proxy=None) as socket:
        await socket.send(encode(hello))
        assert isinstance(decode(await socket.recv(decode=False)), AgentWelcome)
        yield socket


async def heard(socket: ClientConnection) -> Any:
    async with asyncio.timeout(DEADLINE_S):
        return decode(await socket.recv(decode=False))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


def play(
    folder: Path,
    machine: ScriptedMachine,
    story: Callable[[Job, asyncio.Task[int]], Awaitable[None]],
    **options: Any,
) -> tuple[Job, int]:
    """Run a controller and a story beside it; returns when the controller has ended."""

    async def main() -> tuple[Job, int]:
        job = Job(folder, machine, **options)
        job.server.start()
        running = asyncio.create_task(job.controller.run())
        try:
            async with asyncio.timeout(DEADLINE_S * 2):
                await story(job, running)
                return job, await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await job.server.stop()
            job.ledger.close()

    return asyncio.run(main())


# ---- order and durability -------------------------------------------------------------------------


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


# ---- agents ---------------------------------------------------------------------------------------


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


# ---- the API --------------------------------------------------------------------------------------


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

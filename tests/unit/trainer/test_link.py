"""The line to the agent: it comes back by itself, says again what may have been lost, and gives up in time."""

from __future__ import annotations

import queue
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.events import Resumed, ScriptFailed, VerdictReached, WorkerParked
from keepstep.errors import ProtectionError
from keepstep.trainer.link import Identity, Link
from keepstep.wire import codec, framing
from keepstep.wire.messages import Fenced, Fetch, Fetched, Hello, JournalKept, Welcome

WAIT_S = 20.0


class FakeAgent:
    """Listens at a path, welcomes whoever says Hello, remembers what it heard."""

    def __init__(self, path: Path, *, orphan_timeout_s: float = 60.0, first: Any = None) -> None:
        self.heard: queue.Queue[Any] = queue.Queue()
        self.first = first or Welcome(
            job="j", world_size=2, record_bytes=4096, orphan_timeout_s=orphan_timeout_s, advertise="127.0.0.1"
        )
        self.connections: list[socket.socket] = []
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                assert isinstance(self._next(connection), Hello)
                self.connections.append(connection)
                framing.send_frame(connection, codec.encode(self.first))
                while (message := self._next(connection)) is not None:
                    self.heard.put(message)
            except OSError:
                return

    def _next(self, connection: socket.socket) -> Any:
        frame = framing.recv_frame(connection)
        return None if frame is None else codec.decode(frame)

    def next(self) -> Any:
        return self.heard.get(timeout=WAIT_S)

    def send(self, message: Any) -> None:
        framing.send_frame(self.connections[-1], codec.encode(message))

    def die(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.connections:
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()


class Worker:
    """One link and what it was told."""

    def __init__(self, path: Path) -> None:
        self.messages: queue.Queue[Any] = queue.Queue()
        self.orphaned: queue.Queue[float] = queue.Queue()
        identity = Identity(
            socket_path=str(path), token="t", job="j", worker=3, node="n", slot=0, page_path="", run_dir=""
        )
        self.link = Link(identity, self.messages.put, self.orphaned.put)
        self.link.start()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


def resumed(generation: int) -> Resumed:
    return Resumed(worker=3, generation=generation, step=5)


def test_a_new_agent_hears_the_newest_of_each_kind_in_the_old_order(path: Path) -> None:
    agent = FakeAgent(path)
    link = Worker(path).link
    verdict = VerdictReached(
        worker=3, generation=1, target=4, course="keep", reason="", connect_s=0.0, vote_s=0.0
    )
    journal = JournalKept(worker=3, rank=0, data=b"j")
    sent = [WorkerParked(worker=3, readiness="warm"), journal, resumed(0), verdict, resumed(1)]
    for message in sent:
        assert link.send(message)
    assert [agent.next() for _ in sent] == sent
    agent.die()
    agent = FakeAgent(path)
    assert [agent.next() for _ in range(4)] == [sent[0], journal, verdict, resumed(1)]
    agent.send(Fenced(reason="told over the new connection"))
    agent.die()


def test_a_question_under_way_is_asked_again_and_answered_once(path: Path) -> None:
    agent = FakeAgent(path)
    link = Worker(path).link
    answers: queue.Queue[Fetched] = queue.Queue()
    threading.Thread(
        target=lambda: answers.put(link.fetch("record", 1, lineage="", timeout_s=WAIT_S)), daemon=True
    ).start()
    asked = agent.next()
    assert isinstance(asked, Fetch)
    agent.die()
    agent = FakeAgent(path)
    assert agent.next() == asked
    for data in (b"first", b"second"):
        agent.send(Fetched(request=asked.request, data=data))
    assert answers.get(timeout=WAIT_S).data == b"first"
    agent.die()


def test_the_last_word_of_a_failing_script_waits_for_a_restarting_agent(path: Path) -> None:
    agent = FakeAgent(path)
    worker = Worker(path)
    agent.die()
    failed = ScriptFailed(worker=3, summary="ValueError", traceback="...")
    delivered = threading.Thread(target=lambda: worker.link.deliver(failed), daemon=True)
    delivered.start()
    delivered.join(0.2)
    assert delivered.is_alive(), "nobody has heard it"
    agent = FakeAgent(path)
    assert agent.next() == failed
    delivered.join(WAIT_S)
    assert not delivered.is_alive()
    agent.die()


def test_without_an_agent_the_process_ends_after_its_time(path: Path) -> None:
    agent = FakeAgent(path, orphan_timeout_s=0.3)
    worker = Worker(path)
    agent.die()
    assert worker.orphaned.get(timeout=WAIT_S) == 0.3


def test_a_refused_comeback_is_told_to_the_session(path: Path) -> None:
    agent = FakeAgent(path)
    worker = Worker(path)
    agent.die()
    agent = FakeAgent(path, first=Fenced(reason="no such worker"))
    assert worker.messages.get(timeout=WAIT_S) == Fenced(reason="no such worker")
    agent.die()


def test_an_agent_out_of_reach_at_the_start_is_one_line(path: Path) -> None:
    with pytest.raises(ProtectionError, match="cannot be reached"):
        Worker(path)

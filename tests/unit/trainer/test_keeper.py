"""The worker's side of other nodes, against real agents that are stopped, killed and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.agent.peer_call import call
from keepstep.core.actions import Announce
from keepstep.core.events import KeeperMissed, KeeperRegained
from keepstep.core.types import Generation
from keepstep.errors import ProtectionError, WireError
from keepstep.trainer.keeper import Keeper
from keepstep.trainer.link import Identity
from keepstep.trainer.peer import Directory, Route
from keepstep.trainer.store import AgentStore, StoreCut
from keepstep.wire.address import format_address, parse_address
from keepstep.wire.messages import PeerFetch
from keepstep.wire.page import Page

TOKEN = "t" * 32
HOST = Path(__file__).parent / "agent_of_another_node.py"
WAIT_S = 20.0


class Agent:
    """One of them, in a process of its own."""

    def __init__(self, node: str, host: str, port: int = 0) -> None:
        self.node = node
        self.process = subprocess.Popen(
            [sys.executable, str(HOST), node, host, TOKEN, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            while Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.001)

    def kept(self, lineage: str) -> bytes | None:
        question = PeerFetch(what="record", rank=1, lineage=lineage)
        answer = asyncio.run(call(self.address, question, token=TOKEN, node="test", timeout_s=WAIT_S))
        return answer.data

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def agent() -> Iterator[Callable[..., Agent]]:
    made: list[Agent] = []

    def start(node: str, host: str, port: int = 0) -> Agent:
        made.append(Agent(node, host, port))
        return made[-1]

    yield start
    for one in made:
        one.end()


class Rank:
    """Rank 1, played by worker 1 on node a, with its page and its keeper."""

    worker, rank, generation_number = 1, 1, 0

    def __init__(self, folder: Path, limit_s: float = 5.0) -> None:
        self.identity = Identity(
            socket_path="/nowhere",
            token=TOKEN,
            job="test",
            worker=1,
            node="a",
            slot=0,
            page_path=str(folder / "page"),
            run_dir=str(folder),
        )
        self.directory = Directory(self.identity)
        self.page = Page.create(self.identity.page_path, 1, 1 << 20)
        self.told: list[Any] = []
        self.said: list[str] = []
        self.interrupted = False
        self.keeper = Keeper(
            self,
            self.page,
            limit_s,
            lambda route, own: self.directory.dial(route, "keep", own),
            self.told.append,
        )
        self.step = 0

    def say(self, text: str) -> None:
        self.said.append(text)

    def announce(self, *agents: Agent, keeper: str = "", number: int = 0) -> None:
        peers = {agent.node: agent.address for agent in agents}
        generation = Generation(number=number, ranks=(0, 1))
        self.directory.note(
            Announce(
                generation=generation, reason="test", peers=peers, keepers={"a": keeper} if keeper else {}
            )
        )
        self.keeper.turn(self.directory.keeper)

    def gate(self, payload: bytes | None = None) -> bool:
        """One step's gate, as `Loop.before_gate` passes it."""
        self.step += 1
        payload = b"record %d" % self.step + bytes(3000) if payload is None else payload
        self.keeper.send("gate", self.step, self.lineage(self.step), payload)
        self.page.write_record("gate", self.step, self.lineage(self.step), payload)
        return self.keeper.await_kept()

    @staticmethod
    def lineage(step: int) -> str:
        return f"{step:032x}"

    def until_kept(self) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not self.gate():
            assert time.monotonic() < deadline_s, self.said
            time.sleep(0.01)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.page.close()


def test_a_passed_gate_means_that_the_record_lies_on_the_other_node(rank: Rank, agent: Any) -> None:
    other = agent("b", "127.0.0.3")
    rank.announce(other, keeper="b")
    for payload in (b"first", b"second" * 100_000, b"second" * 100_000 + b"!"):
        assert rank.gate(payload)
        assert other.kept(rank.lineage(rank.step)) == payload
    assert rank.told == [] and rank.keeper.spent_s > 0


def test_without_a_keeper_nothing_waits_and_nothing_is_told(rank: Rank) -> None:
    rank.announce()
    assert rank.gate() and rank.keeper.spent_s == 0.0 and rank.told == []


def test_a_stopped_keeper_costs_one_deadline_and_is_told_once(tmp_path: Path, agent: Any) -> None:
    other = agent("b", "127.0.0.3")
    rank = Rank(tmp_path, limit_s=0.3)
    rank.announce(other, keeper="b")
    rank.until_kept()
    told = len(rank.told)
    other.send(signal.SIGSTOP)
    started_s = time.monotonic()
    assert not any(rank.gate() for _ in range(50))
    # One deadline, not fifty; later gates wait again only after a growing pause.
    assert time.monotonic() - started_s < 50 * 0.3 / 3
    assert [type(one) for one in rank.told[told:]] == [KeeperMissed]
    assert rank.told[-1].reason == "b did not acknowledge them within 0.3 s"
    other.send(signal.SIGCONT)
    rank.until_kept()
    assert isinstance(rank.told[-1], KeeperRegained)
    # What was left out meanwhile has been sent again, as far as it can still be wanted.
    assert all(other.kept(rank.lineage(step)) for step in range(rank.step - 2, rank.step + 1))
    rank.page.close()


def test_another_keeper_is_given_the_newest_records_at_once(rank: Rank, agent: Any) -> None:
    first, second = agent("b", "127.0.0.3"), agent("c", "127.0.0.4")
    rank.announce(first, second, keeper="b")
    for _ in range(6):
        assert rank.gate()
    first.end()
    rank.announce(second, keeper="c", number=1)
    assert rank.gate()
    assert [second.kept(rank.lineage(step)) is not None for step in (5, 6, 7)] == [True] * 3


def test_an_agent_that_comes_back_on_its_port_is_given_them_too(rank: Rank, agent: Any) -> None:
    first = agent("b", "127.0.0.3")
    rank.announce(first, keeper="b")
    assert rank.gate()
    first.end()
    again = agent("b", "127.0.0.3", parse_address(first.address)[1])
    rank.until_kept()
    assert again.kept(rank.lineage(rank.step)) is not None


def test_a_keeper_that_is_nowhere_lets_the_step_go_on_with_a_reason(tmp_path: Path, agent: Any) -> None:
    gone = agent("b", "127.0.0.3")
    gone.end()
    rank = Rank(tmp_path, limit_s=0.2)
    rank.announce(gone, keeper="b")
    started_s = time.monotonic()
    assert not rank.gate() and not rank.gate()
    assert time.monotonic() - started_s < WAIT_S
    assert len(rank.told) == 1 and rank.told[0].reason.startswith("b: ")
    rank.page.close()


def test_a_newer_generation_frees_a_gate_that_waits(rank: Rank, agent: Any) -> None:
    other = agent("b", "127.0.0.3")
    rank.announce(other, keeper="b")
    assert rank.gate()
    other.send(signal.SIGSTOP)

    def announced() -> None:
        rank.interrupted = True
        rank.keeper.interrupt()

    threading.Timer(0.2, announced).start()
    started_s = time.monotonic()
    assert not rank.gate()
    assert time.monotonic() - started_s < 4 and rank.told == []  # the limit is 5 s
    rank.interrupted = False
    other.send(signal.SIGCONT)
    assert rank.gate()


# ---- the store of a generation on another node --------------------------------------------------


def test_the_store_of_a_generation_is_that_of_the_node_it_names(rank: Rank, agent: Any) -> None:
    other = agent("b", "127.0.0.3")
    rank.announce(other)
    stores = [AgentStore("g0/") for _ in range(2)]
    for store in stores:
        store.connect(rank.directory.dial_store(Generation(number=0, ranks=(0, 1), store="b")))
    stores[0].set("key", b"value")
    assert stores[1].get("key") == b"value" and stores[1].add("n", 2) == 2
    with pytest.raises(ProtectionError, match="store on z, and nobody said where that is"):
        rank.directory.dial_store(Generation(number=0, ranks=(0, 1), store="z"))
    outcome: list[StoreCut] = []

    def wait() -> None:
        try:
            stores[0].get_within("never", 60.0)
        except StoreCut as error:
            outcome.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    stores[0].cut()
    waiting.join(WAIT_S)
    assert len(outcome) == 1
    for store in stores:
        store.close()


def test_a_store_that_does_not_answer_is_given_up_by_a_cut(rank: Rank) -> None:
    with socket.socket() as full:  # its queue of waiting connections is full: a SYN gets no answer
        full.bind(("127.0.0.9", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        store, outcome = AgentStore("g0/"), []

        def connect() -> None:
            route = Route("b", format_address(*full.getsockname()))
            try:
                store.connect(lambda own: rank.directory.dial(route, "store", own, 60.0))
            except StoreCut as error:
                outcome.append(error)

        waiting = threading.Thread(target=connect)
        waiting.start()
        time.sleep(0.2)
        store.cut()
        waiting.join(WAIT_S)
        assert not waiting.is_alive() and len(outcome) == 1
        for filler in fillers:
            filler.close()
        store.close()


def test_a_listener_without_the_token_is_told_nothing(rank: Rank) -> None:
    """A stranger on a port that an agent had: it gets a proof that is worth nothing elsewhere, no record."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.9", 0)) as stranger:

        def serve() -> None:
            sock, _ = stranger.accept()
            with sock:
                sock.sendall(b"KSP1" + os.urandom(32))
                heard.append(sock.recv(4096))
                sock.sendall((100).to_bytes(4, "big") + bytes(100))
                sock.settimeout(WAIT_S)
                while part := sock.recv(4096):
                    heard.append(part)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(WireError, match="token"):
            rank.directory.dial(
                Route("b", format_address(*stranger.getsockname())), "keep", lambda sock: None
            )
        thread.join(WAIT_S)
    assert len(heard) == 1 and TOKEN.encode() not in heard[0]

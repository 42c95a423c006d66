"""Agents among each other, over real sockets: who may speak, what is found where, who can be reached."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from keepstep.agent import fetching, peer_listener
from keepstep.agent.announcements import Announcements
from keepstep.agent.config import AgentConfig
from keepstep.agent.peer_call import CALL_FAILURES, call, probe
from keepstep.agent.peers import Peers
from keepstep.agent.store import GenerationStore
from keepstep.core.actions import Announce, Probe
from keepstep.core.events import ProbeAnswered
from keepstep.core.types import Generation
from keepstep.errors import UsageError, WireError
from keepstep.wire import handshake
from keepstep.wire.address import parse_address
from keepstep.wire.codec import decode, encode
from keepstep.wire.framing import frame, read_frame, write_frame
from keepstep.wire.keeping import RecordSent, pack_record, unpack_ack
from keepstep.wire.messages import (
    PROTOCOL_VERSION,
    Fenced,
    Fetch,
    Fetched,
    PeerFetch,
    PeerFetched,
    PeerHello,
    StoreReply,
    StoreRequest,
)
from keepstep.wire.page import Page

TOKEN = "t" * 32
OPENED: list[asyncio.StreamWriter] = []
A, B = "a" * 32, "b" * 32


class Node:
    """One agent's side between nodes, without workers' processes: its pages are made by hand."""

    def __init__(self, name: str, host: str, folder: Path) -> None:
        self.name = name
        self.pages: dict[int, Page] = {}
        self.known = Announcements()
        self.store = GenerationStore()
        config = AgentConfig(
            controller_url="ws://127.0.0.1:1/agent",
            token=TOKEN,
            node=name,
            slots=1,
            run_dir=folder,
            advertise=host,
        )
        self.peers = Peers(config, self.known, self.store, self.pages.get, lambda: 0)
        self.peers.world_size = 2
        self._folder = folder

    def page(self, worker: int) -> Page:
        page = self.pages[worker] = Page.create(str(self._folder / f"page-{worker}"), worker, 1 << 16)
        return page

    async def fetch(self, worker: int, what: Any, rank: int, lineage: str = "") -> Fetched:
        answer: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
        self.peers.fetch(worker, Fetch(request=1, what=what, rank=rank, lineage=lineage), answer.set_result)
        return await asyncio.wait_for(answer, 10)


async def open_connection(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To be closed when the test's cluster is."""
    reader, writer = await asyncio.open_connection(*parse_address(address))
    OPENED.append(writer)
    return reader, writer


class Cluster(dict[str, Node]):
    """Nodes by name."""

    def announce(self, number: int, *ranks: int, lost: str = "", **fields: Any) -> None:
        """To all: every node keeps for the one before it."""
        names = [name for name in self if name != lost]
        keepers = fields.pop("keepers", dict(zip(names, names[1:] + names[:1], strict=True)))
        peers = {name: self[name].peers.address for name in self} | fields.pop("peers", {})
        generation = Generation(number=number, ranks=ranks, **fields)
        for name in names:
            node = self[name]
            announce = Announce(generation=generation, reason="test", peers=peers, keepers=keepers)
            assert node.known.accept(announce)
            node.store.announce(number)
            node.peers.announce(announce)


@contextlib.asynccontextmanager
async def cluster(folder: Path, *names: str) -> AsyncIterator[Cluster]:
    made = Cluster()
    for number, name in enumerate(names):
        (folder / name).mkdir()
        made[name] = Node(name, f"127.0.0.{number + 2}", folder / name)
        await made[name].peers.open()
    try:
        yield made
    finally:
        for writer in OPENED:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in OPENED), return_exceptions=True)
        OPENED.clear()
        for node in made.values():
            await node.peers.close()
            for page in node.pages.values():
                page.close()


def run(folder: Path, story: Callable[[Cluster], Awaitable[None]], *names: str) -> None:
    async def wrapped() -> None:
        async with cluster(folder, *(names or ("a", "b", "c"))) as nodes:
            await story(nodes)

    asyncio.run(wrapped())


class Caller:
    """A worker or agent of another node, with its hello said."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Any) -> None:
        self.reader, self.writer, self.answer = reader, writer, answer

    @classmethod
    async def connect(cls, address: str, token: str = TOKEN, **fields: Any) -> Caller:
        reader, writer = await open_connection(address)
        banner = await reader.readexactly(handshake.BANNER_BYTES)
        hello = {
            "version": PROTOCOL_VERSION,
            "node": "x",
            "to": address,
            "role": "keep",
            "worker": 1,
        } | fields
        greeting = handshake.greet(token, banner, encode(PeerHello(**hello)))
        await write_frame(writer, greeting)
        data = await asyncio.wait_for(read_frame(reader), 10)
        answer = None if data is None else decode(handshake.message_of(token, banner, greeting, data))
        return cls(reader, writer, answer)

    async def ask(self, data: bytes) -> bytes | None:
        await write_frame(self.writer, data)
        return await self.hear()

    async def hear(self) -> bytes | None:
        with contextlib.suppress(ConnectionError):
            return await asyncio.wait_for(read_frame(self.reader), 10)
        return None


def record(step: int, lineage: str, payload: bytes, **fields: Any) -> RecordSent:
    values: dict[str, Any] = {"sequence": step, "rank": 1, "generation": 0, "kind": "gate"}
    return RecordSent(step=step, lineage=lineage, payload=payload, **(values | fields))


# ---- who may speak ------------------------------------------------------------------------------


def test_a_listener_is_bound_to_its_address_only_and_says_it(tmp_path: Path) -> None:
    async def story(nodes: Cluster) -> None:
        host, port = parse_address(nodes["b"].peers.address)
        assert host == "127.0.0.3"
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.2", port)

    run(tmp_path, story)


def test_an_address_of_another_machine_is_refused_with_one_line(tmp_path: Path) -> None:
    async def story() -> None:
        with pytest.raises(UsageError, match=r"cannot listen on 192\.0\.2\.1 for other nodes"):
            await Node("x", "192.0.2.1", tmp_path).peers.open()

    asyncio.run(story())


def test_a_stranger_is_cut_without_a_word_and_others_are_served(tmp_path: Path) -> None:
    async def story(nodes: Cluster) -> None:
        address = nodes["a"].peers.address
        assert (await Caller.connect(address, token="wrong")).answer is None
        for junk in (b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 8, frame(bytes(100)), frame(bytes(2049))):
            reader, writer = await open_connection(address)
            writer.write(junk)
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 10)  # the banner, then the end
            writer.close()
        friend = await Caller.connect(address)
        assert type(friend.answer).__name__ == "PeerWelcome" and friend.answer.node == "a"

    run(tmp_path, story)


def test_who_says_nothing_is_cut_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_listener, "HELLO_TIMEOUT_S", 0.1)

    async def story(nodes: Cluster) -> None:
        reader, _ = await open_connection(nodes["a"].peers.address)
        with contextlib.suppress(ConnectionError):
            assert len(await asyncio.wait_for(reader.read(), 10)) == handshake.BANNER_BYTES
        friend = await Caller.connect(nodes["a"].peers.address)
        await asyncio.sleep(0.3)
        assert await friend.ask(pack_record(record(1, A, b"x"), b"")) is not None

    run(tmp_path, story)


def test_there_are_only_so_many_strangers_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_listener, "MAX_STRANGERS", 2)

    async def story(nodes: Cluster) -> None:
        where = nodes["a"].peers.address
        strangers = [await open_connection(where) for _ in range(2)]
        for reader, _ in strangers:
            await reader.readexactly(handshake.BANNER_BYTES)
        late, _ = await open_connection(where)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(late.read(), 10) == b""
        strangers[0][1].close()
        for _ in range(100):
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await Caller.connect(nodes["a"].peers.address)
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError("the place of a stranger that left stays taken")

    run(tmp_path, story)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"version": 1}, "speaks protocol 1"),
        ({"to": "127.0.0.9:999"}, "somebody passes it on"),
        ({"worker": 0}, "worker 0 has no place in generation 1"),
        ({"worker": 0, "role": "store"}, "worker 0 has no place in generation 1"),
    ],
)
def test_a_peer_that_may_not_stay_is_told_why(tmp_path: Path, fields: Any, reason: str) -> None:
    async def story(nodes: Cluster) -> None:
        nodes.announce(0, 0, 1)
        nodes.announce(1, 2, 1)
        refused = await Caller.connect(nodes["a"].peers.address, **fields)
        assert isinstance(refused.answer, Fenced) and reason in refused.answer.reason
        assert await refused.hear() is None

    run(tmp_path, story)


def test_a_fence_ends_the_connections_that_are_open(tmp_path: Path) -> None:
    async def story(nodes: Cluster) -> None:
        nodes.announce(0, 0, 1)
        fenced, stays = [await Caller.connect(nodes["a"].peers.address, worker=n) for n in (0, 1)]
        nodes.announce(1, 2, 1)
        assert await fenced.hear() is None
        assert await stays.ask(pack_record(record(1, A, b"x"), b"")) is not None

    run(tmp_path, story)


# ---- what is done for others --------------------------------------------------------------------


def test_the_store_serves_a_worker_of_another_node(tmp_path: Path) -> None:
    async def story(nodes: Cluster) -> None:
        nodes.announce(5, 0, 1)
        worker = await Caller.connect(nodes["a"].peers.address, role="store")

        async def ask(number: int, op: Any, key: str, **rest: Any) -> StoreReply:
            data = await worker.ask(encode(StoreRequest(request=number, op=op, keys=(key,), **rest)))
            reply = decode(data or b"")
            assert isinstance(reply, StoreReply)
            return reply

        assert (await ask(1, "set", "g5/k", value=b"v")).ok
        assert (await ask(2, "get", "g5/k")).values == (b"v",)
        assert (await ask(3, "get", "g3/k")).detail == "this generation is over"
        await write_frame(worker.writer, encode(StoreRequest(request=4, op="get", keys=("g5/late",))))
        worker.writer.close()
        for _ in range(200):
            await asyncio.sleep(0.01)
            if nodes["a"].store._wait_count == 0:
                break
        assert nodes["a"].store._wait_count == 0

    run(tmp_path, story)


def test_records_are_acknowledged_and_a_lie_ends_the_connection(tmp_path: Path) -> None:
    async def story(nodes: Cluster) -> None:
        nodes.announce(0, 0, 1)
        worker = await Caller.connect(nodes["a"].peers.address)
        first, second = record(1, A, b"x" * 5000), record(2, B, b"y" + b"x" * 5000)
        assert unpack_ack(await worker.ask(pack_record(first, b"")) or b"") == (1, True)
        assert unpack_ack(await worker.ask(pack_record(second, first.payload)) or b"") == (2, True)
        assert [kept.payload for _, _, kept, _ in nodes["a"].peers.kept.of_rank(1)] == [
            second.payload,
            first.payload,
        ]
        assert await worker.ask(pack_record(record(3, A, b"z", rank=2), second.payload)) is None
        other = await Caller.connect(nodes["a"].peers.address)
        assert await other.ask(pack_record(record(3, A, b"z" * 2000), b"z" * 1000)) is None

    run(tmp_path, story)


# ---- what is asked of others --------------------------------------------------------------------


def test_the_record_of_a_lost_node_comes_from_its_keeper(tmp_path: Path) -> None:
    async def story(nodes: Cluster) -> None:
        nodes.announce(0, 0, 1)
        worker = await Caller.connect(nodes["c"].peers.address)  # of node b, rank 1
        await worker.ask(pack_record(record(4, A, b"gate of 4"), b""))
        await worker.ask(pack_record(record(5, B, b"gate of 5"), b"gate of 4"))
        await nodes["b"].peers.close()
        nodes.announce(1, 0, 2, lost="b")
        found = await nodes["a"].fetch(2, "record", 1, B)
        assert (found.data, found.detail) == (b"gate of 5", "gate of step 5, kept by worker 1 on c")
        missing = await nodes["a"].fetch(2, "record", 1, "c" * 32)
        assert missing.data is None and "kept are steps [4, 5] (no answer from b)" in missing.detail

    run(tmp_path, story)


def test_a_record_of_a_start_wins_wherever_it_lies_and_then_the_newest_player(tmp_path: Path) -> None:
    async def story(nodes: Cluster) -> None:
        nodes.announce(0, 0, 1)
        nodes.announce(1, 0, 2)
        nodes["a"].page(1).write_record("gate", 4, A, b"page gate, older player")
        worker = await Caller.connect(nodes["b"].peers.address, worker=2)
        await worker.ask(pack_record(record(4, A, b"kept gate", generation=1), b""))
        nodes.announce(2, 0, 3)
        assert (await nodes["c"].fetch(3, "record", 1, A)).data == b"kept gate"
        nodes["a"].pages[1].write_record("start", 4, A, b"page start, older player")
        assert (await nodes["c"].fetch(3, "record", 1, A)).data == b"page start, older player"
        assert (await nodes["a"].fetch(3, "record", 1, A)).data == b"page start, older player"

    run(tmp_path, story)


def test_the_last_word_of_the_player_before_is_not_searched_any_further(tmp_path: Path) -> None:
    async def story(nodes: Cluster) -> None:
        with socket.socket() as mute:  # accepts and never says anything: a node that stands still
            mute.bind(("127.0.0.9", 0))
            mute.listen()
            standing = {"d": f"127.0.0.9:{mute.getsockname()[1]}"}
            nodes.announce(0, 0, 1)
            nodes["b"].page(1).write_record("gate", 4, A, b"page")
            nodes.announce(1, 0, 2, peers=standing)
            started_s = time.monotonic()
            assert (await nodes["a"].fetch(2, "record", 1, A)).data == b"page"
            assert time.monotonic() - started_s < fetching.DEADLINE_S
            missing = await nodes["a"].fetch(2, "record", 1, B)
            assert missing.data is None and "no answer from d" in missing.detail

    run(tmp_path, story)


def test_a_journal_is_handed_to_the_keeper_and_to_the_next_one(tmp_path: Path) -> None:
    async def until(condition: Callable[[], bool]) -> None:
        for _ in range(500):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it never came")

    async def story(nodes: Cluster) -> None:
        nodes.announce(0, 0, 1, keepers={"a": "b", "b": "a"})
        nodes["a"].peers.journals.keep(0, b"heard")
        await until(lambda: nodes["b"].peers.journals.get(0) == b"heard")
        assert nodes["c"].peers.journals.get(0) is None
        nodes.announce(1, 0, 2, keepers={"a": "c"})
        await until(lambda: nodes["c"].peers.journals.get(0) == b"heard")
        await nodes["a"].peers.close()
        nodes.announce(2, 3, 2, lost="a", keepers={"b": "c", "c": "b"})
        assert (await nodes["c"].fetch(3, "journal", 0)).data == b"heard"
        assert (await nodes["b"].fetch(3, "journal", 0)).data == b"heard"
        assert "on any node" in (await nodes["b"].fetch(3, "journal", 1)).detail
        nodes.announce(3, 4, 5, lost="a", fresh=True)
        assert (await nodes["b"].fetch(4, "journal", 0)).data is None

    run(tmp_path, story)


def test_a_question_fails_with_a_word_and_in_time(tmp_path: Path) -> None:
    async def story(nodes: Cluster) -> None:
        address = nodes["a"].peers.address
        question = PeerFetch(what="record", rank=0)
        answer = await call(address, question, token=TOKEN, node="x", timeout_s=5)
        assert answer == PeerFetched(data=None)
        with pytest.raises(WireError, match="token"):
            await call(address, question, token="wrong", node="x", timeout_s=5)
        with pytest.raises(CALL_FAILURES):
            await call("127.0.0.9:1", question, token=TOKEN, node="x", timeout_s=5)
        with pytest.raises(CALL_FAILURES):
            await call("nonsense", question, token=TOKEN, node="x", timeout_s=5)

    run(tmp_path, story)


def test_a_probe_tells_reached_refused_and_silent_apart(tmp_path: Path) -> None:
    async def story(nodes: Cluster) -> None:
        address = nodes["a"].peers.address
        answers: asyncio.Queue[ProbeAnswered] = asyncio.Queue()
        nodes["b"].peers.probe(Probe(node="a", peer=address, by="b", timeout_s=5), answers.put_nowait)
        assert await asyncio.wait_for(answers.get(), 10) == ProbeAnswered(node="a", by="b", outcome="reached")
        await nodes["a"].peers.close()
        assert await probe(address, 5) == "refused"
        assert await probe("", 5) == "silent"
        with socket.socket() as full:  # a queue of waiting connections that is full: nobody answers
            full.bind(("127.0.0.9", 0))
            full.listen(0)
            where = full.getsockname()
            with socket.create_connection(where):
                fillers = [socket.socket() for _ in range(3)]
                for filler in fillers:
                    filler.setblocking(False)
                    filler.connect_ex(where)
                assert await probe(f"127.0.0.9:{where[1]}", 0.3) == "silent"
                for filler in fillers:
                    filler.close()

    run(tmp_path, story)

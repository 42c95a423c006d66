"""What workers are told and asked over the real socket: announcements, fences, the store, records."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.actions import Release, StandBy
from keepstep.core.events import WorkerExited, WorkerParked
from keepstep.wire import codec, framing
from keepstep.wire.messages import PROTOCOL_VERSION, Fenced, Hello

pytestmark = pytest.mark.integration

# Prints the name (and the generation) of all that it hears.
LISTEN = """
import worker_side
c = worker_side.park()
while (m := c.receive()):
    print(type(m).__name__, getattr(getattr(m, "generation", None), "number", ""))
"""


async def heard(n: Any, worker: int, *expected: str) -> None:
    await n.until(lambda: n.log(worker).split("\n")[:-1] == [*expected], f"worker {worker}: {expected}")


def test_an_announcement_reaches_everybody_and_the_fenced_are_told_so(node: Any) -> None:
    async def story() -> None:
        async with node(LISTEN) as n:
            await n.start(0, 1, 2)
            await n.send(StandBy(worker=2, rehearse_rank=1))
            await n.announce(0, 0, 1, fresh=True)
            await n.announce(1, 0, 2)
            await heard(n, 0, "Announce 0", "Announce 1")
            await heard(n, 1, "Announce 0", "Fenced ")
            await heard(n, 2, "StandBy ", "Announce 0", "Announce 1")
            await n.send(Release(workers=(0, 2)))
            await heard(n, 0, "Announce 0", "Announce 1", "Release ")

    asyncio.run(story())


def test_a_repeated_announcement_is_repeated_and_an_older_one_is_not(node: Any) -> None:
    async def story() -> None:
        async with node(LISTEN) as n:
            await n.start(0)
            await n.announce(3, 0)
            await n.announce(2, 0)
            await n.announce(3, 0)
            await heard(n, 0, "Announce 3", "Announce 3")

    asyncio.run(story())


def test_an_announcement_waits_for_a_member_that_is_not_there_yet(node: Any) -> None:
    code = f"import time; time.sleep(0.5){LISTEN}"

    async def story() -> None:
        async with node(code) as n:
            await n.start(0, 1, parked=False)
            await n.announce(0, 0, 1)
            await n.event(WorkerParked, worker=1)
            await heard(n, 1, "Announce 0")

    asyncio.run(story())


def test_a_fenced_worker_that_comes_late_is_turned_away(node: Any) -> None:
    code = (
        """
import time, worker_side
if worker_side.WORKER == 1:
    time.sleep(0.5)
    store = worker_side.Connection("store")
    print(type(store.receive()).__name__, store.receive())
"""
        + LISTEN
    )

    async def story() -> None:
        async with node(code) as n:
            await n.start(0, 1, 2, parked=False)
            await n.announce(0, 0, 1)
            await n.announce(1, 0, 2)
            await n.event(WorkerParked, worker=1)
            await heard(n, 1, "Fenced None", "Fenced ")

    asyncio.run(story())


def test_the_store_serves_workers_as_torch_expects(node: Any) -> None:
    code = """
import threading, time, worker_side
c = worker_side.park()
c.receive()
s = worker_side.Connection("store")
if worker_side.WORKER == 0:
    got = s.ask("get", "g0/late", timeout_s=10)
    print("get", got.ok, got.values)
    print("add", [s.ask("add", "g0/n", amount=k).number for k in (5, -2)], s.ask("get", "g0/n").values)
    print("miss", s.ask("get", "g0/never", timeout_s=0.1).detail)
    print("check", s.ask("check", "g0/n", "g0/late").number, s.ask("check", "g0/n", "g0/x").number)
    print("cas", s.ask("compare_set", "g0/c", value=b"a").values, s.ask("compare_set", "g0/c", value=b"b",
          expected=b"z").values, s.ask("compare_set", "g0/c", value=b"b", expected=b"a").values)
    print("delete", s.ask("delete", "g0/c").number, s.ask("delete", "g0/c").number)
    print("old", s.ask("get", "g0/never", timeout_s=20).detail)
else:
    time.sleep(0.2)
    s.ask("set", "g0/late", value=b"\\x00\\xff")
while c.receive(): pass
"""

    async def story() -> None:
        async with node(code) as n:
            await n.start(0, 1)
            await n.announce(0, 0, 1)
            await n.until(lambda: "delete" in n.log(0), "store")
            await n.announce(1, 0, 1)
            await n.announce(2, 0, 1)
            await n.until(lambda: "old" in n.log(0), "store")
            assert n.log(0).splitlines() == [
                "get True (b'\\x00\\xff',)",
                "add [5, 3] (b'3',)",
                "miss timeout",
                "check 1 0",
                "cas (b'a',) (b'a',) (b'b',)",
                "delete 1 0",
                "old this generation is over",
            ]

    asyncio.run(story())


def test_the_record_of_a_killed_rank_is_found_by_its_lineage_in_its_page(node: Any) -> None:
    code = """
import worker_side
from keepstep.wire.messages import Fetch, Fetched, JournalKept
c = worker_side.park()
c.receive()
if worker_side.WORKER == 0:
    p = worker_side.page()
    p.write_record("gate", 4, "a" * 32, b"gate of 4")
    p.write_record("start", 4, "a" * 32, b"start of 4")
    p.write_record("gate", 5, "b" * 32, b"gate of 5")
    c.send(JournalKept(worker=0, rank=0, data=b"heard"))
    print("ready")
while (m := c.receive()) and worker_side.WORKER == 0: pass
for what, rank, lineage in [("record", 0, "a" * 32), ("record", 0, "b" * 32), ("record", 0, "c" * 32),
                            ("record", 1, ""), ("journal", 0, ""), ("journal", 1, "")]:
    c.send(Fetch(request=7, what=what, rank=rank, lineage=lineage))
    found = c.expect(Fetched)
    print(found.request, found.data, "|", found.detail)
"""

    async def story() -> None:
        async with node(code) as n:
            await n.start(0, 1, 2)
            await n.announce(0, 0, 1)
            await n.until(lambda: n.log(0) == "ready\n", "record")
            os.kill(n.pid(0), signal.SIGKILL)
            await n.event(WorkerExited, worker=0)
            await n.announce(1, 2, 1)
            await n.until(lambda: n.log(2).count("\n") == 6, "fetch")
            assert n.log(2).splitlines() == [
                "7 b'start of 4' | start of step 4, kept by worker 0",
                "7 b'gate of 5' | gate of step 5, kept by worker 0",
                f"7 None | no record of rank 0 fits the lineage {'c' * 32}: kept are steps [4, 5]",
                "7 None | no record of rank 1 fits the lineage of the start: none is kept on this node",
                "7 b'heard' | ",
                "7 None | no journal of rank 1 is kept on this node",
            ]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ("token='wrong'", "the token does not match this job's"),
        ("version=99", f"the worker speaks protocol 99, this agent {PROTOCOL_VERSION}"),
        ("worker=7", "this node has no living worker 7"),
    ],
)
def test_a_hello_that_is_not_right_is_refused_with_the_reason(node: Any, changed: str, reason: str) -> None:
    code = f"""
import worker_side
c = worker_side.Connection({changed})
print(c.receive().reason)
print(c.receive())
worker_side.park().receive()"""

    async def story() -> None:
        async with node(code) as n:
            await n.start(0)
            assert n.log(0).splitlines() == [reason, "None"]

    asyncio.run(story())


def test_a_process_outside_the_worker_may_not_speak_for_it_in_spite_of_the_token(node: Any) -> None:
    async def story() -> None:
        async with node(LISTEN) as n:
            await n.start(0)
            path = n.agent._socket_dir / "agent.sock"
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700 and len(str(path)) < 60

            def speak() -> Any:
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.settimeout(10)
                    sock.connect(str(path))
                    hello = Hello(
                        version=PROTOCOL_VERSION, token=n.token, worker=0, pid=n.pid(0), role="store"
                    )
                    framing.send_frame(sock, codec.encode(hello))
                    return codec.decode(framing.recv_frame(sock) or b"")

            answer = await asyncio.to_thread(speak)
            assert answer == Fenced(reason=f"process {os.getpid()} does not belong to worker 0")

    asyncio.run(story())


@pytest.mark.parametrize(
    "junk",
    [
        "c.sock.sendall(b'\\xff\\xff\\xff\\xff')",  # a frame of 4 GiB
        "c.sock.sendall(b'\\x00\\x00\\x00\\x05' + b'{nope')",
        "c.send(WorkerParked(worker=1, readiness='warm'))",  # speaks for another
        "c.send(worker_side.Hello(version=1, token='', worker=0, pid=1, role='store'))",
    ],
)
def test_a_worker_that_breaks_the_protocol_loses_its_connection_and_nothing_else(
    node: Any, junk: str
) -> None:
    code = f"""
import worker_side
from keepstep.core.events import WorkerParked
if worker_side.WORKER == 0:
    c = worker_side.park()
    {junk}
    print(c.receive())
worker_side.park().receive()"""

    async def story() -> None:
        async with node(code) as n:
            await n.start(0, 1)
            await n.until(lambda: n.log(0) == "None\n", "the connection lives on")
            parked = [e.worker for e in n.events if isinstance(e, WorkerParked)]
            assert parked.count(1) == 1

    asyncio.run(story())


def test_pages_lie_in_shared_memory_and_no_other_user_can_read_them(node: Any) -> None:
    async def story() -> None:
        async with node(LISTEN) as n:
            await n.start(0)
            page = n.page_dir / "worker-0.page"
            assert stat.S_IMODE(page.stat().st_mode) == 0o600
            assert all(stat.S_IMODE(Path(p).stat().st_mode) == 0o700 for p in (n.page_dir, n.page_dir.parent))

    asyncio.run(story())


ADVANCE = """
import worker_side
c, p = worker_side.park(), worker_side.page()
while (m := c.receive()):
    p.generation = m.generation.number
    p.step, p.published = 10 * p.generation + 9, 10 * p.generation + 8
    print("in", p.generation)
"""


def test_the_page_of_a_dead_worker_is_kept_until_its_successor_has_records_of_its_own(node: Any) -> None:
    async def story() -> None:
        async with node(ADVANCE) as n:
            await n.start(0, 1, 2)
            await n.announce(0, 0, 1)
            await n.until(lambda: "in 0" in n.log(1), "generation 0")
            os.kill(n.pid(1), signal.SIGKILL)
            await n.event(WorkerExited, worker=1)
            kept = [n.page_dir / "worker-1.page", n.page_dir / "worker-0.page"]
            for generation in (1, 2):
                await n.announce(generation, 0, 2)
                await n.until(lambda g=generation: f"in {g}" in n.log(2), "generation")
            assert all(path.exists() for path in kept)
            await n.announce(3, 0, 2)
            await n.until(lambda: not kept[0].exists(), "the page stays")
            assert kept[1].exists()

    asyncio.run(story())


def test_a_fresh_world_does_not_count_what_the_one_before_had_published(node: Any) -> None:
    code = ADVANCE.replace("10 * p.generation + 8", "58 if p.generation == 5 else 1")

    async def story() -> None:
        async with node(code) as n:
            await n.start(0, 1, 2)
            await n.announce(5, 0, fresh=True)
            await n.until(lambda: "in 5" in n.log(0), "generation 5")
            os.kill(n.pid(0), signal.SIGKILL)
            assert (await n.event(WorkerExited, worker=0)).published == 58
            await n.announce(6, 2, fresh=True)
            await n.until(lambda: "in 6" in n.log(1) and "in 6" in n.log(2), "generation 6")
            os.kill(n.pid(1), signal.SIGKILL)
            assert (await n.event(WorkerExited, worker=1)).published == 1

    asyncio.run(story())

"""A node is killed whole: what it alone knew is on another node, and the job goes on there bit for bit."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from keepstep.agent.peer_call import call
from keepstep.cli.reports import compare, read_reports
from keepstep.core.actions import Release
from keepstep.core.events import (
    Complained,
    KeeperMissed,
    KeeperRegained,
    Resumed,
    StateReceived,
    WorkerFinished,
)
from keepstep.wire.messages import PeerFetch
from tests.integration.jobs import DDP, SCRIPT, reference

pytestmark = pytest.mark.integration


def listening(pid: int) -> set[str]:
    """The addresses at which a process listens for TCP, as hexadecimal text of the kernel's."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(link))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1].split(":")[0])
    return found


@pytest.mark.timeout(240)
def test_the_record_of_a_killed_node_is_on_its_keeper_and_the_rank_goes_on_bit_for_bit(
    nodes: Any, references: Path
) -> None:
    async def story() -> None:
        spec = {"script": str(SCRIPT), "args": (*DDP, "--step-s", "0.02"), "world_size": 2}
        async with nodes(**spec) as n:
            for number, node in enumerate(("a", "b", "c")):
                await n.add(node, f"127.0.0.{number + 2}", labels={"rack": node})
            assert n.hellos["b"].labels == {"rack": "b"} and n.hellos["b"].peer.startswith("127.0.0.3:")
            await n.start(a=[0], b=[1], c=[2])
            await n.announce(0, 1, fresh=True, store="a")
            with n.page(1) as page, n.page(0) as other:
                await n.until(lambda: page.published > 8, "8 steps")
                assert not any(isinstance(event, KeeperMissed) for event in n.events)
                # Whatever listens in a node's agent and workers does so at the node's own address.
                for node, address in (("a", "0200007F"), ("b", "0300007F")):
                    assert [listening(pid) for pid in n.pids(node)] == [{address}] * 2

                n.kill("b")
                await n.event(Complained, worker=0)
                # Its newest record, as the file that a real loss would have taken with it still shows it.
                newest = next(record for record in page.records() if record.kind == "gate")
                question = PeerFetch(what="record", rank=1, lineage=newest.lineage)
                peer = n.hellos["c"].peer
                kept = await call(peer, question, token=n.token, node="test", timeout_s=10)
                assert kept.data == newest.payload and kept.step == newest.step
                assert kept.worker == 1 and other.step in (newest.step, newest.step - 1)

            await n.announce(0, 2, lost="b", store="c")
            received = await n.event(StateReceived, worker=2)
            assert received.bit_exact and received.sources == (0,)
            await n.event(Resumed, worker=0, generation=1)
            await n.event(WorkerFinished, worker=0)
            await n.event(WorkerFinished, worker=2)

            undisturbed = reference(references, DDP, 2)
            comparison = compare(undisturbed.reports, read_reports(n.run_dir))
            assert comparison.identical, f"{comparison.difference}\n{n.logs()}"

    asyncio.run(story())


@pytest.mark.timeout(180)
def test_a_stopped_keeper_delays_one_step_and_its_rank_is_said_to_be_held_nowhere_else(nodes: Any) -> None:
    async def story() -> None:
        spec = {"script": str(SCRIPT), "args": ("--no-loader", "--until", "100000"), "world_size": 1}
        async with nodes(**spec) as n:
            for number, node in enumerate(("a", "b")):
                await n.add(node, f"127.0.0.{number + 2}")
            await n.start(a=[0])
            await n.announce(0, fresh=True, store="a")
            with n.page(0) as page:
                await n.until(lambda: page.step > 10, "10 steps")
                n.agents["b"].send_signal(signal.SIGSTOP)
                missed = await n.event(KeeperMissed, worker=0)
                assert missed.reason == "b did not acknowledge them within 0.2 s"
                step = page.step
                await n.until(lambda: page.step > step + 20, "steps without a keeper")
                n.agents["b"].send_signal(signal.SIGCONT)
                await n.event(KeeperRegained, worker=0)
                assert [type(e) for e in n.events].count(KeeperMissed) == 1
            await n.send("a", Release(workers=(0,)))

    asyncio.run(story())

"""A worker that lies is cut off and reported, so that the controller can fence it; an honest one is never doubted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from keepstep.core.events import Complained, WorkerSuspected

pytestmark = pytest.mark.integration

LIE = """
import worker_side
from keepstep.core.events import Complained, FingerprintTaken, Resumed, StateReceived, WorkerExited
from keepstep.wire.messages import JournalKept
c = worker_side.park()
c.receive()
c.send({lie})
print("closed", c.receive(), flush=True)
"""

LIES = {
    'Complained(worker=0, generation=0, reason="of another")': "worker 1 speaks for worker 0",
    'Complained(worker=1, generation=7, reason="")': "generation 7 was never announced, the newest is 0",
    'Complained(worker=1, generation=0, reason="", step=-1)': "step cannot be -1",
    'FingerprintTaken(worker=1, rank=2, step=1, shard="", digest="")': "there is no rank 2 in a world of 2",
    'FingerprintTaken(worker=1, rank=0, step=1, shard="", digest="")': "plays rank 1 and speaks for rank 0",
    'JournalKept(worker=1, rank=0, data=b"")': "plays rank 1 and speaks for rank 0",
    "StateReceived(worker=1, generation=0, transfer_s=0.1, bytes=-4, sources=())": "bytes cannot be -4",
    "Resumed(worker=1, generation=0, step=1 << 60)": "step cannot be 1152921504606846976",
    "WorkerExited(worker=1, status=0)": "WorkerExited is nothing that a worker may say",
}


@pytest.mark.parametrize(("lie", "said"), LIES.items(), ids=[str(n) for n in range(len(LIES))])
def test_a_lie_is_refused_and_said(node: Any, lie: str, said: str) -> None:
    async def story() -> None:
        async with node(LIE.format(lie=lie), world_size=2) as n:
            await n.start(0, 1)
            await n.announce(0, 0, 1, fresh=True)
            suspected = await n.event(WorkerSuspected, worker=1)
            assert suspected.reason.startswith("it breaks the protocol: ") and said in suspected.reason
            await n.until(lambda: "closed None" in n.log(1), "the liar's connection to be cut")

    asyncio.run(story())


def test_the_truth_is_passed_on(node: Any) -> None:
    async def story() -> None:
        truth = 'Complained(worker=worker_side.WORKER, generation=0, reason="a peer is gone", step=3)'
        async with node(LIE.format(lie=truth), world_size=2) as n:
            await n.start(0, 1)
            await n.announce(0, 0, 1, fresh=True)
            await n.event(Complained, worker=0, reason="a peer is gone")
            await n.event(Complained, worker=1, reason="a peer is gone")

    asyncio.run(story())

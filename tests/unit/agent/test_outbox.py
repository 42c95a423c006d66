"""What waits for the controller is bounded, and what matters stays."""

from __future__ import annotations

import asyncio

from keepstep.agent.outbox import Outbox
from keepstep.core.events import Complained, Event, NodeProgressed, NodeResumed, Resumed, WorkerExited


def progress(step: int, *workers: int, generation: int = 0) -> NodeProgressed:
    steps = dict.fromkeys(workers or (0,), step)
    return NodeProgressed(node="a", generation=generation, published=step, steps=steps)


async def drained(outbox: Outbox) -> list[Event]:
    found = []
    while len(outbox):
        ticket, event = await outbox.first()
        found.append(event)
        outbox.done(ticket)
    return found


def test_a_newer_progress_takes_in_the_older_one() -> None:
    outbox = Outbox()
    outbox.put(progress(3, 7))
    for step in range(1000):
        outbox.put(progress(step, 0, 1))
    newest = NodeProgressed(node="a", generation=0, published=999, steps={7: 3, 0: 999, 1: 999})
    assert asyncio.run(drained(outbox)) == [newest]


def test_progress_of_an_older_generation_is_not_mixed_in() -> None:
    outbox = Outbox()
    outbox.put(progress(9, 7))
    outbox.put(progress(4, 0, generation=1))
    assert asyncio.run(drained(outbox)) == [progress(4, 0, generation=1)]


def test_exits_and_complaints_stay_when_the_box_is_full() -> None:
    outbox = Outbox(limit=4)
    exits = [WorkerExited(worker=w, status=1) for w in range(5)]
    complaint = Complained(worker=1, generation=0, reason="gone")
    outbox.put(progress(1, 7))
    outbox.put(Resumed(worker=0, generation=0, step=1))
    for event in [complaint, *exits]:
        outbox.put(event)
    assert outbox.dropped == 2
    assert asyncio.run(drained(outbox)) == [complaint, *exits]


def test_an_event_stays_until_it_was_sent() -> None:
    async def story() -> None:
        outbox = Outbox()
        waiting = asyncio.create_task(outbox.first())
        await asyncio.sleep(0)
        outbox.put(progress(1))
        ticket, _ = await asyncio.wait_for(waiting, 5)
        outbox.put(progress(2))  # replaced while it was being sent: the newer one is still to come
        outbox.done(ticket)
        assert await drained(outbox) == [progress(2)]

    asyncio.run(story())


def test_workers_that_return_together_are_told_as_one_and_nothing_else_waits_for_them() -> None:
    async def story() -> None:
        outbox = Outbox()
        back = [Resumed(worker=worker, generation=1, step=4) for worker in range(3)]
        outbox.put(back[0])
        others = asyncio.create_task(outbox.next("a", others_s=60))
        await asyncio.sleep(0)
        outbox.put(back[1])
        ended = WorkerExited(worker=9, status=-9)
        outbox.put(ended)  # ends the wait of a minute at once
        outbox.put(back[2])
        tickets, event = await asyncio.wait_for(others, 20)
        assert event == NodeResumed(node="a", generation=1, steps={0: 4, 1: 4})
        outbox.done(*tickets)
        tickets, event = await outbox.next("a", others_s=60)
        assert event == ended
        outbox.done(*tickets)
        tickets, event = await outbox.next("a", others_s=0)
        assert event == back[2]

    asyncio.run(story())

"""What waits for the controller is bounded, and what matters stays."""

from __future__ import annotations

import asyncio

from keepstep.agent.outbox import Outbox
from keepstep.core.events import Complained, Event, Progressed, Resumed, WorkerExited


def progress(worker: int, step: int) -> Progressed:
    return Progressed(worker=worker, generation=0, step=step, published=step)


async def drained(outbox: Outbox) -> list[Event]:
    found = []
    while len(outbox):
        ticket, event = await outbox.first()
        found.append(event)
        outbox.done(ticket)
    return found


def test_a_newer_progress_replaces_the_older_one() -> None:
    outbox = Outbox()
    for step in range(1000):
        outbox.put(progress(0, step))
    outbox.put(progress(1, 5))
    assert asyncio.run(drained(outbox)) == [progress(0, 999), progress(1, 5)]


def test_exits_and_complaints_stay_when_the_box_is_full() -> None:
    outbox = Outbox(limit=4)
    exits = [WorkerExited(worker=w, status=1) for w in range(5)]
    complaint = Complained(worker=1, generation=0, reason="gone")
    outbox.put(progress(7, 1))
    outbox.put(progress(8, 1))
    outbox.put(Resumed(worker=0, generation=0, step=1))
    for event in [complaint, *exits]:
        outbox.put(event)
    assert outbox.dropped == 3
    assert asyncio.run(drained(outbox)) == [complaint, *exits]


def test_an_event_stays_until_it_was_sent() -> None:
    async def story() -> None:
        outbox = Outbox()
        waiting = asyncio.create_task(outbox.first())
        await asyncio.sleep(0)
        outbox.put(progress(0, 1))
        ticket, _ = await asyncio.wait_for(waiting, 5)
        outbox.put(progress(0, 2))  # replaced while it was being sent: the newer one is still to come
        outbox.done(ticket)
        assert await drained(outbox) == [progress(0, 2)]

    asyncio.run(story())

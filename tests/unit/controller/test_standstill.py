"""When no rank moves, the controller finds out who is waited for; while steps go on it asks nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from keepstep.controller import standstill
from keepstep.controller.inquiry import Inquiries
from keepstep.controller.standstill import Standstill
from keepstep.core.events import NodeProgressed
from keepstep.wire.messages import Answer


def stand(rank: int, entered: int, phase: str = "STEP") -> dict[str, Any]:
    calls = [[n, "allreduce", 8, n == 5, None] for n in range(1, entered + 1)]
    group = {
        "identity": "g",
        "label": "0-1-2",
        "size": 3,
        "group_rank": rank,
        "entered": entered,
        "calls": calls,
    }
    return {
        "rank": rank,
        "worker": 10 + rank,
        "alive": True,
        "step": 7,
        "phase": phase,
        "state": "S",
        "at": "",
        "ended": "",
        "waited_s": 9.0,
        "stacks_from": "",
        "groups": [group],
    }


class Nodes:
    """Two nodes that answer; what they were asked is kept."""

    def __init__(self, *stands: dict[str, Any]) -> None:
        self.asked: list[tuple[str, str, Mapping[str, Any]]] = []
        self.stands = {"a": stands[:2], "b": stands[2:]}

    async def ask(self, node: str, what: str, about: Mapping[str, Any], timeout_s: float) -> Answer:
        self.asked.append((node, what, about))
        if node == "b" and what == "evidence":
            return Answer(request=1, ok=False, detail="the agent of b did not answer within 8 s")
        told = {"node": node, "workers": list(self.stands[node]), "folders": {}, "folder": "f", "notable": []}
        return Answer(request=1, ok=True, data=json.dumps(told).encode())

    def said(self, what: str) -> list[tuple[str, Mapping[str, Any]]]:
        return [(node, about) for node, asked, about in self.asked if asked == what]


async def within(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def play(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(story())  # type: ignore[arg-type]


def moved(step: int) -> NodeProgressed:
    return NodeProgressed(node="a", generation=0, published=step, steps={10: step})


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "STILL_S", 0.3)
    monkeypatch.setattr(standstill, "CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(standstill, "SAY_AFTER_S", 0.0)
    monkeypatch.setattr(standstill, "PACE_FACTOR", 1.0)


def test_the_node_of_the_rank_that_is_waited_for_hears_of_it() -> None:
    async def story() -> None:
        nodes, said = Nodes(stand(0, 5), stand(1, 5), stand(2, 4)), []
        watch = Standstill(ask=nodes.ask, nodes=lambda: ["a", "b"], say=lambda text, level: said.append(text))
        watch.saw(moved(7))
        await within(lambda: nodes.said("waited-for") and said)
        assert nodes.said("waited-for")[0] == ("b", {"workers": [12]})
        assert "rank 2 had not entered all_reduce #5" in said[0] and len(said) == 1
        watch.close()

    play(story)


def test_nobody_is_asked_while_steps_go_on_nor_told_when_nobody_is_missing() -> None:
    async def story() -> None:
        nodes = Nodes(stand(0, 5), stand(1, 5), stand(2, 5))
        watch = Standstill(ask=nodes.ask, nodes=lambda: ["a", "b"], say=lambda *_: None)
        for step in range(30):
            watch.saw(moved(step))
            await asyncio.sleep(0.02)
        assert not nodes.asked
        await within(lambda: len(nodes.said("stands")) >= 2)
        await asyncio.sleep(0.1)
        assert not nodes.said("waited-for")
        watch.close()

    play(story)


def test_a_slow_job_is_given_its_own_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "PACE_FACTOR", 4.0)
    watch = Standstill(ask=Nodes().ask, nodes=list, say=lambda *_: None)
    watch._intervals.append(40.0)
    assert watch.patience_s() == 160.0


def test_an_inquiry_names_who_stood_outside_and_which_node_gave_nothing() -> None:
    async def story() -> None:
        nodes, notes = Nodes(stand(0, 5), stand(1, 4)), []
        inquiries = Inquiries(ask=nodes.ask, nodes=lambda: ["a", "b"], note=notes.append, say=lambda *_: None)
        inquiries.wrote("generation", {"number": 3})
        inquiries.wrote("incident", {"number": 1, "reason": "r"})
        inquiries.wrote("generation", {"number": 4})
        inquiries.wrote("incident_closed", {"number": 1})
        await within(lambda: notes)
        (note,) = notes
        assert note["generation"] == 3 and note["blame"]["ranks"] == [1]
        assert nodes.said("evidence")[0][1] == {"incident": 1, "generation": 3, "reason": "r"}
        assert note["nodes"][1] == {"node": "b", "error": "the agent of b did not answer within 8 s"}
        assert [entry["rank"] for entry in note["stands"]] == [0, 1]

    play(story)


def test_a_job_that_ends_with_an_incident_still_asks_and_waits_a_bounded_time() -> None:
    async def story() -> None:
        nodes, notes = Nodes(stand(0, 5), stand(1, 5)), []
        inquiries = Inquiries(ask=nodes.ask, nodes=lambda: ["a"], note=notes.append, say=lambda *_: None)
        inquiries.wrote("generation", {"number": 0})
        inquiries.wrote("incident", {"number": 1, "reason": "r"})
        async with asyncio.timeout(5):
            await inquiries.finish(4.0)
        assert len(notes) == 1

        async def never(*_: Any) -> Answer:
            await asyncio.Event().wait()
            raise AssertionError

        stuck = Inquiries(ask=never, nodes=lambda: ["a"], note=notes.append, say=lambda *_: None)
        stuck.wrote("generation", {"number": 0})
        stuck.wrote("incident", {"number": 1, "reason": "r"})
        async with asyncio.timeout(5):
            await stuck.finish(0.2)
        assert len(notes) == 1

    play(story)

"""The generation's store answers as torch's Store does, blocks without holding up others, and is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from keepstep.agent import store as module
from keepstep.agent.store import GenerationStore
from keepstep.wire.messages import StoreReply, StoreRequest


class Client:
    """Asks the store directly; `answers` are in the order of their coming."""

    def __init__(self, store: GenerationStore) -> None:
        self.store = store
        self.answers: list[StoreReply] = []
        self.give_up: Callable[[], None] | None = None
        self._number = 0

    def ask(self, op: Any, *keys: str, **fields: Any) -> StoreReply | None:
        """The reply, or None while the request waits."""
        self._number += 1
        before = len(self.answers)
        request = StoreRequest(request=self._number, op=op, keys=keys, **fields)
        self.give_up = self.store.serve(request, self.answers.append)
        assert (self.give_up is None) == (len(self.answers) > before)
        return self.answers[-1] if len(self.answers) > before else None


def run(story: Callable[[Client], Awaitable[None]]) -> None:
    async def wrapped() -> None:
        await story(Client(GenerationStore()))

    asyncio.run(wrapped())


def test_what_was_set_is_there() -> None:
    async def story(c: Client) -> None:
        c.ask("set", "g0/a", value=b"\x00\xff")
        c.ask("set", "g0/b", value=b"")
        reply = c.ask("get", "g0/a", "g0/b")
        assert reply is not None and reply.ok and reply.values == (b"\x00\xff", b"")
        assert c.ask("num_keys").number == 2
        assert c.ask("num_keys", "g1/").number == 0

    run(story)


def test_a_get_waits_for_all_its_keys_and_others_are_served_meanwhile() -> None:
    async def story(c: Client) -> None:
        assert c.ask("get", "g0/a", "g0/b", timeout_s=5) is None
        assert c.ask("set", "g0/b", value=b"2").ok
        assert len(c.answers) == 1
        c.ask("set", "g0/a", value=b"1")
        assert [answer.request for answer in c.answers] == [2, 1, 3]
        assert c.answers[1].values == (b"1", b"2")

    run(story)


def test_a_wait_ends_at_its_deadline() -> None:
    async def story(c: Client) -> None:
        assert c.ask("wait", "g0/a", timeout_s=0.05) is None
        await asyncio.sleep(0.3)
        assert [(a.ok, a.detail) for a in c.answers] == [(False, "timeout")]
        assert not c.store._waits and c.store._wait_count == 0
        assert c.ask("wait", "g0/a", timeout_s=0).detail == "timeout"

    run(story)


def test_a_closed_connection_leaves_no_wait_behind() -> None:
    async def story(c: Client) -> None:
        c.ask("get", "g0/a", "g0/b", timeout_s=50)
        assert c.give_up is not None
        c.give_up()
        c.give_up()
        assert not c.store._waits and c.store._wait_count == 0
        c.ask("set", "g0/a", value=b"1")
        assert len(c.answers) == 1

    run(story)


def test_add_counts_in_decimal_text() -> None:
    async def story(c: Client) -> None:
        assert c.ask("add", "g0/n", amount=3).number == 3
        assert c.ask("add", "g0/n", amount=-5).number == -2
        assert c.ask("get", "g0/n").values == (b"-2",)
        c.ask("set", "g0/n", value=b"x")
        assert not c.ask("add", "g0/n", amount=1).ok
        c.ask("set", "g0/n", value=str((1 << 63) - 1).encode())
        assert "64 bits" in c.ask("add", "g0/n", amount=1).detail

    run(story)


def test_compare_set_follows_torch() -> None:
    async def story(c: Client) -> None:
        assert c.ask("compare_set", "g0/a", expected=b"x", value=b"1").values == (b"x",)
        assert c.ask("check", "g0/a").number == 0
        assert c.ask("compare_set", "g0/a", expected=b"", value=b"1").values == (b"1",)
        assert c.ask("compare_set", "g0/a", expected=b"", value=b"2").values == (b"1",)
        assert c.ask("compare_set", "g0/a", expected=b"1", value=b"2").values == (b"2",)

    run(story)


def test_keys_of_past_generations_are_dropped_and_their_waiters_told() -> None:
    async def story(c: Client) -> None:
        for generation in (1, 2, 3):
            c.ask("set", f"g{generation}/a", value=b"1")
        c.ask("set", "job/a", value=b"1")
        assert c.ask("get", "g1/b", timeout_s=50) is None
        c.store.announce(3)
        assert c.answers[-1].detail == "this generation is over"
        assert c.ask("get", "g1/a", timeout_s=50).detail == "this generation is over"
        assert c.ask("set", "g1/a", value=b"2").detail == "this generation is over"
        assert c.ask("num_keys").number == 3
        c.store.announce(2)
        assert c.ask("check", "g2/a").number == 1

    run(story)


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KEYS", 2)
    monkeypatch.setattr(module, "MAX_VALUE_BYTES", 10)
    monkeypatch.setattr(module, "MAX_STORE_BYTES", 15)
    monkeypatch.setattr(module, "MAX_WAITS", 1)

    async def story(c: Client) -> None:
        assert "larger than 10" in c.ask("set", "g0/a", value=b"x" * 11).detail
        assert c.ask("set", "g0/a", value=b"x" * 10).ok
        assert "more than 15 bytes" in c.ask("set", "g0/b", value=b"x" * 6).detail
        assert c.ask("set", "g0/a", value=b"x").ok
        assert c.ask("set", "g0/b", value=b"x" * 10).ok
        assert "2 keys" in c.ask("set", "g0/c", value=b"").detail
        assert c.ask("delete", "g0/a", "g0/z").number == 1
        assert c.ask("set", "g0/c", value=b"").ok
        assert c.ask("wait", "g0/y", timeout_s=50) is None
        assert "waiting" in c.ask("wait", "g0/z", timeout_s=50).detail
        assert "characters" in c.ask("set", "g0/" + "k" * 5000).detail

    run(story)


@pytest.mark.parametrize(("op", "keys"), [("set", ()), ("set", ("a", "b")), ("get", ()), ("check", ("",))])
def test_requests_without_sense_are_refused(op: str, keys: tuple[str, ...]) -> None:
    async def story(c: Client) -> None:
        reply = c.ask(op, *keys)
        assert reply is not None and not reply.ok and reply.detail

    run(story)

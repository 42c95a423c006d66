"""Clocks and links between nodes, measured over real sockets by two agents' own answerers."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

from keepstep.agent.measuring import Measuring
from keepstep.agent.questions import Questions
from keepstep.controller.measuring import measure_clocks, measure_link, measure_network
from keepstep.wire.messages import Answer, Ask


class Nodes:
    """Agents without their connection to a controller: node -> its answers."""

    def __init__(self, **addresses: str) -> None:
        self.questions = {node: Questions() for node in addresses}
        for node, address in addresses.items():
            Measuring(address).answer(self.questions[node])
        self.busy: set[str] = set()

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self.questions)

    async def ask(self, node: str, what: str, about: Mapping[str, Any], timeout_s: float) -> Answer:
        return await self.questions[node].answer(Ask(request=1, what=what, about=about))


def test_a_ring_of_nodes_is_measured_each_sends_and_receives_once() -> None:
    nodes = Nodes(a="127.0.0.1", b="127.0.0.2", c="127.0.0.3")
    links = asyncio.run(measure_network(nodes))
    assert {(link["from"], link["to"]) for link in links} == {("a", "b"), ("b", "c"), ("c", "a")}
    for link in links:
        assert link["detail"] == ""
        assert link["bytes_per_s"] > 1e6
        assert 0 < link["latency_s"] < 1


def test_one_node_has_no_network() -> None:
    assert asyncio.run(measure_network(Nodes(a="127.0.0.1"))) == []


def test_a_node_that_cannot_be_reached_is_told_with_its_address() -> None:
    class Unreachable(Nodes):
        async def ask(self, node: str, what: str, about: Mapping[str, Any], timeout_s: float) -> Answer:
            if what == "link.listen":
                with socket.socket() as taken:
                    taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
                    place = {"host": "127.0.0.1", "port": taken.getsockname()[1]}
                return Answer(request=1, ok=True, data=json.dumps(place).encode())
            return await super().ask(node, what, about, timeout_s)

    link = asyncio.run(measure_link(Unreachable(a="127.0.0.1", b="127.0.0.2"), "a", "b"))
    assert link["bytes_per_s"] is None
    assert "cannot send to b (127.0.0.1 port" in link["detail"]
    assert "ConnectionRefusedError" in link["detail"]


def test_a_listener_hangs_up_on_whoever_does_not_know_the_secret_and_serves_who_does() -> None:
    async def story() -> dict[str, Any]:
        nodes, secret = Nodes(a="127.0.0.1"), secrets.token_hex(32)
        place = json.loads((await nodes.ask("a", "link.listen", {"secret": secret}, 5)).data)

        def stranger() -> bytes:
            with socket.create_connection((place["host"], place["port"]), 5) as connection:
                connection.sendall(bytes(32))
                return connection.recv(1)

        assert await asyncio.to_thread(stranger) == b""
        about = {**place, "secret": secret, "bytes": 1 << 20, "seconds": 1.0}
        return json.loads((await nodes.ask("a", "link.send", about, 5)).data)

    assert asyncio.run(story())["bytes"] == 1 << 20


def test_nobody_listens_after_a_measurement() -> None:
    async def story() -> int:
        nodes, secret = Nodes(a="127.0.0.1"), secrets.token_hex(32)
        place = json.loads((await nodes.ask("a", "link.listen", {"secret": secret}, 5)).data)
        about = {**place, "secret": secret, "bytes": 1, "seconds": 1.0}
        await nodes.ask("a", "link.send", about, 5)
        until_s = time.monotonic() + 10
        while time.monotonic() < until_s:
            with socket.socket() as probe:
                if probe.connect_ex((place["host"], place["port"])):
                    return 0
            await asyncio.sleep(0.01)
        return 1

    assert asyncio.run(story()) == 0


def test_a_clock_is_told_with_the_error_of_its_measurement() -> None:
    (clock,) = asyncio.run(measure_clocks(Nodes(a="127.0.0.1")))
    assert clock["detail"] == ""
    assert abs(clock["ahead_s"]) <= clock["error_s"] + 0.001

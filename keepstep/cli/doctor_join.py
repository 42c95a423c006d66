"""What `keepstep doctor --join` asks of a controller: is it there, how do the clocks stand, how fast are the links."""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from keepstep.cli.addresses import Endpoint
from keepstep.cli.doctor_checks import Check, Outcome
from keepstep.cli.meeting import NotThere, connection_to, meet
from keepstep.core.replica_words import size
from keepstep.errors import UsageError
from keepstep.wire.tls import TlsFiles

CLOCK_TRIES = 8
FAR_CLOCK_S = 0.1
SLOW_LINK_BYTES_PER_S, BAD_LINK_BYTES_PER_S = 100e6, 10e6
SLOWER_THAN_MOST = 0.5
HIGH_LATENCY_S = 0.005
TIMEOUT_S = 15.0


class Controller:
    """One controller, asked over one connection."""

    def __init__(self, endpoint: Endpoint, token: str, tls: TlsFiles | None) -> None:
        self._endpoint, self._token, self._tls = endpoint, token, tls

    def checks(self) -> Iterator[Check]:
        """All that it says. A controller that is not there is one failed check."""
        name = f"controller {self._endpoint}"
        try:
            meeting = meet(self._endpoint, self._token, self._tls)
        except (NotThere, UsageError) as error:
            yield Check(name, "failed", str(error), "is it running, and is there a firewall between?")
            return
        yield Check(name, "ok", f"serves job {meeting.job}; this machine is {meeting.local_address} there")
        try:
            yield self._clock()
            yield from judge_network(self._ask("POST", "/api/network"))
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            yield Check(name, "failed", f"stopped answering: {error}", "see its log")

    def _ask(self, method: str, path: str) -> Any:
        connection = connection_to(self._endpoint, self._tls, TIMEOUT_S)
        try:
            connection.request(method, path, headers={"Authorization": f"Bearer {self._token}"})
            answer = connection.getresponse()
            value = json.loads(answer.read(16 << 20))
        finally:
            connection.close()
        if answer.status != 200:
            raise ValueError(value.get("error", f"HTTP status {answer.status}"))
        return value

    def _clock(self) -> Check:
        """From the middle between question and answer; at most half of the round trip wrong."""
        connection = connection_to(self._endpoint, self._tls, TIMEOUT_S)
        best_s, ahead_s = float("inf"), 0.0
        try:
            for _ in range(CLOCK_TRIES):
                before_ns = time.time_ns()
                connection.request("GET", "/api/clock", headers={"Authorization": f"Bearer {self._token}"})
                answer = connection.getresponse()
                value = json.loads(answer.read(1 << 16))
                after_ns = time.time_ns()
                if (after_ns - before_ns) / 2e9 < best_s:
                    best_s = (after_ns - before_ns) / 2e9
                    ahead_s = (int(value["ns"]) - (before_ns + after_ns) // 2) / 1e9
        finally:
            connection.close()
        return _clock_check(
            "clock", f"the controller's is {_ahead(ahead_s, best_s)} of this machine's", ahead_s, best_s
        )


def judge_network(found: dict[str, Any]) -> Iterator[Check]:
    """One line for all clocks and one for all links, and one more for each that stands out."""
    yield from _clocks(found["clocks"])
    yield from _links(found["links"], len(found["nodes"]))


def _clocks(clocks: Sequence[dict[str, Any]]) -> Iterator[Check]:
    told = [one for one in clocks if one["ahead_s"] is not None]
    for one in clocks:
        name = f"clock of {one['node']}"
        if one["ahead_s"] is None:
            yield Check(name, "warning", f"not known: {one['detail']}", "is its agent alive?")
        elif abs(one["ahead_s"]) - one["error_s"] > FAR_CLOCK_S:
            found = f"{_ahead(one['ahead_s'], one['error_s'])} of the controller's"
            yield _clock_check(name, found, one["ahead_s"], one["error_s"])
    if told:
        worst = max(told, key=lambda one: abs(one["ahead_s"]))
        found = (
            f"{len(told)} nodes, at most {1000 * abs(worst['ahead_s']):.1f} ms (± {1000 * worst['error_s']:.1f}) "
            "from the controller's"
        )
        yield Check("clocks of nodes", "ok", found)


def _clock_check(name: str, found: str, ahead_s: float, error_s: float) -> Check:
    far = abs(ahead_s) - error_s > FAR_CLOCK_S
    cure = "synchronise the clocks (chrony): logs and timelines of several nodes are merged by time"
    return Check(name, "warning" if far else "ok", found, cure)


def _ahead(ahead_s: float, error_s: float) -> str:
    word = "ahead" if ahead_s >= 0 else "behind"
    return f"{1000 * abs(ahead_s):.1f} ms (± {1000 * error_s:.1f}) {word}"


def _links(links: Sequence[dict[str, Any]], nodes: int) -> Iterator[Check]:
    if not links:
        yield Check("network", "ok", f"{nodes} node{'s' * (nodes != 1)}: there is no link to measure")
        return
    rates = [link["bytes_per_s"] for link in links if link["bytes_per_s"]]
    middle = statistics.median(rates) if rates else 0.0
    for link in links:
        check = _link(link, middle)
        if check.outcome != "ok" or len(links) <= 4:
            yield check
    if rates:
        latency_s = max(link["latency_s"] for link in links if link["bytes_per_s"])
        found = (
            f"{len(rates)} of {len(links)} links, each node to its next: {size(int(min(rates)))}/s to "
            f"{size(int(max(rates)))}/s, round trips up to {1000 * latency_s:.2f} ms"
        )
        yield Check("network", "ok" if len(rates) == len(links) else "failed", found, "see the links above")


def _link(link: dict[str, Any], middle: float) -> Check:
    name, rate = f"{link['from']} to {link['to']}", link["bytes_per_s"]
    if not rate:
        cure = "nodes need each other's TCP ports, any of them: open the firewall between the nodes"
        return Check(name, "failed", str(link["detail"]), cure)
    found = f"{size(int(rate))}/s, round trip {1000 * link['latency_s']:.2f} ms"
    outcome: Outcome = "ok"
    cure = "look at cable, switch port and --advertise: is this the network that was meant?"
    if rate < BAD_LINK_BYTES_PER_S:
        outcome = "failed"
    elif (
        rate < SLOW_LINK_BYTES_PER_S or rate < SLOWER_THAN_MOST * middle or link["latency_s"] > HIGH_LATENCY_S
    ):
        outcome = "warning"
        found += f"; most have {size(int(middle))}/s"
    return Check(name, outcome, found, cure)

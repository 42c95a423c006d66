"""Which agents the controller takes, and which of their reports it believes.

An agent must be reachable where it says that others reach it; a name belongs to one agent at a time; a report
about another node's worker, or one that cannot be true, ends the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.websockets import WebSocket

from keepstep.controller.agents import CLOSED_PROTOCOL, CLOSED_TAKEN, CLOSED_UNREACHABLE, AgentLink, refuse
from keepstep.core.actions import Announce
from keepstep.core.claims import doubt
from keepstep.errors import WireError
from keepstep.wire.address import parse_address
from keepstep.wire.messages import AgentHello

REACH_TIMEOUT_S = 2.5  # the agent waits 5 s for its welcome
ALIVE_S = 2.0  # several heartbeats
MAX_SLOTS = 8192
MAX_LABELS = 64
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


class Objection(Exception):  # noqa: N818 - says what it is
    """Why an agent is not taken: `code` and `short` for the agent, the text for people here."""

    def __init__(self, code: int, short: str, text: str = "") -> None:
        super().__init__(text or short)
        self.code, self.short = code, short


def check_hello(hello: AgentHello) -> None:
    """What an agent says of itself becomes file names and numbers here. Raises Objection."""
    if not _PLAIN.fullmatch(hello.node):
        raise Objection(CLOSED_PROTOCOL, "a node's name is 1 to 64 letters, digits, - _ or .")
    if not 0 < hello.slots <= MAX_SLOTS:
        raise Objection(CLOSED_PROTOCOL, f"a node offers 1 to {MAX_SLOTS} slots, not {hello.slots}")
    sizes = [len(text) for pair in hello.labels.items() for text in pair]
    if len(hello.labels) > MAX_LABELS or max(sizes, default=0) > 256:
        raise Objection(CLOSED_PROTOCOL, f"a node has at most {MAX_LABELS} labels, of 256 characters")
    if any(number < 0 for number in (*hello.workers, *hello.finished, *hello.exited)):
        raise Objection(CLOSED_PROTOCOL, "workers have numbers from 0 on")
    if hello.peer:
        try:
            parse_address(hello.peer)
        except ValueError:
            raise Objection(CLOSED_PROTOCOL, "its address for others is not HOST:PORT") from None


def check_name(hello: AgentHello, link: AgentLink | None) -> None:
    """One agent under one name; a dead connection does not count. Raises Objection."""
    if link is None or not link.connected or link.pid in (None, hello.pid):
        return
    if time.monotonic() - link.heard_s < ALIVE_S:
        short = f"another agent is connected as {hello.node}: give this one --node"
        raise Objection(CLOSED_TAKEN, short, f"a second agent calls itself {hello.node}: it is refused")


async def check_reachable(hello: AgentHello, seen_from: str) -> None:
    """Others will connect to the agent where it says; one who sits behind a translating router is found here.

    Raises Objection.
    """
    if not hello.peer:
        return
    host, port = parse_address(hello.peer)
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), REACH_TIMEOUT_S)
    except (OSError, TimeoutError) as error:
        why = getattr(error, "strerror", None) or f"no answer in {REACH_TIMEOUT_S:g} s"
        short = f"no connection from here to {hello.peer} (you come from {seen_from}): see --advertise"
        raise Objection(
            CLOSED_UNREACHABLE,
            short,
            f"{hello.node} is refused: it says that others reach it at {hello.peer}, and from here they do not "
            f"({why}); its connection comes from {seen_from}: start it with --advertise ADDRESS",
        ) from None
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class Admission:
    """One job's door. `places`: worker -> node and slot, as the controller knows them."""

    def __init__(
        self, world_size: int, places: Mapping[int, tuple[str, int]], say: Callable[[str, str], None]
    ) -> None:
        self._say = say
        self._newest: int | None = None
        self._world_size = world_size
        self._places = places

    def told(self, action: Announce) -> None:
        """The agents hear of a generation: from now on they may speak of it."""
        self._newest = max(action.generation.number, self._newest or 0)

    async def admits(self, hello: AgentHello, link: AgentLink | None, socket: WebSocket) -> bool:
        """Whether this agent may take part; if not, it is told why and its connection closed."""
        try:
            await self._examine(hello, link, socket)
        except Objection as objection:
            self._say(str(objection), "warning")
            await refuse(socket, objection.code, objection.short)
            return False
        return True

    async def _examine(self, hello: AgentHello, link: AgentLink | None, socket: WebSocket) -> None:
        check_hello(hello)
        for worker in (*hello.workers, *hello.finished, *hello.exited):
            node = self._places.get(worker, (hello.node, -1))[0]
            if node != hello.node:
                raise Objection(CLOSED_PROTOCOL, f"worker {worker} lives on {node}, not on {hello.node}")
        check_name(hello, link)
        # Whoever has workers has been here before: its way may be troubled now, which others find out.
        if not hello.workers and (link is None or not link.connected):
            await check_reachable(hello, socket.client.host if socket.client is not None else "somewhere")

    def check(self, node: str, event: Any) -> None:
        """Raises WireError for a report that this agent may not make, or that cannot be true; people hear of it."""
        try:
            self._check(node, event)
        except WireError as error:
            self._say(f"a report is refused: {error}", "error")
            raise

    def _check(self, node: str, event: Any) -> None:
        worker = getattr(event, "worker", None)
        several = getattr(event, "steps", None) or getattr(event, "connected_s", None) or ()
        for one in several if worker is None else (worker, *several):
            place = self._places.get(one)
            if place is not None and place[0] != node:
                raise WireError(f"worker {one} lives on {place[0]}, and {node} speaks for it")
        speaker = getattr(event, "by", None) or getattr(event, "node", node)
        if speaker != node:
            raise WireError(f"{node} speaks for {speaker}")
        reason = doubt(event, world_size=self._world_size, newest=self._newest)
        if reason is not None:
            who = node if worker is None else f"worker {worker}"
            raise WireError(f"{type(event).__name__} of {who}: {reason}")

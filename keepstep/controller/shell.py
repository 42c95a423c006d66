"""The controller: receive an event, step the machine, carry out its actions in order. It decides nothing.

One task steps the machine; everything else (agents, API, signals) only puts events into its queue. An
entry of the ledger is on the disk before the actions that follow it are carried out.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from starlette.websockets import WebSocket

from keepstep.controller import agents as wire_side
from keepstep.controller.admission import Admission
from keepstep.controller.agents import AgentLink
from keepstep.controller.announcing import announced
from keepstep.controller.farewell import Farewell
from keepstep.controller.heartbeats import Heartbeats
from keepstep.controller.incidents import IncidentBook
from keepstep.controller.inquiry import Inquiries
from keepstep.controller.ledger import Ledger, LedgerWriteFailed
from keepstep.controller.measuring import link_measured
from keepstep.controller.metrics import JobMetrics, Meter
from keepstep.controller.standstill import Standstill
from keepstep.controller.view import live_status
from keepstep.core import actions as act
from keepstep.core import events as evt
from keepstep.core.health_events import SignalSeen
from keepstep.core.move_events import DrainRequested, MoveRequested, UndrainRequested
from keepstep.core.silence import DEFAULT_TIMEOUT_S
from keepstep.wire.messages import AgentHello, Answer, JobSpec

log = logging.getLogger("keepstep.controller")

MAX_WAITING_EVENTS = 10_000
YIELD_AFTER = 32  # events without a pause
INQUIRY_TIMEOUT_S = 4.0
BROKEN_EXIT_CODE = 70  # sysexits.h: an internal software error


class Machine(Protocol):
    """What the shell needs of `keepstep.core.job.JobMachine`."""

    def step(self, event: evt.Event, now_s: float) -> list[act.Action]: ...

    def next_deadline_s(self, now_s: float) -> float | None: ...

    def snapshot(self) -> dict[str, Any]: ...

    def replicas(self) -> dict[str, Any]: ...

    def refusal(self, event: MoveRequested | DrainRequested | UndrainRequested) -> str | None: ...


class Controller:
    """One job's controller. `run` returns the job's exit code.

    `say(text, level)` shows one line to people. `heartbeat_timeout_s`: an agent that says nothing for so long
    is silent. `outlived`: should this controller break, agents and training go on without it, and another one
    takes up the ledger; otherwise everything ends with it.
    """

    def __init__(
        self,
        *,
        machine: Machine,
        spec: JobSpec,
        token: str,
        ledger: Ledger,
        say: Callable[[str, str], None],
        heartbeat_timeout_s: float = DEFAULT_TIMEOUT_S,
        outlived: bool = False,
    ) -> None:
        self.token = token
        self.spec = spec
        self.incidents = IncidentBook()
        self._machine = machine
        self._started_s = time.time()
        self._ledger = ledger
        self._say = say
        self._outlived = outlived
        self._abandoned = False
        self._events: asyncio.Queue[evt.Event | act.Persist] = asyncio.Queue(MAX_WAITING_EVENTS)
        self._in_a_row = 0
        self._own_events: collections.deque[evt.Event] = collections.deque()  # of the machine's task itself
        self._links: dict[str, AgentLink] = {}
        self._heartbeats = Heartbeats(self._links, spec, self._put, heartbeat_timeout_s)
        self._places: dict[int, tuple[str, int]] = {}  # worker -> node, slot
        self._admission = Admission(spec.world_size, self._places, say)
        self._entries_lost = 0
        self._meter = Meter()
        self.metrics = JobMetrics(
            job=spec.job,
            mode=spec.mode,
            meter=self._meter,
            ledger=ledger,
            picture=machine.snapshot,
            incidents=self.incidents.all,
            agents=self._agents,
        )
        self._end: act.EndJob | None = None
        self._measurements: set[asyncio.Task[None]] = set()
        self._farewell = Farewell(self._links)
        self._disk = ThreadPoolExecutor(1, "keepstep-ledger")
        self._inquiries = Inquiries(ask=self.ask, nodes=lambda: self.nodes, note=self._note, say=say)
        self._standstill = Standstill(ask=self.ask, nodes=lambda: self.nodes, say=say)
        entries = ledger.entries()
        for entry in entries:
            self._recall(entry.kind, entry.value(), entry.time_s)
        self._resumed = bool(entries)
        if entries:
            self._started_s = entries[0].time_s

    def _recall(self, kind: str, body: Mapping[str, Any], time_s: float) -> None:
        """One entry of an earlier controller."""
        self.incidents.add(kind, body, time_s)
        self._inquiries.resume(kind, body)
        if kind == "note" and body.get("about") == "worker":
            self._places[int(body["worker"])] = (str(body["node"]), int(body["slot"]))

    # ---- what others may call ---------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The job as people see it (see `view.live_status`)."""
        return live_status(
            self._machine.snapshot(), self.incidents, mode=self.spec.mode, started_s=self._started_s
        )

    def replicas(self) -> dict[str, Any]:
        """Which bytes of the state have how many live twins, and where (see `keepstep.core.replicas`)."""
        return {"job": self.spec.job, **self._machine.replicas()}

    def _agents(self) -> tuple[int, int]:
        """How many are connected, and how often one was late."""
        return len(self.nodes), sum(link.late for link in self._links.values())

    def slot_of(self, worker: int) -> int | None:
        """The slot that a worker was started on."""
        place = self._places.get(worker)
        return None if place is None else place[1]

    def request_stop(self, signal_name: str, *, hard: bool = False) -> None:
        """End the job in order; `hard` (or a second request while it ends): at once."""
        if hard:
            self._farewell.hard.set()
        if self._end is not None:
            return
        self._put(evt.StopRequested(signal=signal_name, hard=hard))

    def request(self, event: MoveRequested | DrainRequested | UndrainRequested) -> str | None:
        """What people ask for. The reason, in one line, when it cannot be done."""
        refusal = self._machine.refusal(event)
        if refusal is None:
            self._put(event)
        return refusal

    def report(self, event: SignalSeen) -> None:
        """A health signal that somebody posted."""
        self._put(event)

    def lose_agent(self, node: str, reason: str) -> None:
        """An embedded agent is known to have ended: no sense in waiting for its return."""
        self._put(evt.AgentLost(node=node, reason=reason))

    async def ask(self, node: str, what: str, about: Mapping[str, Any], timeout_s: float) -> Answer:
        """Ask one node's agent something that people want to see. Never raises: see `Answer.ok`."""
        link = self._links.get(node)
        if link is None:
            return Answer(request=0, ok=False, detail=f"there is no node {node}")
        return await link.ask(what, about, timeout_s)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes whose agents are connected now."""
        return tuple(node for node, link in self._links.items() if link.connected)

    async def serve_agent(self, socket: WebSocket) -> None:
        """The WebSocket `/agent`, for as long as one agent stays connected."""
        hello = await wire_side.greet(socket, self.token)
        if hello is None:
            return
        if self._end is not None:
            await wire_side.refuse(socket, wire_side.CLOSED_REPLACED, "the job has ended")
            return
        if not await self._admission.admits(hello, self._links.get(hello.node), socket):
            return
        link = self._admit(hello)
        connection = link.connection
        await self._events.put(wire_side.joined(hello))
        left: str | None = None
        try:
            left = await wire_side.converse(socket, link, self._heartbeats.welcome(link), self._hear)
        finally:
            if link.connection == connection:  # else a newer one has been admitted
                self._left(link, left)

    # ---- the loop ---------------------------------------------------------------------------------

    async def run(self) -> int:
        """Step the machine until it ends the job, then see the agents off. Returns the exit code."""
        listening = asyncio.create_task(self._heartbeats.run(), name="silence")
        try:
            if self._resumed:
                await self._step(evt.Ticked())
            while self._end is None:
                event = await self._next_event()
                if isinstance(event, act.Persist):
                    await self._persist([event])  # a note of ours, not the machine's affair
                else:
                    await self._step(event)
            return self._end.exit_code
        except Exception:
            log.exception("the controller is broken")
            self._abandoned = self._outlived
            what = "training goes on, start it again" if self._outlived else "the job ends"
            self._say(f"Keepstep itself failed (its story is above): {what}", "error")
            self._end = act.EndJob(exit_code=BROKEN_EXIT_CODE, reason="internal error")
            self._farewell.hard.set()
            return self._end.exit_code
        finally:
            self._standstill.close()
            listening.cancel()
            await self._finish_inquiries()
            if not self._abandoned:
                await self._farewell.see_off(self._end)
            for task in self._measurements:
                task.cancel()
            self._disk.shutdown(wait=True)

    async def _next_event(self) -> evt.Event | act.Persist:
        if self._own_events:
            return self._own_events.popleft()
        if not self._events.empty():  # every event lets the machine see what is due as well
            self._in_a_row += 1
            if self._in_a_row % YIELD_AFTER == 0:
                await asyncio.sleep(0)  # whoever reads and sends has a turn
            return self._events.get_nowait()
        now_s = time.monotonic()
        deadline_s = self._machine.next_deadline_s(now_s)
        if deadline_s is None:
            return await self._events.get()
        if deadline_s <= now_s:
            return evt.Ticked()
        try:
            async with asyncio.timeout(max(0.0, deadline_s - now_s)):
                return await self._events.get()
        except TimeoutError:
            return evt.Ticked()

    async def _step(self, event: evt.Event) -> None:
        if isinstance(event, evt.AgentJoined) and event.node in self._links:
            self._links[event.node].muted = False
        now_s = time.monotonic()
        actions = self._machine.step(event, now_s)
        self._meter.saw(event, actions, now_s)
        self._standstill.saw(event)
        await self._carry_out(actions)

    async def _carry_out(self, actions: Sequence[act.Action]) -> None:
        """In order. Entries that stand side by side reach the disk with one write."""
        entries: list[act.Persist] = []
        for action in actions:
            if isinstance(action, act.Persist):
                entries.append(action)
                self._inquiries.wrote(action.kind, action.body)
                continue
            await self._persist(entries)
            entries = []
            self._do(action)
        await self._persist(entries)

    def _do(self, action: act.Action) -> None:
        match action:
            case act.StartWorker():
                self._places[action.worker] = (action.node, action.slot)
                self._send(action.node, action)
            case act.Probe():
                self._send(action.by, action)
            case act.DropAgent():
                if (link := self._links.get(action.node)) is not None:
                    link.drop()
            case act.MeasureLink():
                self._measurements.add(task := asyncio.create_task(self._measure(action)))
                task.add_done_callback(self._measurements.discard)
            case act.StandBy() | act.KillWorker() | act.CheckSpare() | act.Lend() | act.Prepare():
                self._send(self._places.get(action.worker, ("", -1))[0], action)
            case act.Announce():
                self._admission.told(action)
                for link, data in announced(self._links.values(), action):
                    self._send(link.node, data)
            case act.Release():
                for node in self._links:
                    self._send(node, action)
            case act.Say():
                self._say(action.text, action.level)
            case act.EndJob():
                self._end = action
            case act.Persist():
                raise AssertionError("entries are written by _persist")

    # ---- the ledger -------------------------------------------------------------------------------

    async def _persist(self, entries: list[act.Persist]) -> None:
        """Durable on return, or PersistFailed is what the machine hears next (once per failing stretch)."""
        if not entries:
            return
        items = [(entry.kind, entry.body) for entry in entries]
        if self._entries_lost:
            items.insert(
                0, ("note", {"text": f"{self._entries_lost} entries before this one could not be written"})
            )
        try:
            # A slow disk must not keep the agent's connection waiting, hence the thread.
            written = await asyncio.get_running_loop().run_in_executor(
                self._disk, self._ledger.append_all, items
            )
        except LedgerWriteFailed as failure:
            if not self._entries_lost:
                self._own_events.append(evt.PersistFailed(reason=str(failure)))
            self._entries_lost += len(entries)
            self._meter.entries_lost += len(entries)
            for entry in entries:
                self.incidents.add(entry.kind, entry.body, time.time())
        else:
            for line in written:
                self.incidents.add(line.kind, line.value(), line.time_s)
            if self._entries_lost:
                self._say(
                    f"the ledger can be written again ({self._entries_lost} entries are missing)", "warning"
                )
            self._entries_lost = 0

    def _note(self, body: dict[str, Any]) -> None:
        """Have the machine's task write a note, between two of its steps."""
        self._put(act.Persist(kind="note", body=body))

    async def _finish_inquiries(self) -> None:
        """Evidence of an incident with which the job ends is gathered while the agents are there."""
        if not self._farewell.hard.is_set():
            await self._inquiries.finish(INQUIRY_TIMEOUT_S)
        left = [self._events.get_nowait() for _ in range(self._events.qsize())]
        await self._persist([entry for entry in left if isinstance(entry, act.Persist)])

    async def _measure(self, action: act.MeasureLink) -> None:
        """A spare's node towards another one; what comes of it is an event like any other."""
        await self._events.put(await link_measured(self, action))

    # ---- agents -----------------------------------------------------------------------------------

    async def _hear(self, link: AgentLink, event: evt.Event) -> None:
        self._admission.check(link.node, event)
        await self._events.put(event)

    def _admit(self, hello: AgentHello) -> AgentLink:
        for worker in hello.workers:
            self._places.setdefault(worker, (hello.node, -1))
        self._farewell.all_gone.clear()
        link = self._links.setdefault(hello.node, AgentLink(hello.node))
        link.pid = hello.pid
        link.forget_unsent()  # the machine says again what counts, once it hears that the agent is back
        return link

    def _left(self, link: AgentLink, farewell: str | None) -> None:
        """An agent's connection ended. Its workers live on, so it is given time to come back, unless it said farewell."""
        if not any(other.connected for other in self._links.values()):
            self._farewell.all_gone.set()
        if link.connected or self._end is not None:
            return
        if farewell is not None:
            self.lose_agent(link.node, f"its agent has left ({farewell})")
            return
        self._put(evt.AgentDisconnected(node=link.node, reason="its connection ended"))

    def _put(self, event: evt.Event | act.Persist) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self._events.put_nowait(event)

    def _send(self, node: str, message: object) -> None:
        link = self._links.get(node)
        if link is None:
            log.warning("no agent of node %r for %s", node, type(message).__name__)
            return
        if link.muted:
            return
        overflowed = link.overflowed
        link.send(message)
        if link.overflowed and not overflowed:
            self._own_events.append(
                evt.AgentLost(node=node, reason=f"agent of {node} takes no messages any more")
            )

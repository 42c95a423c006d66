"""Asks every node what it saw of an incident, compares what the ranks say, and has it written down.

It waits until training goes on (or a moment, when it does not): recovery never waits for evidence. What
each node keeps is its own affair; here only the summaries come together.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from keepstep.core.outsider import CallView, Finding, GroupView, RankView, find_outsider
from keepstep.wire.messages import Answer

log = logging.getLogger("keepstep.controller")

Ask = Callable[[str, str, Mapping[str, Any], float], Awaitable[Answer]]

RECOVERY_WAIT_S = 1.0
ANSWER_TIMEOUT_S = 8.0
MAX_AT_ONCE = 4
MAX_WAITERS_TOLD = 64
MAX_NOTABLE = 20


class Inquiries:
    """One inquiry for each incident. `note` writes into the ledger, `say` tells people."""

    def __init__(
        self,
        *,
        ask: Ask,
        nodes: Callable[[], Sequence[str]],
        note: Callable[[dict[str, Any]], None],
        say: Callable[[str, str], None],
    ) -> None:
        self._ask = ask
        self._nodes = nodes
        self._note = note
        self._say = say
        self._generation: int | None = None
        self._over: dict[int, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(MAX_AT_ONCE)
        self._ending = asyncio.Event()

    def wrote(self, kind: str, body: Mapping[str, Any]) -> None:
        """An entry was written: incidents open and close, generations follow each other."""
        number = body.get("number")
        if kind == "generation":
            self._generation = number
        elif kind == "incident" and isinstance(number, int) and self._generation is not None:
            self._over[number] = asyncio.Event()
            work = self._inquire(number, self._generation, str(body.get("reason", "")))
            task = asyncio.create_task(work, name=f"inquiry-{number}")
            self._tasks.add(task)
            task.add_done_callback(self._done)
        elif kind == "incident_closed" and number in self._over:
            self._over[number].set()

    def resume(self, kind: str, body: Mapping[str, Any]) -> None:
        """An entry that an earlier controller wrote: only the generation counts."""
        if kind == "generation":
            self._generation = body.get("number")

    async def finish(self, timeout_s: float) -> None:
        """The job ends: what is under way is brought to its end, within `timeout_s`."""
        self._ending.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in self._tasks:
            task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an incident's evidence could not be gathered", exc_info=error)

    async def _inquire(self, incident: int, generation: int, reason: str) -> None:
        waits = [asyncio.create_task(event.wait()) for event in (self._over[incident], self._ending)]
        await asyncio.wait(waits, timeout=RECOVERY_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        async with self._places:
            about = {"incident": incident, "generation": generation, "reason": reason}
            nodes = list(self._nodes())
            answers = await asyncio.gather(
                *(self._ask(node, "evidence", about, ANSWER_TIMEOUT_S) for node in nodes)
            )
        told = {node: understood(answer) for node, answer in zip(nodes, answers, strict=True)}
        finding = await asyncio.to_thread(compare, list(told.values()))
        del self._over[incident]
        self._note(_body(incident, generation, told, finding))
        if finding.kind != "nobody" and not _all_died(finding, told):
            self._say(f"incident {incident}: {finding.text}", "info")


def understood(answer: Answer) -> dict[str, Any]:
    """A node's summary; {"error": why} when there is none."""
    if not answer.ok:
        return {"error": answer.detail}
    try:
        value = json.loads(answer.data)
    except ValueError:
        return {"error": "the answer is not JSON"}
    return value if isinstance(value, dict) else {"error": "the answer is no object"}


def compare(told: Sequence[Mapping[str, Any]]) -> Finding:
    """The guilty rank, from all nodes' summaries; a summary that makes no sense is left out."""
    views = []
    for summary in told:
        for worker in summary.get("workers", ()):
            try:
                views.append(_view(worker))
            except (KeyError, ValueError, TypeError):
                log.warning("a node's summary of a worker makes no sense")
    return find_outsider(views)


def _view(worker: Mapping[str, Any]) -> RankView:
    return RankView(
        rank=int(worker["rank"]),
        worker=int(worker["worker"]),
        step=int(worker["step"]),
        phase=str(worker["phase"]),
        state=str(worker["state"]),
        at=str(worker["at"]),
        died=not worker["alive"],
        groups=tuple(
            GroupView(
                identity=str(group["identity"]),
                label=str(group["label"]),
                size=int(group["size"]),
                group_rank=int(group["group_rank"]),
                entered=int(group["entered"]),
                calls=tuple(
                    CallView(
                        sequence=int(sequence),
                        operation=str(operation),
                        bytes=int(size),
                        open=bool(unended),
                        peer=None if peer is None else int(peer),
                    )
                    for sequence, operation, size, unended, peer in group["calls"]
                ),
            )
            for group in worker["groups"]
        ),
    )


def _all_died(finding: Finding, told: Mapping[str, Mapping[str, Any]]) -> bool:
    """A dead rank that stood outside is no news: its death is the incident."""
    dead = {w["rank"] for summary in told.values() for w in summary.get("workers", ()) if not w["alive"]}
    return bool(finding.ranks) and set(finding.ranks) <= dead


def _body(
    incident: int, generation: int, told: Mapping[str, Mapping[str, Any]], finding: Finding
) -> dict[str, Any]:
    """What the ledger keeps: where the files are, who waited, what the kernel said; bounded."""
    workers = [(node, worker) for node, summary in told.items() for worker in summary.get("workers", ())]
    workers.sort(key=lambda entry: (entry[1]["alive"], -float(entry[1]["waited_s"])))
    keys = ("rank", "worker", "alive", "ended", "step", "phase", "waited_s", "state", "at", "stacks_from")
    stands = [{"node": node, **{k: worker[k] for k in keys}} for node, worker in workers[:MAX_WAITERS_TOLD]]
    return {
        "about": "evidence",
        "incident": incident,
        "generation": generation,
        "blame": finding.body(),
        "stands": stands,
        "nodes": [_of_node(node, summary) for node, summary in told.items()],
    }


def _of_node(node: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in summary:
        return {"node": node, "error": summary["error"]}
    folders = [name for names in (summary.get("folders") or {}).values() for name in names]
    return {
        "node": node,
        "folder": summary.get("folder"),
        "workers": folders[-MAX_NOTABLE:],
        "notable": list(summary.get("notable") or ())[-MAX_NOTABLE:],
        "devices_from": summary.get("devices_from"),
    }

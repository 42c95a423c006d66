"""The job as people see it: one flat picture from the machine's snapshot, or from the ledger afterwards.

`status`, the live table and `--json` show this; nothing is decided from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keepstep.controller.incidents import IncidentBook
from keepstep.controller.ledger import Entry


def live_status(
    snapshot: Mapping[str, Any], book: IncidentBook, *, mode: str, started_s: float
) -> dict[str, Any]:
    """The picture of a running job. `started_s`: Unix time."""
    over = snapshot["exit_code"] is not None
    players = [_row(one, one["rank"], "playing", over) for one in snapshot["ranks"]]
    spares = [_row(one, None, one.get("readiness") or "starting", over) for one in snapshot["spares"]]
    waiting = snapshot.get("waiting")
    return {
        "job": snapshot["job"],
        "mode": mode,
        "state": snapshot["state"],
        "started_s": started_s,
        "ended_s": None,
        "world_size": snapshot["world_size"],
        "generation": snapshot["generation"],
        "step": min((one["step"] for one in players), default=0),
        "published": snapshot["published"],
        "workers": players + spares,
        "nodes": [_node(node, players, spares) for node in snapshot.get("nodes") or ()],
        "spares": _readiness(spares),
        "waiting_for": waiting["for"] if waiting else None,
        "moves": snapshot.get("moves", []),
        "draining": snapshot.get("draining", {}),
        "restarts": snapshot["restarts"],
        "ledger_lost": snapshot["ledger_lost"],
        "unkept_ranks": snapshot.get("unkept_ranks", []),
        "protection": snapshot.get("protection"),
        "exit_code": snapshot["exit_code"],
        "reason": snapshot["reason"] or None,
        "incident": book.newest(),
        "incidents": book.count(),
    }


def _node(
    node: Mapping[str, Any], players: Sequence[Mapping[str, Any]], spares: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """One node with what runs on it; `state` is the core's word on its agent, null where it has none."""
    name = node["node"]
    return {
        "node": name,
        "state": node.get("state"),
        "silent_s": node.get("silent_s"),
        "slots": node.get("slots"),
        "labels": dict(node.get("labels") or {}),
        "ranks": [row["rank"] for row in players if row["node"] == name],
        "spares": sum(row["node"] == name for row in spares),
    }


def _readiness(spares: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many spares could take over a rank how soon."""
    return {state: sum(row["state"] == state for row in spares) for state in ("hot", "warm", "starting")}


def _row(worker: Mapping[str, Any], rank: int | None, state: str, over: bool) -> dict[str, Any]:
    standing = worker.get("standing")
    if over:
        state = "ended"
    elif rank is not None and standing in ("ending", "exited", "unknown"):
        state = "dead"
    return {
        "worker": worker["worker"],
        "rank": rank,
        "node": worker["node"],
        "slot": worker["slot"],
        "state": state,
        "step": worker["step"],
    }


def past_status(entries: Sequence[Entry]) -> dict[str, Any]:
    """The same picture of a job whose controller is gone: what the ledger alone can tell.

    `state` is "lost" when no end was written: the controller was killed, or the machine went down.
    """
    book = IncidentBook.from_entries(entries)
    job: dict[str, Any] = {}
    generation: dict[str, Any] = {}
    places: dict[int, dict[str, Any]] = {}
    end: dict[str, Any] = {}
    for entry in entries:
        body = entry.value()
        if entry.kind == "job":
            job = {**body, "started_s": entry.time_s}
        elif entry.kind == "generation":
            generation = body
        elif entry.kind == "note" and body.get("about") == "worker":
            places[body["worker"]] = body
        elif entry.kind == "end":
            end = {**body, "ended_s": entry.time_s}
    exit_code = end.get("exit_code")
    return {
        "job": job.get("job", ""),
        "mode": "observe" if job.get("observe") else "run",
        "state": "lost" if not end else "finished" if exit_code == 0 else "failed",
        "started_s": job.get("started_s"),
        "ended_s": end.get("ended_s"),
        "world_size": job.get("world_size", 0),
        "generation": generation.get("number"),
        "step": None,
        "published": None,
        "workers": [
            {
                "worker": worker,
                "rank": rank,
                "node": places.get(worker, {}).get("node"),
                "slot": places.get(worker, {}).get("slot"),
                "state": "ended" if end else "unknown",
                "step": None,
            }
            for rank, worker in enumerate(generation.get("ranks", ()))
        ],
        "nodes": [],
        "spares": None,
        "waiting_for": None,
        "moves": [],
        "draining": {},
        "restarts": None,
        "ledger_lost": None,
        "unkept_ranks": [],
        "protection": None,
        "exit_code": exit_code,
        "reason": end.get("reason"),
        "incident": book.newest(),
        "incidents": book.count(),
    }

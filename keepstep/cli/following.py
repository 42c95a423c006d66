"""Planned moves followed from the terminal: one line whenever one of them gets further."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import typer

from keepstep.cli.source import status_of
from keepstep.controller.rundir import RunDirectory

POLL_S = 0.1
EXIT_NOT_MOVED = 1
EXIT_STILL_MOVING = 75  # EX_TEMPFAIL
_WORDS = {
    "asked": "waits for {waits}",
    "lending": "worker {target} is the target",
    "preparing": "worker {target} is built as rank {rank} and copies its state; training goes on",
    "ready": "worker {target} is ready",
    "switching": "all ranks switch at the end of a step",
}


def ranks_on(run: RunDirectory, node: str) -> list[int]:
    """The ranks that are played on a node now."""
    return [rank for rank, row in _players(status_of(run)).items() if row["node"] == node]


def _players(status: dict[str, Any]) -> dict[int, Any]:
    return {row["rank"]: row for row in status["workers"] if row["rank"] is not None}


def follow_moves(run: RunDirectory, ranks: Sequence[int], limit_s: float) -> int:
    """Say how far the moves of these ranks are, until none is under way. Returns the exit code."""
    began_s = time.monotonic()
    before = {rank: row["worker"] for rank, row in _players(status_of(run)).items()}
    said: dict[int, str] = {}
    while True:
        status = status_of(run)
        moving = {move["rank"]: move for move in status.get("moves", []) if move["rank"] in ranks}
        for rank, move in moving.items():
            text = _WORDS[move["stage"]].format(**{**move, "waits": move["waits"] or "a target"})
            if said.get(rank) != text:
                said[rank] = text
                typer.echo(f"{time.monotonic() - began_s:7.2f} s  rank {rank}: {text}")
        settled = not moving and status["state"] not in ("migrating", "recovering")
        if not status["live"] or (settled and (said or time.monotonic() - began_s > 10 * POLL_S)):
            return _conclude(status, ranks, before, time.monotonic() - began_s)
        if time.monotonic() - began_s > limit_s:
            typer.echo(f"not over after {limit_s:.0f} s: see `keepstep status`", err=True)
            return EXIT_STILL_MOVING
        time.sleep(POLL_S)


def _conclude(status: dict[str, Any], ranks: Sequence[int], before: dict[int, Any], spent_s: float) -> int:
    now = _players(status)
    stayed = [rank for rank in ranks if rank not in now or now[rank]["worker"] == before.get(rank)]
    for rank in ranks:
        if rank not in stayed:
            entry = now[rank]
            where = f"worker {entry['worker']} on {entry['node']}"
            typer.echo(f"{spent_s:7.2f} s  rank {rank}: played by {where}")
    for rank in stayed:
        typer.echo(f"rank {rank} was not moved: `keepstep logs` and the console of the job say why", err=True)
    return EXIT_NOT_MOVED if stayed else 0

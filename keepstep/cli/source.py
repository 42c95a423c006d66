"""Where `status` and `incidents` read: the running job's API, else its ledger. The answers look the same."""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from keepstep.controller.incidents import IncidentBook
from keepstep.controller.ledger import Entry, LedgerReader
from keepstep.controller.rundir import Address, RunDirectory, newest_run
from keepstep.errors import KeepstepError, UsageError

ASK_TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 64 << 20


class NoAnswer(KeepstepError):  # noqa: N818 - an outcome: the job may just have ended
    """The controller could not be asked."""


def find_run(argument: str | None, option: str | None) -> RunDirectory:
    """The run that the user means. Raises UsageError when there is none."""
    if argument and option and Path(argument) != Path(option):
        raise UsageError("two run directories given: name one")
    named = argument or option
    if named is None:
        return newest_run()
    run = RunDirectory(Path(named))
    if not run.path.is_dir():
        raise UsageError(f"there is no run directory {named}")
    if not run.ledger.is_file():
        raise UsageError(f"{named} holds no ledger: not a run directory")
    return run


def ask(address: Address, path: str) -> Any:
    """GET from the controller. Raises NoAnswer; never goes through a proxy."""
    parts = urlsplit(address.url)
    connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port, timeout=ASK_TIMEOUT_S)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {address.token}"})
        answer = connection.getresponse()
        value = json.loads(answer.read(MAX_ANSWER_BYTES))
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoAnswer(f"the controller at {address.url} does not answer: {error}") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise NoAnswer(f"the controller at {address.url} refuses: {value.get('error', answer.status)}")
    return value


def status_of(run: RunDirectory) -> dict[str, Any]:
    """The job's state, with `live` saying whether its controller answered."""
    address = run.address()
    if address is not None:
        try:
            return {**ask(address, "/api/status"), "live": True, "run_dir": str(run.path)}
        except NoAnswer:
            pass  # it is ending, or its id was given to another process: the ledger knows
    with LedgerReader(run.ledger) as reader:
        return {**status_from_entries(reader.entries()), "live": False, "run_dir": str(run.path)}


def incidents_of_run(run: RunDirectory) -> list[dict[str, Any]]:
    """All incidents, oldest first."""
    address = run.address()
    if address is not None:
        try:
            return list(ask(address, "/api/incidents")["incidents"])
        except NoAnswer:
            pass  # as above
    with LedgerReader(run.ledger) as reader:
        return IncidentBook.from_entries(reader.entries()).all()


def status_from_entries(entries: Sequence[Entry]) -> dict[str, Any]:
    """What the ledger alone can tell: how far the map of ranks went, and how the job ended."""
    book = IncidentBook.from_entries(entries)
    job: dict[str, Any] = {}
    generation: dict[str, Any] = {}
    slots: dict[int, dict[str, Any]] = {}
    end: dict[str, Any] = {}
    for entry in entries:
        body = entry.value()
        if entry.kind == "job":
            job = {**body, "started_s": entry.time_s}
        elif entry.kind == "generation":
            generation = body
        elif entry.kind == "note" and body.get("about") == "worker":
            slots[body["worker"]] = body
        elif entry.kind == "end":
            end = {**body, "ended_s": entry.time_s}
    players = [
        {
            "worker": worker,
            "rank": rank,
            "node": slots.get(worker, {}).get("node", ""),
            "slot": slots.get(worker, {}).get("slot"),
            "state": "ended" if end else "unknown",
            "step": None,
        }
        for rank, worker in enumerate(generation.get("ranks", ()))
    ]
    return {
        "job": job.get("job", ""),
        "mode": "observe" if job.get("observe") else "run",
        "state": "ended" if end else "lost",
        "started_s": job.get("started_s"),
        "ended_s": end.get("ended_s"),
        "world_size": job.get("world_size", len(players)),
        "generation": generation.get("number"),
        "step": None,
        "published": None,
        "exit_code": end.get("exit_code"),
        "reason": end.get("reason"),
        "workers": players,
        "incident": book.newest(),
        "incidents": book.count(),
    }

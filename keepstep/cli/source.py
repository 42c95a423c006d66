"""Where commands read: the running job's API, else its ledger (the answers look the same); and what they ask of it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keepstep.cli.addresses import parse_join
from keepstep.cli.meeting import connection_to
from keepstep.controller.incidents import IncidentBook
from keepstep.controller.ledger import LedgerReader
from keepstep.controller.rundir import Address, RunDirectory, newest_run
from keepstep.controller.view import past_status
from keepstep.core.replica_rules import past_replicas
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
    try:
        return json.loads(fetch(address, path, MAX_ANSWER_BYTES))
    except ValueError as error:
        raise NoAnswer(f"the controller at {address.url} does not answer: {error}") from None


def fetch(address: Address, path: str, limit: int, timeout_s: float = ASK_TIMEOUT_S) -> bytes:
    """GET from the controller, at most `limit` bytes as they come. Raises NoAnswer."""
    status, data = _exchange(address, "GET", path, None, limit, timeout_s)
    if status != 200:
        raise NoAnswer(f"the controller at {address.url} refuses: {_refusal(data) or status}")
    return data


def request(run: RunDirectory, path: str, body: Mapping[str, Any]) -> None:
    """POST to the running job's controller. Raises UsageError with its reason when it says no, and NoAnswer."""
    address = run.address()
    if address is None:
        raise UsageError(f"the job of {run.path} is not running: there is nothing to be asked of it")
    data = json.dumps(body).encode()
    status, answer = _exchange(address, "POST", path, data, MAX_ANSWER_BYTES, ASK_TIMEOUT_S)
    if status not in (200, 202):
        raise UsageError(
            _refusal(answer) or f"the controller at {address.url} answers with HTTP status {status}"
        )


def _exchange(
    address: Address, method: str, path: str, body: bytes | None, limit: int, timeout_s: float
) -> tuple[int, bytes]:
    """One question to the controller. Raises NoAnswer."""
    endpoint, _ = parse_join(address.url)
    try:
        connection = connection_to(endpoint, address.tls, timeout_s)
    except UsageError as error:
        raise NoAnswer(str(error)) from None
    try:
        connection.request(method, path, body, headers={"Authorization": f"Bearer {address.token}"})
        answer = connection.getresponse()
        return answer.status, answer.read(limit)
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"the controller at {address.url} does not answer: {error}") from None
    finally:
        connection.close()


def _refusal(data: bytes) -> str:
    try:
        value = json.loads(data)
    except ValueError:
        return ""
    return str(value.get("error", "")) if isinstance(value, dict) else ""


def status_of(run: RunDirectory) -> dict[str, Any]:
    """The job's state, with `live` saying whether its controller answered."""
    address = run.address()
    if address is not None:
        try:
            return {**ask(address, "/api/status"), "live": True, "run_dir": str(run.path)}
        except NoAnswer:
            pass  # it is ending, or its id was given to another process: the ledger knows
    with LedgerReader(run.ledger) as reader:
        return {**past_status(reader.entries()), "live": False, "run_dir": str(run.path)}


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


def replicas_of(run: RunDirectory) -> dict[str, Any]:
    """Which bytes of the state have how many live twins; of an ended job, as they lay in its last generation."""
    address = run.address()
    if address is not None:
        try:
            return {**ask(address, "/api/replicas"), "live": True}
        except NoAnswer:
            pass  # as above
    with LedgerReader(run.ledger) as reader:
        return {**past_replicas((entry.kind, entry.value()) for entry in reader.entries()), "live": False}

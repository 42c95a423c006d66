"""A script tried with N ranks on this machine until every rank has said what its state consists of."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keepstep.cli.jobs import JobFailed, LaunchedJob
from keepstep.cli.options import check_script
from keepstep.controller.ledger import LedgerReader
from keepstep.core.replica_rules import ABOUT, answer
from keepstep.core.replicas import Holder, ReplicaBook
from keepstep.errors import KeepstepError, UsageError

POLL_S = 0.1
ENVIRONMENT = {
    "KEEPSTEP_DRY_RUN": "1",
    "KEEPSTEP_SHUTDOWN_TIMEOUT": "0",  # by SIGKILL: no handler of the script's saves a thing
    "KEEPSTEP_MODE": "run",
    "KEEPSTEP_MAX_RESTARTS": "0",
}


def trial(
    script: Path, arguments: Sequence[str], *, ranks: int, nodes: int, limit_s: float
) -> dict[str, Any]:
    """The table as `keepstep replicas` shows it. Raises UsageError, or KeepstepError when the script fails."""
    check_script(str(script), "script")
    folder = Path(tempfile.mkdtemp(prefix="keepstep-replicas-"))
    try:
        body = _described(script, arguments, ranks, folder, limit_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    book = ReplicaBook.load(body)
    per_node = ranks // nodes
    return answer(book, {rank: Holder(rank, f"node{rank // per_node}") for rank in range(ranks)}, 0)


def _described(
    script: Path, arguments: Sequence[str], ranks: int, folder: Path, limit_s: float
) -> dict[str, Any]:
    run_dir = folder / "run"
    with LaunchedJob(
        script, arguments, ranks=ranks, spares=0, run_dir=run_dir, environment=ENVIRONMENT
    ) as job:
        found: list[dict[str, Any]] = []

        def described() -> bool:
            found.extend(_notes(run_dir / "ledger.sqlite"))
            return bool(found)

        try:
            job.wait_until(described, timeout_s=limit_s, what="two updates on every rank", poll_s=POLL_S)
        except JobFailed as error:
            if job.exit_code == 0:
                raise UsageError("the script ended before its second update: nothing is known") from None
            raise KeepstepError(str(error)) from None
        return found[-1]


def _notes(ledger: Path) -> list[dict[str, Any]]:
    if not ledger.is_file():
        return []
    try:
        with LedgerReader(ledger) as reader:
            bodies = [entry.value() for entry in reader.entries() if entry.kind == "note"]
    except UsageError:
        return []  # it is being made
    return [body for body in bodies if body.get("about") == ABOUT]

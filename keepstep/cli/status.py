"""`keepstep status`: one look at a job, or a look that stays."""

from __future__ import annotations

from typing import Annotated, Any

import typer

WATCH_INTERVAL_S = 0.5


def status(
    run_dir: Annotated[str | None, typer.Argument(metavar="[RUN_DIR]", help="A run directory.", show_default=False)] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="DIR", help="The same [the newest under keepstep-runs].", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", show_default=False)] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again until the job ends.", show_default=False)] = False,
) -> None:  # fmt: skip
    """Show ranks, step and newest incident of a job, running or ended."""
    from keepstep.cli.source import find_run, status_of

    found = find_run(run_dir, run)
    if watch:
        _watch(found, as_json)
        return
    _print(status_of(found), as_json)


def _watch(run: Any, as_json: bool) -> None:
    import time

    from keepstep.cli.source import status_of

    shown: Any = None
    while True:
        now = status_of(run)
        if now != shown:
            _print(now, as_json, compact=True)
            shown = now
        if not now["live"]:
            return
        time.sleep(WATCH_INTERVAL_S)


def _print(status: dict[str, Any], as_json: bool, *, compact: bool = False) -> None:
    import json

    if as_json:
        typer.echo(json.dumps(status, indent=None if compact else 2))
        return
    from rich.console import Console

    from keepstep.cli.live import incident_line, protection_line, rank_table

    console = Console()
    console.print(rank_table(status))
    if off := protection_line(status):
        console.print(off, markup=False, highlight=False, style="bold red")
    if status["incident"] is not None:
        console.print(incident_line(status["incident"]), markup=False, highlight=False)
    if unkept := status.get("unkept_ranks"):
        ranks = ", ".join(map(str, unkept))
        console.print(f"records not held elsewhere: ranks {ranks}", markup=False, highlight=False)
    if status["exit_code"] is not None:
        console.print(
            f"ended with exit code {status['exit_code']}: {status.get('reason') or ''}", markup=False
        )
    elif status["waiting_for"]:
        console.print(f"waiting for {status['waiting_for']}", markup=False)
    elif status["state"] == "lost":
        console.print("the controller is gone and wrote no end: it was killed, or the machine went down")

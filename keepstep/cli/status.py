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
    """Look again until the job ends: drawn in place on a terminal, else printed whenever it has changed."""
    import sys
    import time

    from keepstep.cli.source import status_of

    if sys.stdout.isatty() and not as_json:
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            while True:
                now = status_of(run)
                live.update(_picture(now), refresh=True)
                if not now["live"]:
                    return
                time.sleep(WATCH_INTERVAL_S)
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

    Console().print(_picture(status))


def _picture(status: dict[str, Any]) -> Any:
    """Tables and lines, top down: ranks, nodes, what stands beside them, the newest incident, the end."""
    from rich.console import Group
    from rich.text import Text

    from keepstep.cli.live import incident_line, node_table, protection_line, rank_table, standing_lines

    lines = standing_lines(status)
    if status["incident"] is not None:
        lines.append(incident_line(status["incident"]))
    if status["exit_code"] is not None:
        lines.append(f"ended with exit code {status['exit_code']}: {status.get('reason') or ''}")
    elif status["waiting_for"]:
        lines.append(f"waiting for {status['waiting_for']}")
    elif status["state"] == "lost":
        lines.append("the controller is gone and wrote no end: it was killed, or the machine went down")
    nodes = node_table(status)
    texts = [Text(line, style="bold red" if line == protection_line(status) else "") for line in lines]
    return Group(rank_table(status), *([nodes] if nodes is not None else []), *texts)

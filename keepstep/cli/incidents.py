"""`keepstep incidents`: what went wrong, what was decided, and what it cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

_Run = Annotated[
    str | None,
    typer.Option(
        "--run", metavar="DIR", help="The run directory [the newest under keepstep-runs].", show_default=False
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.", show_default=False)]

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def incidents(
    ctx: typer.Context,
    run: _Run = None,
    as_json: _Json = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the ledger's hash chain.", show_default=False)
    ] = False,
) -> None:
    """List a job's incidents; `show N` tells one in full."""
    ctx.obj = {"run": run}
    if ctx.invoked_subcommand is not None:
        return
    from keepstep.cli.source import find_run, incidents_of_run

    found = find_run(None, run)
    if verify:
        _verify(found)
    listed = incidents_of_run(found)
    if as_json:
        typer.echo(json.dumps(listed, indent=2))
        return
    from keepstep.cli.incident_view import in_two_lines

    if not listed:
        typer.echo(f"no incident in {found.path}")
        return
    for incident in listed:
        typer.echo(in_two_lines(incident))


@app.command()
def show(
    ctx: typer.Context,
    number: Annotated[int, typer.Argument(metavar="N", help="The incident's number.", min=1)],
    run: _Run = None,
    as_json: _Json = False,
) -> None:
    """One incident: decision and reason, a timeline, who waited for whom, and where the evidence lies."""
    from keepstep.cli.incident_view import story
    from keepstep.cli.source import find_run

    incident = _incident(find_run(None, run or ctx.obj["run"]), number)
    typer.echo(json.dumps(incident, indent=2) if as_json else story(incident))


@app.command()
def bundle(
    ctx: typer.Context,
    number: Annotated[int, typer.Argument(metavar="N", help="The incident's number.", min=1)],
    run: _Run = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The archive [incident-N.tar.gz].", show_default=False),
    ] = None,
) -> None:
    """Pack what every node kept of an incident into one .tar.gz, with a summary at its top."""
    from keepstep.cli.incident_bundle import make_bundle
    from keepstep.cli.source import find_run

    found = find_run(None, run or ctx.obj["run"])
    typer.echo(make_bundle(found, _incident(found, number), out or Path(f"incident-{number}.tar.gz")))


def _incident(found: Any, number: int) -> dict[str, Any]:
    from keepstep.cli.source import incidents_of_run
    from keepstep.errors import UsageError

    listed = incidents_of_run(found)
    incident = next((one for one in listed if one["number"] == number), None)
    if incident is None:
        known = f"there are {len(listed)}" if listed else "there is none"
        raise UsageError(f"no incident {number} in {found.path}: {known}")
    return incident


def _verify(run: Any) -> None:
    from keepstep.controller.ledger import LedgerReader
    from keepstep.errors import KeepstepError

    with LedgerReader(run.ledger) as reader:
        result = reader.verify()
    if result.flaw is not None:
        raise KeepstepError(f"{run.ledger}: {result.flaw}")
    typer.echo(f"{run.ledger}: {result.entries} entries, the chain holds, head {result.head}", err=True)

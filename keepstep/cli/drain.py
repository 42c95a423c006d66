"""`keepstep drain NODE`: all its ranks go elsewhere, live, and nothing new starts there."""

from __future__ import annotations

import getpass
from typing import Annotated

import typer


def drain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node to empty.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the ledger.")] = "asked for by hand",
    run: Annotated[str | None, typer.Option("--run", metavar="DIR", help="The run directory [the newest under keepstep-runs].", show_default=False)] = None,
    wait: Annotated[float, typer.Option("--wait", min=0.0, metavar="SECONDS", help="Follow the moves for so long; 0: only ask.")] = 600.0,
) -> None:  # fmt: skip
    """Move every rank of a node away while training goes on, and start nothing new there."""
    from keepstep.cli.following import follow_moves, ranks_on
    from keepstep.cli.source import find_run, request

    found = find_run(None, run)
    ranks = ranks_on(found, node)
    request(found, "/api/drains", {"node": node, "reason": reason, "by": getpass.getuser()})
    if wait and ranks:
        raise typer.Exit(follow_moves(found, ranks, wait))
    typer.echo(f"{node} is drained: {'its ranks move away' if ranks else 'no rank is played there'}")

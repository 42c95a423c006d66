"""`keepstep migrate`: one rank goes to another worker, live; the command follows until it is there."""

from __future__ import annotations

import getpass
from typing import Annotated

import typer


def migrate(
    rank: Annotated[int, typer.Option("--rank", min=0, metavar="R", help="The rank to move.", show_default=False)],
    to: Annotated[str, typer.Option("--to", metavar="NODE", help="The node to move it to [the best spare anywhere].", show_default=False)] = "",
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the ledger.")] = "asked for by hand",
    run: Annotated[str | None, typer.Option("--run", metavar="DIR", help="The run directory [the newest under keepstep-runs].", show_default=False)] = None,
    wait: Annotated[float, typer.Option("--wait", min=0.0, metavar="SECONDS", help="Follow the move for so long; 0: only ask.")] = 600.0,
) -> None:  # fmt: skip
    """Move a rank to a spare while training goes on: nothing is computed again."""
    from keepstep.cli.following import follow_moves
    from keepstep.cli.source import find_run, request

    found = find_run(None, run)
    request(found, "/api/moves", {"rank": rank, "to": to, "reason": reason, "by": getpass.getuser()})
    if wait:
        raise typer.Exit(follow_moves(found, [rank], wait))
    typer.echo(f"rank {rank} is to move: see `keepstep status`")

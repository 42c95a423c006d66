"""`keepstep undrain NODE`: a drained node may be used again."""

from __future__ import annotations

from typing import Annotated

import typer


def undrain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="The node that may be used again.")],
    run: Annotated[str | None, typer.Option("--run", metavar="DIR", help="The run directory [the newest under keepstep-runs].", show_default=False)] = None,
) -> None:  # fmt: skip
    """Let a drained node be used again."""
    from keepstep.cli.source import find_run, request

    request(find_run(None, run), "/api/undrains", {"node": node})
    typer.echo(f"{node} may be used again")

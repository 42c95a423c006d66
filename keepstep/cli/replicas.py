"""`keepstep replicas`: which bytes of a job's state have a live twin, and where; of a script, before it is a job.

With `--ranks` the script is started here, for two updates, and ended: the table is that of a job of so many
ranks. Nothing of the script behind its second update is carried out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from keepstep.core.replicas import PER_RANK

COMMAND: dict[str, Any] = {
    # Everything behind the script is the script's own, flags included.
    "context_settings": {"allow_interspersed_args": False},
    "options_metavar": "[OPTIONS]",
}
MOST_SHOWN = 16


def replicas(
    target: Annotated[str | None, typer.Argument(metavar="[RUN_DIR | SCRIPT]", help="A run directory; with --ranks, a training script.", show_default=False)] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's arguments.", show_default=False)] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="DIR", help="A run directory [the newest under keepstep-runs].", show_default=False)] = None,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, max=4096, metavar="N", help="Try SCRIPT here with N ranks, for two updates.", show_default=False)] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=4096, metavar="M", help="With --ranks: as if the ranks lay on M nodes.")] = 1,
    limit: Annotated[float, typer.Option("--limit", min=1.0, metavar="SECONDS", help="With --ranks: how long the two updates may take.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", show_default=False)] = False,
) -> None:  # fmt: skip
    """Show which bytes of a job's state have how many live twins, on which nodes, and what has none."""
    import json

    from keepstep.errors import UsageError

    rest = list(args or ())
    if ranks is not None:
        if not target:
            raise UsageError("no script given: keepstep replicas --ranks N SCRIPT [ARGS]...")
        if ranks % nodes:
            raise UsageError(f"{ranks} ranks cannot be spread evenly over {nodes} nodes")
        from keepstep.cli.replicas_trial import trial

        table = trial(Path(target), rest, ranks=ranks, nodes=nodes, limit_s=limit)
    else:
        if rest == ["--json"]:
            rest, as_json = [], True
        if rest:
            raise UsageError(f"what is {rest[0]!r}? to try a script give --ranks N before it")
        from keepstep.cli.source import find_run, replicas_of

        table = replicas_of(find_run(target, run))
    if as_json:
        typer.echo(json.dumps(table, indent=2))
        return
    show(table)


def show(table: Mapping[str, Any]) -> None:
    """The line, then the parts, the shards, and what has no twin, as tables for a terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(table["line"], markup=False)
    if not table["complete"]:
        return
    console.print(_parts(table))
    console.print(_shards(table))
    if table["alone"]:
        console.print(_alone(table))


def _table(title: str, columns: Sequence[tuple[str, str]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", caption_justify="left", box=box.SIMPLE_HEAD,
        pad_edge=False,
    )  # fmt: skip
    for name, justify in columns:
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _parts(table: Mapping[str, Any]) -> Any:
    from keepstep.core.replica_words import size

    drawn = _table(
        "\nby part",
        [("part", "left"), ("tensors", "right"), ("bytes", "right"), ("types", "left"), ("pieces", "right"),
         ("copies", "right"), ("hashes", "left")],
    )  # fmt: skip
    for row in table["parts"]:
        least, most = row["least_copies"], row["most_copies"]
        types = ", ".join(sorted(row["dtypes"], key=lambda name: -row["dtypes"][name]))
        copies = str(least) if least == most else f"{least} to {most}"
        drawn.add_row(
            row["part"], str(row["tensors"]), size(row["bytes"]), types, str(row["pieces"]), copies,
            "kept by records" if row["part"] == PER_RANK else row["check"],
        )  # fmt: skip
    return drawn


def _shards(table: Mapping[str, Any]) -> Any:
    from keepstep.core.replica_words import numbers, size

    drawn = _table(
        f"by shard, in generation {table['generation']}",
        [("ranks", "left"), ("copies", "right"), ("bytes", "right"), ("nodes", "left"), ("hashes", "left"),
         ("what", "left")],
    )  # fmt: skip
    for row in table["shards"][:MOST_SHOWN]:
        more = len(row["nodes"]) - 4
        where = ", ".join(row["nodes"][:4]) + (f" and {more} more" if more > 0 else "")
        if row["racks"]:
            where += f" (rack {', '.join(row['racks'][:4])})"
        drawn.add_row(
            numbers(row["ranks"]), str(row["copies"]), size(row["bytes"]), where, row["check"], row["place"]
        )
    left = table["shard_count"] - min(MOST_SHOWN, len(table["shards"]))
    if left:
        drawn.caption = f"and {left} more shards (--json shows them)"
    return drawn


def _alone(table: Mapping[str, Any]) -> Any:
    from keepstep.core.replica_words import size

    drawn = _table(
        "without a twin",
        [("bytes on a rank", "right"), ("ranks", "right"), ("kept by", "left"), ("part", "left"), ("name", "left")],
    )  # fmt: skip
    for row in table["alone"][:MOST_SHOWN]:
        kept = "records" if row["kept"] == "records" else "nobody"
        drawn.add_row(size(row["bytes"]), str(row["ranks"]), kept, row["part"], row["name"])
    left = table["alone_left_out"] + max(0, len(table["alone"]) - MOST_SHOWN)
    if left:
        drawn.caption = f"and {left} more"
    return drawn

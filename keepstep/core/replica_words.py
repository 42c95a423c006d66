"""The table of replicas in one line for the log, and what the loss of a rank without a twin would mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keepstep.core.replicas import DIFFERS, PER_RANK

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size(count: int) -> str:
    """Bytes for people: 1.2 GB."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.3g} {_UNITS[unit]}"


def numbers(ranks: Sequence[int], most: int = 8, rest: str = "more") -> str:
    """Ranks (ascending) in words, runs folded: "0-3, 7 and 12 more"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    told = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:most]]
    left = sum(last - first + 1 for first, last in runs[most:])
    return ", ".join(told) + (f" and {left} {rest}" if left else "")


def replica_line(table: Mapping[str, Any]) -> tuple[str, str]:
    """(the line, its level): "warning" when a rank, or a node, is the last holder of something."""
    shards, least = table["shard_count"], table["least_copies"]
    one = shards == 1
    head = f"state: {size(table['bytes'])} in {shards} shard{'s' * (not one)}"
    parts = [f"{head}, {_copies(table)}" if least >= 2 else f"{head}; {_loss(table)}"]
    level = "info" if least >= 2 else "warning"
    records = table["records"]
    if records["tensors"]:
        count = records["tensors"]
        parts.append(
            f"{count} tensor{'s' * (count != 1)} and values of each rank ({size(records['bytes'])}) have no twin: records"
        )
    if least >= 2 and table["nodes"] > 1 and table["least_nodes"] < 2:
        level = "warning"
        alone = next(row for row in table["shards"] if len(row["nodes"]) < 2)
        parts.append(
            f"all copies of {alone['place']} (ranks {numbers(alone['ranks'])}) are on node {alone['nodes'][0]}: "
            "the loss of that node would take every rank back to the script's own checkpoint"
        )
    for row in table["parts"]:
        if row["check"] == DIFFERS:
            level = "error"
            parts.append(
                f"{row['part']} of ranks {numbers(row['differing_ranks'])} differ from their twins: they are no copies"
            )
    return "; ".join(parts), level


def _copies(table: Mapping[str, Any]) -> str:
    least, nodes, shards = table["least_copies"], table["least_nodes"], table["shard_count"]
    most = max((row["copies"] for row in table["shards"]), default=least)
    count = f"{least} live copies" if least == most else f"{least} to {most} live copies"
    subject = "with" if shards == 1 else "every shard has"
    racks = min((len(row["racks"]) for row in table["shards"]), default=0)
    where = f"{nodes} node{'s' * (nodes != 1)}" + (f" in {racks} racks" if racks > 1 else "")
    return f"{subject} {count} on {where}"


def _loss(table: Mapping[str, Any]) -> str:
    """In plain words what has one copy only, and what the loss of its holder would mean."""
    ranks, cost = table["without_twin"], "all ranks go back to the script's own checkpoint"
    if table["world_size"] == 1:
        text = f"the only rank has no twin: when it is lost, {cost}"
    elif len(ranks) == table["world_size"]:
        text = f"no rank has a twin: when any rank is lost, {cost}"
    elif len(ranks) == 1:
        text = f"rank {ranks[0]} has no twin: when it is lost, {cost}"
    else:
        text = f"ranks {numbers(ranks)} have no twin: when one of them is lost, {cost}"
    single = [row for row in table["parts"] if row["least_copies"] < 2 and row["part"] != PER_RANK]
    if not single:
        return text
    what = ", ".join(f"{row['part']} {size(row['bytes'])}" for row in single if row["bytes"])
    named = [row for row in table["alone"] if row["kept"] == "nowhere"][:3]
    largest = ", ".join(f"{row['name']} {size(row['bytes'])}" for row in named)
    return f"{text} (one copy only: {what}" + (f"; largest on a rank: {largest})" if largest else ")")

"""What `keepstep run` shows while the job runs: the rank table, the incident as it unfolds, the last word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from keepstep.controller.incidents import PHASES

if TYPE_CHECKING:
    from rich.console import RenderableType

    from keepstep.controller.shell import Controller

MAX_ROWS = 64  # of a larger world only what differs is listed
_STATE_STYLES = {
    "playing": "green",
    "hot": "magenta",
    "warm": "yellow",
    "starting": "dim",
    "finished": "cyan",
}


def draw_table(status: Mapping[str, Any] | None) -> RenderableType:
    """The live table for a terminal (see `keepstep.controller.view`); None before the first picture."""
    from rich.console import Group
    from rich.text import Text

    if status is None:
        return Text("")
    nodes = node_table(status)
    lines = [protection_line(status), incident_line(status["incident"])]
    tables = [rank_table(status), *([nodes] if nodes is not None else [])]
    return Group(*tables, *(Text(line) for line in lines if line))


def rank_table(status: Mapping[str, Any]) -> RenderableType:
    """Workers by rank, then the spares."""
    from rich.table import Table
    from rich.text import Text

    told = {name: status[name] for name in ("step", "generation") if status[name] is not None}
    table = Table(
        title="  ".join(
            [status["job"], status["state"], *(f"{name} {value}" for name, value in told.items())]
        ),
        title_justify="left",
        title_style="bold",
    )
    for name, justify in (
        ("rank", "right"),
        ("worker", "right"),
        ("slot", "right"),
        ("state", "left"),
        ("step", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    rows = status["workers"]
    if len(rows) > MAX_ROWS:
        newest = max((row["step"] or 0 for row in rows), default=0)
        odd = [
            row for row in rows if row["state"] not in ("playing", "ended") or (row["step"] or 0) < newest - 1
        ]
        table.caption = (
            f"{len(rows)} workers; shown are {min(len(odd), MAX_ROWS)} spares and ranks that differ"
        )
        rows = odd[:MAX_ROWS]
    for row in rows:
        state = Text(row["state"], style=_STATE_STYLES.get(row["state"], ""))
        rank = "spare" if row["rank"] is None else str(row["rank"])
        table.add_row(
            rank,
            str(row["worker"]),
            f"{row['node']}:{row['slot']}",
            state,
            "-" if row["step"] is None else str(row["step"]),
        )
    return table


def protection_line(status: Mapping[str, Any]) -> str:
    """One line when a failure would not be repaired; else nothing."""
    if status.get("mode") == "observe":
        return "observe: failures are watched and told, nothing is done about them"
    shield = status.get("protection")
    if not shield or shield["on"]:
        return ""
    ranks = ", ".join(map(str, shield["ranks"][:8])) + (", ..." if len(shield["ranks"]) > 8 else "")
    whom = f" for rank {ranks}" if ranks else ""
    return f"protection off{whom}: {shield['reason']}"


def node_table(status: Mapping[str, Any]) -> RenderableType | None:
    """The nodes, where there is more than one or one is not well; else None."""
    from rich.table import Table
    from rich.text import Text

    nodes = status.get("nodes") or []
    troubled = [node for node in nodes if node.get("state") not in (None, "connected")]
    if len(nodes) < 2 and not troubled:
        return None
    table = Table()
    for name in ("node", "agent", "ranks", "spares", "slots", "labels"):
        table.add_column(name, justify="right" if name in ("spares", "slots") else "left")
    for node in nodes:
        state = str(node.get("state") or "connected")
        if node.get("silent_s"):
            state += f", silent for {node['silent_s']:.1f} s"
        labels = ", ".join(f"{name}={value}" for name, value in node.get("labels", {}).items())
        table.add_row(
            str(node["node"]),
            Text(state, style="" if node in troubled else "green"),
            _shortened(node["ranks"]),
            str(node["spares"]),
            str(node.get("slots") or "-"),
            labels,
        )
    return table


def _shortened(ranks: Sequence[int]) -> str:
    """Ranks as ranges: "0-7, 12"."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def standing_lines(status: Mapping[str, Any]) -> list[str]:
    """What stands beside the tables: protection, spares, records; only what there is to say."""
    lines = []
    if off := protection_line(status):
        lines.append(off)
    elif status.get("protection"):
        lines.append("protection on")
    spares = status.get("spares")
    if spares is not None:
        told = ", ".join(f"{count} {state}" for state, count in spares.items() if count)
        lines.append(f"spares: {told or 'none'}")
    if unkept := status.get("unkept_ranks"):
        lines.append(f"records not held elsewhere: ranks {_shortened(unkept)}")
    return lines


def progress_line(status: Mapping[str, Any] | None) -> str:
    """The same in one line, for a log."""
    if status is None:
        return ""
    if status["waiting_for"]:
        return f"{status['state']}: waiting for {status['waiting_for']}"
    spares = sum(row["rank"] is None for row in status["workers"])
    off = protection_line(status)
    line = f"{status['state']}: step {status['step']}, generation {status['generation']}, {spares} spares"
    return f"{line}; {off}" if off else line


def incident_line(incident: Mapping[str, Any] | None) -> str:
    """The newest incident: what happened, and how long each phase took so far."""
    if incident is None:
        return ""
    phases = incident.get("phases_s", {})
    told = "  ".join(f"{name} {phases[name]:.3f} s" for name in PHASES if phases.get(name))
    line = (
        f"incident {incident['number']} ({incident['state']}): {incident.get('reason', '')}  {told}".rstrip()
    )
    blame = incident.get("blame") or {}
    return line if blame.get("kind", "nobody") == "nobody" else f"{line}\n  {blame['text']}"


def summary(controller: Controller, code: int, head: str, seconds: float) -> str:
    """The job's last line: how it ended, what it cost, and the ledger's hash to hold it against."""
    incidents = controller.incidents.all()
    lost = sum(int(incident.get("steps_lost") or 0) for incident in incidents)
    again = sum(int(incident.get("steps_recomputed") or 0) for incident in incidents)
    count = f"{len(incidents)} incident{'s' * (len(incidents) > 1)}"
    what = f"{count}, {lost} steps lost, {again} recomputed" if incidents else "no incident"
    ended = "finished" if code == 0 else f"ended with exit code {code}"
    return f"job {controller.spec.job} {ended} after {seconds:.1f} s: {what}; ledger head {head[:16]}"

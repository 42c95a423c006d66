"""`keepstep logs`: what the workers wrote, over all nodes, by time; a rank's story goes on with its next player."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from keepstep.agent.log_reader import Line, Query
    from keepstep.cli.log_source import Stream
    from keepstep.controller.rundir import RunDirectory

FOLLOW_INTERVAL_S = 0.5
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def logs(
    run_dir: Annotated[str | None, typer.Argument(metavar="[RUN_DIR]", help="A run directory.", show_default=False)] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="DIR", help="The same [the newest under keepstep-runs].", show_default=False)] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job ends.", show_default=False)] = False,
    rank: Annotated[int | None, typer.Option("--rank", metavar="R", min=0, help="Only this rank, across the workers that played it.", show_default=False)] = None,
    node: Annotated[str | None, typer.Option("--node", metavar="N", help="Only workers of this node.", show_default=False)] = None,
    since: Annotated[str | None, typer.Option("--since", metavar="WHEN", help="10m, 2h, 14:30, or 2026-11-30T14:30.", show_default=False)] = None,
) -> None:  # fmt: skip
    """Show what the workers wrote, over all nodes, in the order of time."""
    from keepstep.agent.log_reader import Query
    from keepstep.cli.source import find_run

    found = find_run(run_dir, run)
    since_ns = 0 if since is None else parse_since(since, time.time())
    query = Query(rank=rank, node=node, since_ns=since_ns, whole=follow)
    _check(found, query)
    if follow:
        _follow(found, query)
    else:
        from keepstep.cli.log_source import merged

        streams = _streams(found, query)
        for line in merged(streams):
            typer.echo(shown(line))
        _tell_missing(streams)


def parse_since(text: str, now_s: float) -> int:
    """A moment as Unix time in nanoseconds. Raises UsageError."""
    from keepstep.errors import UsageError

    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return int((now_s - float(found[1]) * _UNITS[found[2]]) * 1e9)
    try:
        if re.fullmatch(r"\d\d:\d\d(:\d\d)?", text):
            today = datetime.datetime.fromtimestamp(now_s).date().isoformat()
            moment = datetime.datetime.fromisoformat(f"{today}T{text}")
            if moment.timestamp() > now_s:
                moment -= datetime.timedelta(days=1)
        else:
            moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--since {text!r}: give 30s, 10m, 2h, 1d, 14:30 or 2026-11-30T14:30") from None
    return int(moment.timestamp() * 1e9)


def shown(line: Line) -> str:
    """A line for people: when, who, what."""
    when = datetime.datetime.fromtimestamp(line.time_ns / 1e9).strftime("%H:%M:%S.%f")[:-3]
    if line.note:
        return f"{when} --- {line.text} ---"
    who = f"worker {line.worker}"
    if line.rank is not None:
        who = f"rank {line.rank} | {who} | gen {line.generation}"
    return f"{when} [{who}] {line.text}"


def _check(found: RunDirectory, query: Query) -> None:
    """A rank or node that the job does not have is a mistake, said at once."""
    from keepstep.cli.source import status_of
    from keepstep.errors import UsageError

    status = status_of(found)
    if query.rank is not None and query.rank >= status["world_size"]:
        raise UsageError(f"there is no rank {query.rank}: the job has {status['world_size']}")
    nodes = _nodes_of(status)
    if query.node is not None and nodes and query.node not in nodes:
        raise UsageError(f"there is no node {query.node}: the job has {', '.join(nodes)}")


def _nodes_of(status: Mapping[str, Any]) -> list[str]:
    told = [node["node"] for node in status.get("nodes") or ()]
    return list(dict.fromkeys([*told, *(row["node"] for row in status["workers"] if row["node"])]))


def _streams(found: RunDirectory, query: Query) -> list[Stream]:
    """Through the controller when a living job has several nodes, else the files here."""
    from keepstep.cli.log_source import Stream, from_files, from_node
    from keepstep.cli.source import status_of

    address = found.address()
    status = status_of(found)
    nodes = _nodes_of(status)
    if address is not None and status["live"] and len(nodes) > 1:
        wanted = [node for node in nodes if query.node in (None, node)]
        return [Stream(node, from_node(address, node, query)) for node in wanted]
    if len(nodes) > 1 and found.address() is None:
        typer.echo("keepstep: the job is over: only logs that lie in this run directory are shown", err=True)
    return [Stream("", from_files(found.path, query))]


def _follow(found: RunDirectory, query: Query) -> None:
    """Show what comes until the job is over; each line once."""
    from keepstep.cli.log_source import merged

    streams = _streams(found, query)
    missing = ""
    while True:
        living = found.address() is not None  # asked first: what was written before its end is still shown
        for line in merged(streams):
            typer.echo(shown(line))
        failed = "; ".join(f"{stream.name}: {stream.failed}" for stream in streams if stream.failed)
        if not living:
            _show_rest(found, query, streams)
            return
        if failed and failed != missing:
            _tell_missing(streams)
        missing = failed
        time.sleep(FOLLOW_INTERVAL_S)


def _show_rest(found: RunDirectory, query: Query, streams: list[Stream]) -> None:
    """The job is over: its last lines, finished or not, as far as they lie here."""
    import dataclasses

    from keepstep.cli.log_source import Stream, from_files, merged

    last = Stream("", from_files(found.path, dataclasses.replace(query, whole=False)))
    for stream in streams:
        last.cursors.update(stream.cursors)
    for line in merged([last]):
        typer.echo(shown(line))


def _tell_missing(streams: list[Stream]) -> None:
    for stream in streams:
        if stream.failed:
            typer.echo(f"keepstep: warning: {stream.failed}", err=True)

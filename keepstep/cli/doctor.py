"""`keepstep doctor`: would a job be safe on this machine, and between the nodes? Each answer one line with its cure.

Exit code 1 when something failed; a warning costs nothing but attention.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from keepstep.cli.doctor_checks import Check

LIMIT_S = 18.0
_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}

_Text = str | None


def doctor(
    join: Annotated[_Text, typer.Option("--join", metavar="URL", help="Ask this controller too: clocks and network of its nodes.", show_default=False)] = None,
    run: Annotated[_Text, typer.Option("--run", metavar="DIR", help="The same, of the job in this run directory.", show_default=False)] = None,
    token_file: Annotated[_Text, typer.Option("--token-file", metavar="FILE", help="File with the job's token, for --join.", show_default=False)] = None,
    tls_cert: Annotated[_Text, typer.Option("--tls-cert", metavar="FILE", help="This machine's certificate (PEM), for --join.", show_default=False)] = None,
    tls_key: Annotated[_Text, typer.Option("--tls-key", metavar="FILE", help="Its key.", show_default=False)] = None,
    tls_ca: Annotated[_Text, typer.Option("--tls-ca", metavar="FILE", help="The authority that signed every node's certificate.", show_default=False)] = None,
    slots: Annotated[int, typer.Option("--slots", min=1, metavar="N", help="Workers that this machine is to run.")] = 8,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, metavar="N", help="Ranks of the whole job [--slots].", show_default=False)] = None,
    port: Annotated[list[int] | None, typer.Option("--port", min=1, max=65_535, metavar="PORT", help="A port that has to be free; can be repeated [29400, as a warning].", show_default=False)] = None,
    log_dir: Annotated[Path, typer.Option("--log-dir", metavar="DIR", help="Where run directories will lie.")] = Path("keepstep-runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.", show_default=False)] = False,
) -> None:  # fmt: skip
    """Check this machine (and, with --join, the network between the nodes) before a job needs it."""
    import time

    from keepstep.cli.doctor_torch import TorchLook

    started_s = time.monotonic()
    controller = _controller(
        {"join": join, "token_file": token_file, "tls_cert": tls_cert, "tls_key": tls_key, "tls_ca": tls_ca},
        run,
    )
    look = TorchLook()
    found: list[Check] = []
    try:
        for check in _all(look, controller, slots, ranks or slots, port, log_dir, started_s + LIMIT_S):
            found.append(check)
            if not as_json:
                _show(check)
    finally:
        look.close()
    if as_json:
        _print_json(found)
    raise typer.Exit(any(check.outcome == "failed" for check in found))


def _all(
    look: Any, controller: Any, slots: int, ranks: int, port: list[int] | None, log_dir: Path, until_s: float
) -> Iterator[Check]:
    from keepstep.cli import doctor_checks as machine
    from keepstep.cli.addresses import RENDEZVOUS_PORT

    yield from machine.versions()
    yield machine.process_watching()
    yield machine.stacks()
    yield machine.shared_memory(slots, 4 << 20)
    yield machine.sockets()
    yield machine.file_limit(ranks, slots)
    yield from machine.ports(port or [RENDEZVOUS_PORT], asked=bool(port))
    yield from machine.run_directory(log_dir)
    yield from machine.gpus()
    if controller is not None:
        yield from controller.checks()
    yield from look.checks(until_s)


def _controller(given: dict[str, str | None], run: str | None) -> Any:
    """The controller to ask, if any. Raises UsageError for a line that means nothing."""
    from keepstep.cli.doctor_join import Controller
    from keepstep.errors import UsageError

    if given["join"] and run:
        raise UsageError("--join and --run both name a controller: give one")
    if given["join"]:
        from keepstep.cli import options

        node, endpoint = options.choose_agent(given, environ=os.environ, directory=Path.cwd())
        assert node.trust.token is not None
        return Controller(endpoint, node.trust.token, node.trust.tls)
    if run is None:
        return None
    from keepstep.cli.addresses import parse_join
    from keepstep.cli.source import find_run

    address = find_run(run, None).address()
    if address is None:
        raise UsageError(f"no controller of {run} is alive")
    return Controller(parse_join(address.url)[0], address.token, address.tls)


def _show(check: Check) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    console.print(
        Text.assemble((f"{check.outcome:<8}", _STYLES[check.outcome]), f"{check.name}: {check.found}")
    )
    if check.outcome != "ok" and check.cure:
        console.print(Text(f"{'':8}-> {check.cure}", style="dim"))


def _print_json(found: list[Check]) -> None:
    import json

    rows = [
        {"name": c.name, "outcome": c.outcome, "found": c.found, "cure": c.cure if c.outcome != "ok" else ""}
        for c in found
    ]
    typer.echo(json.dumps({"ok": all(c.outcome != "failed" for c in found), "checks": rows}, indent=2))

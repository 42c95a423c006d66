"""`keepstep policy`: print what is done about health signals, check a file, try it on recorded signals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from keepstep.core.health_events import SignalSeen

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)

EXIT_FAULTY = 2
_File = Annotated[str | None, typer.Option("--policy", metavar="FILE", help="A policy file [the built-in policy].", show_default=False)]  # fmt: skip


@app.callback()
def _policy() -> None:
    """What is done about health signals: show, check, test."""


@app.command()
def show(policy: _File = None) -> None:
    """Print the whole policy as TOML: every rule in its order."""
    from keepstep.cli.policy_file import write_policy

    typer.echo(write_policy(_policy_of(policy)), nl=False)


@app.command()
def check(file: Annotated[str, typer.Argument(metavar="FILE", help="A policy file.")]) -> None:
    """Name everything that is wrong with a policy file, by its line."""
    from pathlib import Path

    from keepstep.cli.policy_file import check_policy, read_text

    policy, faults = check_policy(read_text(Path(file)))
    for fault in faults:
        typer.echo(f"{file}:{fault.line}: {fault.text}", err=True)
    if policy is None:
        raise typer.Exit(EXIT_FAULTY)
    typer.echo(f"{file}: {len(policy.rules)} rules{', dry run' if policy.dry_run else ''}")


@app.command("test")
def try_on(
    events: Annotated[str, typer.Argument(metavar="EVENTS.jsonl", help="Recorded signals, one JSON object a line.")],
    policy: _File = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the decisions as JSON, one a line.", show_default=False)] = False,
) -> None:  # fmt: skip
    """Say what the policy would have done about recorded signals, and why."""
    import json
    from pathlib import Path

    from keepstep.core.policy_replay import replay

    count = 0
    for at_s, decision in replay(_policy_of(policy), _signals(Path(events))):
        count += 1
        if as_json:
            typer.echo(json.dumps({"at_s": at_s, **decision.body()}))
            continue
        ranks = ", ".join(map(str, decision.ranks))
        what = decision.action.value + (f" rank {ranks}" if ranks else "")
        refused = f"no {what}, because {decision.refused}; " if decision.refused else f"{what}; "
        typer.echo(f"{at_s:10.1f} s  {refused}{decision.reason}")
    if not as_json and not count:
        typer.echo("nothing would have been done")


def _policy_of(file: str | None) -> Any:
    from pathlib import Path

    from keepstep.cli.policy_file import read_policy
    from keepstep.core.policy_rules import Policy

    return Policy() if file is None else read_policy(Path(file))


def _signals(path: Any) -> list[tuple[float, SignalSeen, int | None]]:
    """Raises UsageError for the first line that is no signal."""
    import json

    from keepstep.errors import UsageError

    found: list[tuple[float, SignalSeen, int | None]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_signal(json.loads(line)))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{path}:{number}: not a recorded signal: {why}") from None
        if len(found) > 1 and found[-1][0] < found[-2][0]:
            raise UsageError(f"{path}:{number}: at_s goes back in time")
    return found


def _signal(value: Any) -> tuple[float, SignalSeen, int | None]:
    """One line: `at_s`, the signal's fields, and `rank` where it is known."""
    from keepstep.core.health_events import NUMBERS, SEVERITIES, TEXTS, WHOLE, SignalSeen

    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    body = dict(value)
    at_s, rank = body.pop("at_s"), body.pop("rank", None)
    for name, one in (*body.items(), ("at_s", at_s), ("rank", rank)):
        if name in TEXTS:
            fine = isinstance(one, str)
        elif name in WHOLE or name == "rank":
            fine = one is None or (type(one) is int and one >= 0)
        elif name in (*NUMBERS, "at_s"):
            fine = type(one) in (int, float) or (one is None and name in ("value", "limit"))
        else:
            raise ValueError(f"unknown field {name!r}")
        if not fine:
            raise ValueError(f"{name} cannot be {one!r}")
    signal = SignalSeen(**{"severity": "warn", **body})
    if signal.severity not in SEVERITIES:
        raise ValueError(f"severity must be one of {', '.join(SEVERITIES)}, not {signal.severity!r}")
    return float(at_s), signal, rank

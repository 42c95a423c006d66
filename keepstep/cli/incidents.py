"""`keepstep incidents`: what went wrong, what was decided, and what it cost."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

BAR_WIDTH = 40

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
    if not listed:
        typer.echo(f"no incident in {found.path}")
        return
    for incident in listed:
        typer.echo(_in_two_lines(incident))


@app.command()
def show(
    ctx: typer.Context,
    number: Annotated[int, typer.Argument(metavar="N", help="The incident's number.", min=1)],
    run: _Run = None,
    as_json: _Json = False,
) -> None:
    """One incident: evidence, decision and reason, phases in seconds, steps lost and recomputed."""
    from keepstep.cli.source import find_run, incidents_of_run
    from keepstep.errors import UsageError

    found = find_run(None, run or ctx.obj["run"])
    listed = incidents_of_run(found)
    incident = next((one for one in listed if one["number"] == number), None)
    if incident is None:
        known = f"there are {len(listed)}" if listed else "there is none"
        raise UsageError(f"no incident {number} in {found.path}: {known}")
    typer.echo(json.dumps(incident, indent=2) if as_json else story(incident))


def _verify(run: Any) -> None:
    from keepstep.controller.ledger import LedgerReader
    from keepstep.errors import KeepstepError

    with LedgerReader(run.ledger) as reader:
        result = reader.verify()
    if result.flaw is not None:
        raise KeepstepError(f"{run.ledger}: {result.flaw}")
    typer.echo(f"{run.ledger}: {result.entries} entries, the chain holds, head {result.head}", err=True)


def _in_two_lines(incident: Mapping[str, Any]) -> str:
    """What and when, then the outcome and its price."""
    lost, again = incident.get("steps_lost", 0), incident.get("steps_recomputed", 0)
    price = f"{_seconds(incident.get('total_s'))}, {lost} steps lost, {again} recomputed"
    number = f"{incident['number']:>3}"
    if would := _would(incident):
        price = would
    return (
        f"{number}  {_clock(incident)}  {incident.get('reason', '')}\n{'':>3}  {_outcome(incident)}: {price}"
    )


def story(incident: Mapping[str, Any]) -> str:
    """One incident for a human, as lines of plain text."""
    lines = [f"incident {incident['number']}: {incident.get('reason', '')}", ""]
    facts = {
        "when": _clock(incident),
        "cause": incident.get("cause"),
        "victims": "; ".join(
            f"rank {victim['rank']} (worker {victim['worker']} on {victim['node']}): {victim['reason']}"
            for victim in incident.get("victims", ())
        ),
        "decision": _decision(incident),
        "not done": _would(incident),
        "verdict": incident.get("verdict"),
        "outcome": _outcome(incident),
        "steps lost": incident.get("steps_lost", 0),
        "recomputed": incident.get("steps_recomputed", 0),
        "copied": _copied(incident),
    }
    lines += [f"  {name:<11} {value}" for name, value in facts.items() if value not in (None, "")]
    lines += ["", "  phase          seconds"]
    lines += _bars(incident.get("phases_s", {}))
    lines.append(f"  {'total':<11} {_seconds(incident.get('total_s')):>10}")
    evidence = incident.get("evidence") or {}
    if evidence:
        lines += ["", "  evidence"]
        for name, value in evidence.items():
            text = value if isinstance(value, str) else json.dumps(value)
            lines += [
                f"    {name}: {part}" if at == 0 else f"      {part}"
                for at, part in enumerate(text.splitlines() or [""])
            ]
    return "\n".join(lines)


def _bars(phases: Mapping[str, float]) -> list[str]:
    """A bar for each phase, to one scale, and a mark for a phase too short to be seen."""
    from keepstep.controller.incidents import PHASES

    longest = max(phases.values(), default=0.0)
    names = [*PHASES, *(name for name in phases if name not in PHASES)]
    lines = []
    for name in names:
        value = phases.get(name, 0.0)
        width = round(BAR_WIDTH * value / longest) if longest else 0
        bar = "█" * width or ("▏" if value else "")
        lines.append(f"  {name:<11} {value:>10.4f}  {bar}".rstrip())
    return lines


def _would(incident: Mapping[str, Any]) -> str:
    """What mode observe decided and did not do."""
    return str((incident.get("would") or {}).get("text", ""))


def _decision(incident: Mapping[str, Any]) -> str:
    replaced = incident.get("replacements") or {}
    generations = incident.get("generations") or []
    if not generations:
        return "none yet" if incident["state"] == "open" else "none"
    who = (
        ", ".join(f"rank {rank} to worker {worker}" for rank, worker in replaced.items())
        or "the same workers"
    )
    return f"generation {generations[-1]}: {who}"


def _outcome(incident: Mapping[str, Any]) -> str:
    if incident["state"] == "open":
        return "open"
    words = {
        "rebuilt": "rebuilt from live copies",
        "same_map": "resumed with the same workers",
        "restarted_in_setup": "restarted from the script's start (setup)",
        "rollback": "rolled back",
        "unresolved": "not resolved",
        "observed": "observed only",
        "unprotected": "not repaired: protection was off",
    }
    outcome = words.get(str(incident.get("resolution")), str(incident.get("resolution") or "closed"))
    return outcome if incident.get("bit_exact", True) else f"{outcome}, not bit for bit"


def _copied(incident: Mapping[str, Any]) -> str:
    count = incident.get("transfer_bytes") or 0
    return f"{count / 1e6:.1f} MB of state" if count else ""


def _clock(incident: Mapping[str, Any]) -> str:
    when = incident.get("time_s")
    return "" if when is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"

"""One incident for a human: what happened, a timeline on one axis, who waited for whom, where the evidence lies.

Plain text, the same on a terminal, in a mail and at the top of a bundle.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

AXIS_WIDTH = 48
MAX_STANDS = 24
# What `detect` begins with is no phase of a member; a member's own times start with the announcement.
_MEMBER_PHASES = ("connect_s", "vote_s", "transfer_s")
_MARKS = {"connect_s": "c", "vote_s": "v", "transfer_s": "t"}


def in_two_lines(incident: Mapping[str, Any]) -> str:
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
    """One incident in full, as lines of plain text."""
    lines = [f"incident {incident['number']}: {incident.get('reason', '')}", ""]
    facts = {
        "when": _clock(incident),
        "cause": incident.get("cause"),
        "victims": "; ".join(
            f"rank {victim['rank']} (worker {victim['worker']} on {victim['node']}): {victim['reason']}"
            for victim in incident.get("victims", ())
        ),
        "blame": (incident.get("blame") or {}).get("text"),
        "decision": _decision(incident),
        "not done": _would(incident),
        "verdict": incident.get("verdict"),
        "outcome": _outcome(incident),
        "steps lost": incident.get("steps_lost", 0),
        "recomputed": incident.get("steps_recomputed", 0),
        "copied": _copied(incident),
    }
    lines += [f"  {name:<11} {value}" for name, value in facts.items() if value not in (None, "")]
    lines += timeline(incident)
    lines += _stands(incident)
    lines += _files(incident)
    lines += _seen(incident.get("evidence") or {})
    return "\n".join(lines)


# ---- the timeline -------------------------------------------------------------------------------


def timeline(incident: Mapping[str, Any]) -> list[str]:
    """Each phase where it lies between the first evidence and the resumption; then the slowest ranks."""
    from keepstep.controller.incidents import PHASES

    phases: Mapping[str, float] = incident.get("phases_s", {})
    names = [*PHASES, *(name for name in phases if name not in PHASES)]
    whole = sum(phases.get(name, 0.0) for name in names)
    head = f"  {'phase':<11} {'seconds':>10}"
    if whole:
        end = f"{whole:.3f} s"
        head += f"  0{end:>{AXIS_WIDTH - 1}}"
    lines, at = ["", head], 0.0
    for name in names:
        value = phases.get(name, 0.0)
        lines.append(f"  {name:<11} {value:>10.4f}  {_bar(at, value, whole)}".rstrip())
        at += value
    lines.append(f"  {'total':<11} {_seconds(incident.get('total_s')):>10}")
    return lines + _members(incident, phases, whole)


def _bar(start: float, length: float, whole: float, fill: str = "█") -> str:
    """A bar from `start`; a phase too short to be seen leaves a mark where it was."""
    if not whole or not length:
        return ""
    first = min(AXIS_WIDTH - 1, round(AXIS_WIDTH * start / whole))
    last = min(AXIS_WIDTH, round(AXIS_WIDTH * (start + length) / whole))
    return " " * first + (fill * (last - first) or "▏")


def _members(incident: Mapping[str, Any], phases: Mapping[str, float], whole: float) -> list[str]:
    members: Sequence[Mapping[str, Any]] = incident.get("members") or []
    if not members or not whole:
        return []
    announced = phases.get("detect", 0.0) + phases.get("decide", 0.0)
    title = "each rank" if len(members) < 16 else "the slowest ranks"
    lines = [
        "",
        f"  {title}, from the announcement on (c connect, v vote, t transfer, - until its first new step)",
    ]
    for member in sorted(members, key=lambda one: (one.get("rank") is None, one.get("rank"), one["worker"])):
        rank = "?" if member.get("rank") is None else member["rank"]
        drawn, at = "", announced
        for phase in _MEMBER_PHASES:
            length = float(member.get(phase) or 0.0)
            drawn = _over(drawn, _bar(at, length, whole, _MARKS[phase]).replace("▏", _MARKS[phase]))
            at += length
        resumed = float(member.get("resumed_s") or 0.0)
        drawn = _over(drawn, _bar(at, max(0.0, announced + resumed - at), whole, "-").replace("▏", "-"))
        who = f"rank {rank}"
        lines.append(f"  {who:<11} {resumed:>10.4f}  {drawn}".rstrip())
    return lines


def _over(below: str, above: str) -> str:
    """Text drawn over another: what is drawn later gives way to what stands there already."""
    width = max(len(below), len(above))
    pairs = zip(below.ljust(width), above.ljust(width), strict=True)
    return "".join(mark if mark != " " else other for mark, other in pairs)


# ---- evidence -----------------------------------------------------------------------------------


def _stands(incident: Mapping[str, Any]) -> list[str]:
    """How the ranks stood when the generation ended: those that did not live first, then by their wait."""
    stands: Sequence[Mapping[str, Any]] = (incident.get("gathered") or {}).get("stands") or []
    if not stands:
        return []
    generation = (incident.get("gathered") or {}).get("generation")
    lines = ["", f"  how the ranks stood at the end of generation {generation}"]
    for stand in stands[:MAX_STANDS]:
        doing = f"step {stand['step']}, phase {str(stand['phase']).lower()}"
        if not stand["alive"]:
            doing += f", dead ({stand.get('ended') or 'not known how'})"
        elif stand.get("state") == "T":
            doing += ", stopped"
        elif stand["waited_s"]:
            doing += f", waited {stand['waited_s']:.3f} s"
        where = f", in {stand['at']}" if stand.get("at") else ""
        lines.append(
            f"    rank {stand['rank']:<4} worker {stand['worker']:<4} on {stand['node']}: {doing}{where}"
        )
    if len(stands) > MAX_STANDS:
        lines.append(f"    ... and {len(stands) - MAX_STANDS} more (--json has them)")
    return lines


def _seen(evidence: Mapping[str, Any]) -> list[str]:
    """What the agents told of suspects before anything was decided, by worker."""
    lines: list[str] = []
    for worker, facts in evidence.items():
        lines += ["", f"  seen of worker {worker} before the decision"]
        for name, value in facts.items() if isinstance(facts, Mapping) else [("said", facts)]:
            if isinstance(value, list):
                lines += [f"    {name}:", *(f"      {line}" for line in value)]
            else:
                text = value if isinstance(value, str) else json.dumps(value)
                lines.append(f"    {name}: {text}")
    return lines


def _files(incident: Mapping[str, Any]) -> list[str]:
    nodes: Sequence[Mapping[str, Any]] = (incident.get("gathered") or {}).get("nodes") or []
    if not nodes:
        return []
    lines = ["", "  evidence (under each node's run directory; `keepstep incidents bundle` packs it)"]
    for node in nodes:
        if "error" in node:
            lines.append(f"    {node['node']}: none ({node['error']})")
            continue
        lines.append(f"    {node['node']}: {node['folder']}/")
        lines += [f"    {'':>{len(node['node'])}}  {folder}/" for folder in node.get("workers") or ()]
        lines += [f"      kernel: {line}" for line in (node.get("notable") or ())[-5:]]
    return lines


# ---- words --------------------------------------------------------------------------------------


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
        "after_training": "not repaired: all steps were finished",
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

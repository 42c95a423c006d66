"""A policy as a TOML file: read with every fault named by its line, and written so that it reads the same again.

A file's rules come before the built-in ones, one of the same name takes its place; `defaults = false` leaves
only the file's own.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from keepstep.core.policy_rules import DEFAULT_RULES, Act, Policy, Rule
from keepstep.errors import UsageError

MOST_BYTES = 1 << 20
NUMBERS = ("above", "window_s", "cooldown_s", "cure_s")
WHOLE = ("times", "windows")
RULE_KEYS = tuple(field.name for field in fields(Rule))
TOP = {"dry_run": bool, "defaults": bool, "spares_per_hour": int, "moves_per_rank_per_hour": int}
_DEFAULTS = {field.name: field.default for field in fields(Rule)}
_KEY = re.compile(r"""\s*["']?([A-Za-z0-9_-]+)["']?\s*=""")
_RULE = re.compile(r"\s*\[\[\s*rule\s*\]\]")


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong, and in which line of the file."""

    line: int
    text: str


def read_policy(path: Path) -> Policy:
    """Raises UsageError, in one line that names the first fault."""
    policy, faults = check_policy(read_text(path))
    if policy is None:
        more = f" (and {len(faults) - 1} more: keepstep policy check {path})" if len(faults) > 1 else ""
        raise UsageError(f"{path}:{faults[0].line}: {faults[0].text}{more}")
    return policy


def read_text(path: Path) -> str:
    """The file's text. Raises UsageError when it cannot be one."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise UsageError(f"{path} is larger than {MOST_BYTES >> 20} MiB: not a policy")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def check_policy(text: str) -> tuple[Policy | None, list[Fault]]:
    """The policy, or everything that is wrong with it in the order of its lines."""
    try:
        content = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        where = re.search(r"line (\d+)", str(error))
        line = int(where.group(1)) if where else len(text.splitlines())
        return None, [Fault(max(1, line), f"not valid TOML: {str(error).split(' (at ')[0]}")]
    lines = _Lines(text)
    faults = [*_top_faults(content, lines)]
    tables = content.get("rule", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        return None, [*faults, Fault(lines.of(None, "rule"), "each rule begins with [[rule]]")]
    rules: list[Rule] = []
    names: dict[str, int] = {}
    for index, table in enumerate(tables):
        wrong = list(_rule_faults(table, index, lines))
        name = table.get("name")
        if isinstance(name, str) and name in names:
            text_ = f"two rules are called {name!r}: the first is in line {names[name]}"
            wrong.append(Fault(lines.of(index, "name"), text_))
        elif isinstance(name, str):
            names[name] = lines.of(index, "name")
        if not wrong:
            try:
                rules.append(_rule(table))
            except ValueError as error:
                key = str(error).split()[0]
                wrong.append(Fault(lines.of(index, key), f"rule {name!r}: {error}"))
        faults += wrong
    if faults:
        return None, sorted(faults, key=lambda fault: fault.line)
    top = {key: content[key] for key in TOP if key in content and key != "defaults"}
    if content.get("defaults", True):
        own = {rule.name: rule for rule in rules}
        builtin = {rule.name for rule in DEFAULT_RULES}
        rules = [rule for rule in rules if rule.name not in builtin]
        rules += [own.get(rule.name, rule) for rule in DEFAULT_RULES]
    return Policy(rules=tuple(rules), **top), []


def write_policy(policy: Policy) -> str:
    """The whole policy as TOML; only what differs from a rule's defaults is written."""
    # fmt: off
    parts = [
        "# What is done about health signals. The first rule that matches and has held long enough decides.",
        f"dry_run = {json.dumps(policy.dry_run)}",
        f"spares_per_hour = {policy.spares_per_hour}",
        f"moves_per_rank_per_hour = {policy.moves_per_rank_per_hour}",
        "defaults = false  # the rules below are all there are; true: the built-in ones follow them",
    ]
    # fmt: on
    for rule in policy.rules:
        parts += ["", "[[rule]]"]
        for key in RULE_KEYS:
            value = getattr(rule, key)
            if key not in ("name", "action") and value == _DEFAULTS[key]:
                continue
            parts.append(f"{key} = {_toml(value)}")
    return "\n".join(parts) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return json.dumps(str(value) if isinstance(value, str) else value)


def _top_faults(content: Mapping[str, Any], lines: _Lines) -> Iterator[Fault]:
    for key, value in content.items():
        line = lines.of(None, key)
        if key == "rule":
            continue
        if key not in TOP:
            yield Fault(line, f"unknown setting {key!r}: there are {', '.join(TOP)} and [[rule]]")
        elif TOP[key] is bool and not isinstance(value, bool):
            yield Fault(line, f"{key} must be true or false")
        elif TOP[key] is int and (type(value) is not int or not 0 <= value <= 1_000_000):
            yield Fault(line, f"{key} must be a whole number, 0 or more")


def _rule_faults(table: Mapping[str, Any], index: int, lines: _Lines) -> Iterator[Fault]:
    who = f"rule {table['name']!r}" if isinstance(table.get("name"), str) else f"rule {index + 1}"
    for key in ("name", "action"):
        if key not in table:
            yield Fault(lines.of(index, ""), f"{who} has no {key}")
    for key, value in table.items():
        if (text := _value_fault(key, value)) is not None:
            yield Fault(lines.of(index, key), f"{who}: {text}")


def _value_fault(key: str, value: Any) -> str | None:
    """What is wrong with one value of a rule, by its kind alone."""
    if key not in RULE_KEYS:
        return f"unknown setting {key!r}: there are {', '.join(RULE_KEYS)}"
    if key == "action":
        acts = [act.value for act in Act]
        return None if value in acts else f"action must be one of {', '.join(acts)}, not {value!r}"
    if key == "codes":
        whole = isinstance(value, list) and all(type(code) is int for code in value)
        return None if whole else "codes must be a list of whole numbers"
    if key == "over_limit":
        return None if isinstance(value, bool) else "over_limit must be true or false"
    if key in WHOLE:
        return None if type(value) is int else f"{key} must be a whole number"
    if key in NUMBERS:
        number = type(value) in (int, float) and value == value
        return None if number else f"{key} must be a number"
    plain = isinstance(value, str) and value.isprintable() and len(value) <= 500 and (value or key != "name")
    return None if plain else f"{key} must be a line of text"


def _rule(table: Mapping[str, Any]) -> Rule:
    values: dict[str, Any] = {key: float(value) if key in NUMBERS else value for key, value in table.items()}
    values["action"] = Act(values["action"])
    if "codes" in values:
        values["codes"] = tuple(values["codes"])
    return Rule(**values)


class _Lines:
    """Where each key stands: the TOML reader does not tell. Strings over several lines are passed over."""

    def __init__(self, text: str) -> None:
        self._at: dict[tuple[int | None, str], int] = {}
        index, quoted = -1, ""
        for number, line in enumerate(text.splitlines(), 1):
            if not quoted:
                if _RULE.match(line):
                    index += 1
                    self._at[(index, "")] = number
                elif (found := _KEY.match(line)) is not None:
                    self._at.setdefault((index if index >= 0 else None, found.group(1)), number)
            for mark in ('"""', "'''"):
                if quoted in ("", mark) and line.count(mark) % 2:
                    quoted = "" if quoted else mark

    def of(self, rule: int | None, key: str) -> int:
        """The line of a key; where it cannot be found, that of its rule."""
        return self._at.get((rule, key)) or self._at.get((rule, "")) or self._at.get((None, "rule")) or 1

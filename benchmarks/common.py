"""What every benchmark shares: its two options, its table, its JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from keepstep.cli.jobs import stoppable


@dataclass(frozen=True, slots=True)
class Options:
    """`quick`: end within 50 s. `json`: where the figures go; None: they are only printed."""

    quick: bool
    json: Path | None


def start(main: Callable[[Options], None], description: str | None) -> None:
    """Run a benchmark; when it is stopped by a signal, nothing that it started goes on."""
    chosen = options(description)
    with stoppable():
        main(chosen)


def options(description: str | None, argv: Sequence[str] | None = None) -> Options:
    """Read --quick and --json; the first line of `description` is the help text."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats: ends within 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parsed = parser.parse_args(argv)
    return Options(parsed.quick, parsed.json)


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned text: the first column to the left, the others to the right; floats in four digits."""
    lines = [[_cell(value) for value in row] for row in (headings, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def versions(*packages: str) -> dict[str, str]:
    """What the figures were measured with: Python, the machine, torch and further packages."""
    found = {"python": platform.python_version(), "system": platform.platform(), "cores": str(os.cpu_count())}
    for package in ("keepstep", "torch", *packages):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def write(
    chosen: Options,
    figures: Mapping[str, float],
    seeds: Mapping[str, int] | None = None,
    packages: Sequence[str] = (),
) -> None:
    """Write {"figures", "seeds", "versions"} to the file that was asked for, if any."""
    if chosen.json is None:
        return
    body = {"figures": dict(figures), "seeds": dict(seeds or {}), "versions": versions(*packages)}
    chosen.json.write_text(json.dumps(body, indent=2, sort_keys=True) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

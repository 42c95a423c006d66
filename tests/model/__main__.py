"""`python -m tests.model [--full] [NAME ...]`: explore worlds and holes, and print what was seen."""

from __future__ import annotations

import argparse
import sys
import time

from tests.model.explore import explore
from tests.model.model import Model
from tests.model.worlds import FULL, HOLES, LONG_HOLES, QUICK


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when every world holds and every hole breaks."""
    parser = argparse.ArgumentParser(prog="python -m tests.model")
    parser.add_argument("--full", action="store_true", help="the larger worlds as well (many minutes)")
    parser.add_argument("names", nargs="*", help="only these worlds and holes")
    arguments = parser.parse_args(argv)
    worlds = {**QUICK, **(FULL if arguments.full or arguments.names else {})}
    unknown = set(arguments.names) - set(worlds) - set(HOLES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    wrong = 0
    for name, world in worlds.items():
        if not arguments.names or name in arguments.names:
            wrong += report(name, Model(world), "")
    for name, hole in HOLES.items():
        wanted = name in arguments.names or (
            not arguments.names and (arguments.full or name not in LONG_HOLES)
        )
        if wanted:
            wrong += report(f"without {name}", Model(hole.world, **hole.options), hole.finding)
    return 1 if wrong else 0


def report(name: str, model: Model, finding: str | None) -> bool:
    """Print one search; True when it did not see what it should."""
    began_s = time.monotonic()
    found = explore(model)
    right = finding in found.broken if finding else not found.broken
    print(f"{'' if right else 'WRONG: '}{name}: {time.monotonic() - began_s:.1f} s, {found}", flush=True)
    return not right


if __name__ == "__main__":
    sys.exit(main())

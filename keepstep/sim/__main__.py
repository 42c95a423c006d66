"""`python -m keepstep.sim`: many seeds, or one with its whole trace."""

from __future__ import annotations

import argparse
import os
import sys
import time

from keepstep.sim.run import run_seed, sweep


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 when every promise held, 1 when a seed broke one, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m keepstep.sim", description="A virtual cluster that runs the shipped core."
    )
    parser.add_argument("--seeds", type=int, default=10_000, help="how many seeds (default 10000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="only this seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happened")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 16))
    arguments = parser.parse_args(argv)
    if arguments.seed is not None:
        return _one(arguments.seed, arguments.trace)
    if arguments.seeds < 1 or arguments.processes < 1:
        parser.error("--seeds and --processes must be at least 1")
    return _many(range(arguments.first, arguments.first + arguments.seeds), arguments.processes)


def _one(seed: int, trace: bool) -> int:
    outcome = run_seed(seed, trace=trace)
    for line in outcome.trace:
        print(line)
    result = f"BROKEN: {outcome.violation}" if outcome.violation else "every promise held"
    print(
        f"seed {seed} ({outcome.name}): {outcome.events} events, {outcome.generations} generations: {result}"
    )
    return 1 if outcome.violation else 0


def _many(seeds: range, processes: int) -> int:
    began_s = time.monotonic()
    count = events = generations = 0
    for outcome in sweep(seeds, processes):
        count, events, generations = (
            count + 1,
            events + outcome.events,
            generations + outcome.generations,
        )
        if outcome.violation:
            print(
                f"seed {outcome.seed} ({outcome.name}) BROKEN: {outcome.violation}\n  {outcome.repeat_with}"
            )
            return 1
    took_s = time.monotonic() - began_s
    print(
        f"{count} seeds, {events} events, {generations} generations in {took_s:.1f} s: every promise held, "
        f"every job finished"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m keepstep.sim`: many seeds, or one with its whole trace."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from keepstep.errors import InvariantError
from keepstep.sim.invariants import Violation
from keepstep.sim.month import Month, MonthCluster
from keepstep.sim.rates import DAY_S
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
    parser.add_argument(
        "--month", action="store_true", help="a month of a large job instead, at published failure rates"
    )
    parser.add_argument("--ranks", type=int, default=16_384, help="with --month (default 16384)")
    parser.add_argument("--spares", type=int, default=64, help="with --month (default 64)")
    parser.add_argument("--days", type=float, default=30.0, help="with --month (default 30)")
    parser.add_argument("--json", action="store_true", help="with --month: the figures as JSON")
    arguments = parser.parse_args(argv)
    if arguments.month:
        return _month(arguments)
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


def _month(arguments: argparse.Namespace) -> int:
    month = Month(
        ranks=arguments.ranks, spares=arguments.spares, days=arguments.days, seed=arguments.seed or 1
    )
    try:
        came = MonthCluster(month, print if arguments.trace else lambda text: None).run()
    except (Violation, InvariantError) as broken:
        print(f"BROKEN: {broken}")
        return 1
    figures = {
        "month_failures": came.failure_count,
        "month_incidents": came.incidents,
        "month_generations": came.generations,
        "month_events": came.events,
        "month_stalled_s": came.stalled_s,
        "month_least_spares": came.least_spares,
        "month_slowest_decision_s": came.slowest_decision_s,
        "month_wall_s": came.took_s,
        "month_memory_gb": came.peak_bytes / 1e9,
    }
    if arguments.json:
        print(json.dumps(figures))
        return 0
    print(
        f"{month.days:g} days of {month.ranks} ranks and {month.spares} spares: {came.failure_count} failures "
        f"({', '.join(f'{name} {count}' for name, count in came.failures.most_common())}), "
        f"{came.incidents} incidents, training stood for {came.stalled_s:.0f} s "
        f"({came.stalled_s / (month.days * DAY_S):.3%}), at least {came.least_spares} spares were ready; "
        f"{came.events} events in {came.took_s:.1f} s, {came.peak_bytes / 1e9:.2f} GB, slowest decision "
        f"{came.slowest_decision_s * 1e3:.1f} ms: every promise held"
    )
    return 0


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

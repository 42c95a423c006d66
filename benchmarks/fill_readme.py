"""Writes the README's table of figures from the JSON files of the benchmarks, and from nothing else.

python benchmarks/fill_readme.py build        # reads build/recovery.json and so on
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure: where it comes from, what it says, how it is written."""

    benchmark: str
    figure: str
    text: str
    form: str = "{:.2f} s"


ROWS = (
    Row(
        "recovery",
        "ddp3_hot_kill_s",
        "SIGKILL in mid-step to the next new step, DDP, 3 ranks, hot spare, median",
    ),
    Row("recovery", "hsdp4_hot_kill_s", "the same, HSDP 2×2, 4 ranks"),
    Row("recovery", "ddp3_warm_kill_s", "the same, DDP, warm spare"),
    Row("recovery", "ddp3_stop_s", "SIGSTOP to the next new step, DDP, 3 ranks, hot spare, median"),
    Row("recovery", "kills", "workers killed or stopped", "{:.0f}"),
    Row("recovery", "committed_steps_lost", "committed steps lost, all together", "{:.0f}"),
    Row("recovery", "recomputed_max", "steps computed again by one failure, at most", "{:.0f}"),
    Row(
        "overhead", "ratio_0p8m", "step time ÷ plain DDP, nothing failing, 0.8M parameters, 2 ranks", "{:.3f}"
    ),
    Row("overhead", "ratio_16m", "the same, 16M parameters", "{:.3f}"),
    Row("transfer", "fraction_of_tcp", "1 GB of state to a replacement ÷ bare TCP", "{:.0%}"),
    Row("transfer", "extra_memory_fraction", "memory for it beyond the state", "{:.1%}"),
    Row(
        "migration",
        "stall_s",
        "a rank moved live: longest step beyond the median step, 5M parameters, 4 ranks, median",
    ),
    Row("migration", "median_step_s", "the median step of that job"),
    Row("migration", "recomputed_steps", "steps computed again by all migrations together", "{:.0f}"),
    Row("control", "decision_p99_s", "loss of a worker reported to decision heard, 2,000 agents, 99 of 100"),
    Row("control", "cpu_share", "the controller's share of a core meanwhile", "{:.2f}"),
    Row("control", "core_decision_s", "the core alone: one decision at 16,384 ranks", "{:.4f} s"),
    Row("control", "month_wall_s", "a simulated month of 16,384 ranks, published failure rates", "{:.0f} s"),
    Row("control", "month_memory_gb", "memory for it", "{:.2f} GB"),
)


def table(results: dict[str, dict[str, Any]]) -> str:
    """The rows that were measured, and on what."""
    lines = ["| figure | measured | command |", "|---|---|---|"]
    for row in ROWS:
        value = results.get(row.benchmark, {}).get("figures", {}).get(row.figure)
        if value is not None:
            command = f"`python benchmarks/{row.benchmark}.py`"
            lines.append(f"| {row.text} | {row.form.format(value)} | {command} |")
    recovery = results.get("recovery", {}).get("figures", {})
    if "identical_runs" in recovery:
        equal = f"{recovery['identical_runs']:.0f} of {recovery['runs']:.0f}"
        lines.append(
            f"| harmed jobs equal to the undisturbed one, bit for bit | {equal} | `python benchmarks/recovery.py` |"
        )
    machine = next(iter(results.values()))["versions"]
    lines.append("")
    lines.append(
        f"{machine['cores']} cores, CPU and gloo, torch {machine['torch']}, Python {machine['python']}; "
        "every rank, spare, agent and controller shares them."
    )
    return "\n".join(lines)


def main(folder: Path) -> None:
    names = sorted({row.benchmark for row in ROWS})
    results = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in names
        if (folder / f"{name}.json").exists()
    }
    if not results:
        raise SystemExit(f"no JSON of {', '.join(names)} in {folder}: run make bench first")
    text = README.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    README.write_text(f"{head}{BEGIN}\n{table(results)}\n{END}{tail}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python benchmarks/fill_readme.py FOLDER_WITH_JSON")
    main(Path(sys.argv[1]))

"""Draws a run beside its undisturbed twin: both loss curves, the time of each step, the incident marked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from keepstep.cli.reports import Reports

CALM, STRUCK, MARK, INK = "#9ec5e8", "#1f4e79", "#c0392b", "#333333"
SETTLED_STEP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentMark:
    """Where the incident stands in the chart. `lasted_s`: from the signal to the next new step."""

    step: int
    rank: int
    lasted_s: float


def mean_losses(reports: Reports) -> dict[int, float]:
    """Loss by step, averaged over the ranks that reported it."""
    values: dict[int, list[float]] = {}
    for rank in reports.ranks():
        for step, line in reports.counted(rank).items():
            if line.loss is not None:
                values.setdefault(step, []).append(line.loss)
    return {step: sum(losses) / len(losses) for step, losses in sorted(values.items())}


def step_times_s(reports: Reports, rank: int) -> dict[int, float]:
    """Seconds from the report of one step to that of the next, on one rank."""
    times = {step: line.time_s for step, line in sorted(reports.counted(rank).items())}
    return {step: times[step] - times[step - 1] for step in times if step - 1 in times}


def draw_twin_runs(
    path: Path, *, title: str, undisturbed: Reports, struck: Reports, mark: IncidentMark, identical: bool
) -> None:
    """Write the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    with pyplot.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (loss_axes, time_axes) = pyplot.subplots(
            2, 1, figsize=(9, 6), sharex=True, height_ratios=(3, 1.2), layout="constrained"
        )
        figure.suptitle(title, x=0.015, ha="left", fontsize=13, fontweight="bold", color=INK)

        calm, hurt = mean_losses(undisturbed), mean_losses(struck)
        loss_axes.plot(*_xy(calm), color=CALM, linewidth=6, solid_capstyle="round", label="undisturbed run")
        loss_axes.plot(*_xy(hurt), color=STRUCK, linewidth=1.6, label="run with the kill")
        loss_axes.set_ylabel("loss, mean over ranks")
        verdict = "every loss of every rank equal, bit for bit" if identical else "the runs DIFFER"
        loss_axes.legend(frameon=False, loc="upper right", title=verdict, alignment="right")

        calm_times = step_times_s(undisturbed, mark.rank)
        hurt_times = step_times_s(struck, mark.rank)
        time_axes.plot(*_xy(calm_times), color=CALM, linewidth=3)
        time_axes.plot(*_xy(hurt_times), color=STRUCK, linewidth=1.3)
        time_axes.set_ylabel(f"seconds per step\n(rank {mark.rank})")
        time_axes.set_xlabel("step")
        time_axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        usual = median(calm_times.values()) if calm_times else 0.0
        # The first steps build buckets and caches: as long as they are, they would flatten the rest.
        settled = [seconds for step, seconds in hurt_times.items() if step >= SETTLED_STEP]
        time_axes.set_ylim(0, 1.15 * max([3 * usual, *settled]))

        for axes in (loss_axes, time_axes):
            axes.axvline(mark.step, color=MARK, linewidth=1.2, linestyle=(0, (4, 3)))
            axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
            axes.set_axisbelow(True)
            axes.margins(x=0.01)
        low, high = loss_axes.get_ylim()
        loss_axes.annotate(
            f"rank {mark.rank} killed in step {mark.step}\nnext new step after {mark.lasted_s:.2f} s",
            xy=(mark.step, low + 0.55 * (high - low)),
            xytext=(8, 0),
            textcoords="offset points",
            color=MARK,
            va="center",
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140)
        pyplot.close(figure)


def _xy(values: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(values), list(values.values())

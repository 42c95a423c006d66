"""What the demo shows while a job runs: a live table on a terminal, plain lines elsewhere.

It is told what happened and draws it; it decides nothing.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from keepstep.cli.jobs import Harm
from keepstep.cli.reports import Line

BARS = "▁▂▃▄▅▆▇█"
TREND_STEPS = 24
SHOWN_NOTES = 9
PLAIN_EVERY_STEPS = 10
SPARE_STYLES = {"hot": "magenta", "warm": "yellow"}


@dataclass(slots=True)
class RankRow:
    """One rank as the table shows it."""

    rank: int
    worker: int | None = None
    step: int = 0
    loss: float | None = None
    trend: deque[float] = field(default_factory=lambda: deque(maxlen=TREND_STEPS))
    state: str = "starting"
    style: str = "dim"


class DemoView:
    """Shows one job. `ranks` rows, `steps` to go; use it as a context manager."""

    def __init__(self, console: Console, title: str, *, ranks: int, steps: int) -> None:
        self._console = console
        self._title = title
        self._steps = steps
        self._rows = [RankRow(rank) for rank in range(ranks)]
        self._spares: dict[int, str] = {}
        self._notes: deque[Text] = deque(maxlen=SHOWN_NOTES)
        self._started_s = time.monotonic()
        self._struck_at_s: float | None = None
        self._plain_next = PLAIN_EVERY_STEPS
        self._live = Live(
            console=console, get_renderable=self._render, refresh_per_second=12, transient=False
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._console.print(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    # ---- what happened --------------------------------------------------------------------------

    def reported(self, lines: list[Line]) -> None:
        """Ranks reported steps."""
        for line in lines:
            row = self._rows[line.rank]
            if row.worker not in (None, line.worker):
                row.state, row.style = f"taken over from worker {row.worker}", "bold green"
            elif row.style == "dim":
                row.state, row.style = "training", "green"
            row.worker, row.step, row.loss = line.worker, line.step + 1, line.loss
            if line.loss is not None:
                row.trend.append(line.loss)
        if not self._console.is_terminal:
            self._print_progress()

    def spares(self, states: dict[int, str]) -> None:
        """The workers without a rank, and how ready they are. Plain output tells changes only."""
        if states == self._spares:
            return
        if not self._console.is_terminal:
            for worker, state in states.items():
                if self._spares.get(worker) != state:
                    self._console.print(f"spare: worker {worker} is {state}")
        self._spares = states

    def note(self, text: str, style: str = "") -> None:
        """Something worth a line of its own."""
        stamp = f"{time.monotonic() - self._started_s:7.2f} s"
        if self._struck_at_s is not None:
            stamp = f"{1000 * (time.time() - self._struck_at_s):+7.0f} ms"
        note = Text.assemble((f"{stamp}  ", "dim"), (text, style), overflow="ellipsis", no_wrap=True)
        self._notes.append(note)
        if not self._console.is_terminal:
            self._console.print(Text.assemble((f"{stamp}  ", "dim"), (text, style)), soft_wrap=True)

    def struck(self, harm: Harm) -> None:
        """A rank's worker was sent a signal; from now on notes count from there."""
        self._struck_at_s = harm.at_s
        row = self._rows[harm.rank]
        row.state, row.style = harm.signal.name, "bold red"
        self.note(f"{harm.signal.name} sent to rank {harm.rank}: worker {harm.worker}, pid {harm.pid}", "red")

    def calm_again(self) -> None:
        """The incident is over: notes count from the start again."""
        self._struck_at_s = None

    # ---- drawing --------------------------------------------------------------------------------

    def _render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
        for name, justify in (("rank", "right"), ("worker", "right"), ("step", "right"), ("loss", "right")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        table.add_column("", width=TREND_STEPS, no_wrap=True)
        table.add_column("")
        for row in self._rows:
            table.add_row(
                str(row.rank),
                "-" if row.worker is None else str(row.worker),
                f"{row.step}/{self._steps}",
                "-" if row.loss is None else f"{row.loss:.4f}",
                Text(trend(list(row.trend)), style="cyan"),
                Text(row.state, style=row.style),
            )
        for worker, state in self._spares.items():
            table.add_row(
                "-", str(worker), "", "", "", Text(f"spare, {state}", style=SPARE_STYLES.get(state, "dim"))
            )
        done = min(row.step for row in self._rows)
        bar = ProgressBar(total=self._steps, completed=done, width=58)
        return Panel(
            Group(table, Text(), Padding(bar, (0, 0, 1, 0)), *self._notes),
            title=self._title,
            title_align="left",
            padding=(1, 2),
        )

    def _print_progress(self) -> None:
        done = min(row.step for row in self._rows)
        if done >= self._plain_next:
            losses = " ".join("-" if r.loss is None else f"{r.loss:.4f}" for r in self._rows)
            workers = " ".join(str(row.worker) for row in self._rows)
            self._console.print(f"step {done}/{self._steps}  loss by rank: {losses}  workers: {workers}")
            self._plain_next = done - done % PLAIN_EVERY_STEPS + PLAIN_EVERY_STEPS


def trend(values: list[float]) -> str:
    """The values as a row of bars, lowest to highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)

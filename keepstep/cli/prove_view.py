"""What `keepstep prove` shows while its runs are under way: a bar for each on a terminal, lines elsewhere.

Everything goes to stderr, so that --json has stdout for itself.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

PLAIN_EVERY_S = 10.0


class ProveView:
    """Shows the runs one after the other; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<20}"),
            BarColumn(bar_width=40),
            TextColumn("{task.fields[where]:<16}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._title = ""
        self._total: int | None = None
        self._step = 0
        self._said_s = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, title: str, total: int | None) -> None:
        """A run begins; `total` steps, when that is known."""
        self._title, self._total, self._step = title, total, 0
        self._said_s = time.monotonic()
        self._task = self._progress.add_task(title, total=total, where="starting")
        if not self._console.is_terminal:
            self._print(f"{title}: starting")

    def reached(self, step: int) -> None:
        """So many steps are reported."""
        if step == self._step:
            return
        self._step = step
        if self._task is not None:
            self._progress.update(self._task, completed=step, where=self._where())
        if not self._console.is_terminal and time.monotonic() - self._said_s >= PLAIN_EVERY_S:
            self._said_s = time.monotonic()
            self._print(f"{self._title}: {self._where()}")

    def note(self, text: str) -> None:
        """What the launcher itself said."""
        self._print(f"{self._title}: {text}")

    def end(self, seconds: float) -> None:
        """The run has ended."""
        if self._task is not None:
            self._progress.update(
                self._task,
                total=max(1, self._step),
                completed=max(1, self._step),
                where=f"{self._step} steps",
            )
            self._progress.stop_task(self._task)
        if not self._console.is_terminal:
            self._print(f"{self._title}: {self._step} steps in {seconds:.1f} s")

    def _where(self) -> str:
        return f"step {self._step}" if self._total is None else f"step {self._step}/{self._total}"

    def _print(self, text: str) -> None:
        self._progress.console.print(text, soft_wrap=True, markup=False, highlight=False)

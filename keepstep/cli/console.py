"""The terminal of `keepstep run`: lines go through a thread, so that a stuck pipe never stops the job.

With a terminal a small live table stays below the lines; otherwise there are only lines. It does not know
where lines come from.
"""

from __future__ import annotations

import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_WAITING_LINES = 20_000
REFRESH_S = 0.25
PLAIN_PROGRESS_S = 10.0
CLOSE_TIMEOUT_S = 2.0
_STYLES = {"warning": "yellow", "error": "bold red", "info": "cyan"}


class _Descriptor:
    """A text stream without a buffer or a lock: a thread stuck in it cannot stop the interpreter's exit."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO) -> None:
        stream.flush()
        self._fd = stream.fileno()
        self.encoding = stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        data = memoryview(text.encode(self.encoding, "backslashreplace"))
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # somebody made the shared description non-blocking
                select.select([], [self._fd], [])
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def fileno(self) -> int:
        return self._fd


class Terminal:
    """Prints lines from any thread without ever blocking; `close` writes what still waits."""

    def __init__(
        self,
        *,
        out: TextIO | None = None,
        err: TextIO | None = None,
        draw: Callable[[], RenderableType] | None = None,
        progress: Callable[[], str] | None = None,
    ) -> None:
        """`draw` makes the live table (used on a terminal only), `progress` one line (used without)."""
        self._out = _Descriptor(out or sys.stdout)
        self._err = _Descriptor(err or sys.stderr)
        self._draw = draw if self._out.isatty() else None
        self._progress = progress if self._draw is None else None
        self._lines: queue.Queue[tuple[str, bool, str] | None] = queue.Queue(MAX_WAITING_LINES)
        self._dropped = 0
        self._last_progress = ""
        self._thread = threading.Thread(target=self._work, name="keepstep-console", daemon=True)
        self._thread.start()

    def say(self, text: str, level: str = "info") -> None:
        """A line of Keepstep's own: on stderr when it is an error, with a prefix that can be searched for."""
        mark = "" if level == "info" else f"{level}: "
        for line in text.splitlines() or [""]:
            self._put(f"keepstep: {mark}{line}", level == "error", _STYLES.get(level, ""))

    def line(self, text: str, *, error: bool = False) -> None:
        """A line of a worker, as it is."""
        self._put(text, error, "")

    def close(self) -> None:
        """Write what waits (for a bounded time) and take the live table away."""
        try:
            self._lines.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            return  # nobody reads our output; the thread is a daemon and ends with the process
        self._thread.join(CLOSE_TIMEOUT_S)

    def _put(self, text: str, error: bool, style: str) -> None:
        try:
            self._lines.put_nowait((text, error, style))
        except queue.Full:
            self._dropped += 1

    # ---- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            if self._draw is not None:
                self._work_live(self._draw)
            else:
                self._work_plain()
        except (BrokenPipeError, ValueError, OSError):
            self._discard()  # the reader has gone (`| head`): the job goes on in silence

    def _discard(self) -> None:
        while self._lines.get() is not None:
            pass

    def _work_plain(self) -> None:
        progress_due_s = time.monotonic() + PLAIN_PROGRESS_S
        while True:
            try:
                item = self._lines.get(timeout=max(0.0, progress_due_s - time.monotonic()))
            except queue.Empty:
                progress_due_s = time.monotonic() + PLAIN_PROGRESS_S
                self._show_progress()
                continue
            if item is None:
                return
            text, error, _ = item
            self._write(text, error)
            self._tell_dropped()

    def _show_progress(self) -> None:
        text = self._progress() if self._progress is not None else ""
        if text and text != self._last_progress:
            self._last_progress = text
            self._write(f"keepstep: {text}", False)

    def _write(self, text: str, error: bool) -> None:
        # One write a line, so that lines of both streams do not mix on one terminal.
        (self._err if error else self._out).write(text + "\n")

    def _tell_dropped(self) -> None:
        if self._dropped and self._lines.qsize() < MAX_WAITING_LINES // 2:
            dropped, self._dropped = self._dropped, 0
            self._write(
                f"keepstep: warning: {dropped} lines of output were not shown (see the log files)", False
            )

    def _work_live(self, draw: Callable[[], Any]) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        console = Console(file=cast(TextIO, self._out), soft_wrap=True)
        with Live(console=console, auto_refresh=False, transient=True) as live:
            drawn_s = 0.0
            while True:
                try:
                    item = self._lines.get(timeout=REFRESH_S)
                    if item is None:
                        return
                    console.print(Text.from_ansi(item[0], style=item[2], end=""), soft_wrap=True)
                except queue.Empty:
                    pass
                if time.monotonic() - drawn_s >= REFRESH_S:
                    live.update(draw(), refresh=True)
                    drawn_s = time.monotonic()

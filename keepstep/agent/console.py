"""What of the workers' logs appears on the console: followed files, whole lines, each with its prefix.

The files stay complete whatever is shown here; nobody who writes them ever waits for this reader.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.agent.config import ConsoleLine
from keepstep.agent.logs import STREAMS, log_path
from keepstep.errors import UsageError

POLL_INTERVAL_S = 0.1
# A script that never comes to init() would otherwise stay mute until somebody asks why.
HOLD_LIMIT_S = 10.0
# Output that outruns the console is skipped on it (never in the file).
MAX_BACKLOG_BYTES = 8 << 20
MAX_LINE_BYTES = 2 << 20
# A progress bar redraws its line by carriage returns: it is shown now and then.
BAR_INTERVAL_S = 1.0

_STDOUT, _STDERR = 1, 2
_MASK_OF = {"stdout": _STDOUT, "stderr": _STDERR}
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127) if code not in (9, 27)}

log = logging.getLogger(__name__)


def parse_streams(text: str, option: str) -> Callable[[int], int]:
    """torchrun's value of -t or -r, as slot -> mask (1 stdout, 2 stderr, 3 both). Raises UsageError."""
    try:
        if ":" not in text:
            mask = _mask(text)
            return lambda slot: mask
        masks: dict[int, int] = {}
        for part in text.split(","):
            slot, mask_text = part.split(":")
            if int(slot) in masks:
                raise ValueError
            masks[int(slot)] = _mask(mask_text)
        return lambda slot: masks.get(slot, 0)
    except ValueError:
        raise UsageError(f"{option} {text!r} must be 0, 1, 2, 3, or a list such as 0:3,1:2") from None


def _mask(text: str) -> int:
    mask = int(text)
    if not 0 <= mask <= 3:
        raise ValueError
    return mask


class _Show(enum.Enum):
    """Whether a worker's output goes on."""

    HELD = enum.auto()  # it starts: nobody knows yet whether it will be a member or a spare
    SHOWN = enum.auto()
    HIDDEN = enum.auto()  # a spare, or fenced: its log only


class _Tail:
    """Follows one growing file by whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._name = str(path)
        self._offset = 0
        self._partial = bytearray()
        self._bar_s = 0.0

    def skip(self) -> None:
        """Go to the end of what is there."""
        self._partial.clear()
        self._offset = self._size()

    def lines(self) -> Iterator[bytes]:
        """What came since the last call, without line ends; an unfinished line waits."""
        size = self._size()
        if size - self._offset > MAX_BACKLOG_BYTES:
            skipped = size - self._offset - MAX_BACKLOG_BYTES
            self._offset += skipped
            self._partial.clear()
            yield f"... {skipped} bytes left out here, see {self._path} ...".encode()
        if size > self._offset:
            data = self._read(size)
            self._offset += len(data)
            *whole, rest = (bytes(self._partial) + data).split(b"\n")
            self._partial = bytearray(rest)
            yield from whole
        yield from self._overlong()

    def rest(self) -> Iterator[bytes]:
        """The unfinished line, if any: no more will come."""
        if self._partial:
            yield bytes(self._partial)
            self._partial.clear()

    def _overlong(self) -> Iterator[bytes]:
        while len(self._partial) > MAX_LINE_BYTES:
            yield bytes(self._partial[:MAX_LINE_BYTES])
            del self._partial[:MAX_LINE_BYTES]
        drawn = self._partial.rfind(b"\r")
        if drawn > 0 and time.monotonic() - self._bar_s > BAR_INTERVAL_S:
            self._bar_s = time.monotonic()
            yield bytes(self._partial[:drawn])
            del self._partial[: drawn + 1]

    def _read(self, size: int) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                return file.read(size - self._offset)
        except OSError as error:  # somebody took the file away; that is no reason to stop a job
            log.warning("a log cannot be shown: %s", error)
            return b""

    def _size(self) -> int:
        try:
            return os.stat(self._name).st_size  # many times a second: no Path
        except OSError:
            return self._offset


@dataclass(slots=True)
class _Followed:
    worker: int
    slot: int
    tails: dict[str, _Tail]
    show: _Show = _Show.HELD
    greeted: bool = False
    rank: int | None = None
    generation: int | None = None
    started_s: float = field(default_factory=time.monotonic)


class Console:
    """Follows this node's workers. By default rank 0's stdout and everybody's stderr are shown.

    `redirects` takes streams off the console, `tee` puts them on it, both per slot as in torchrun.
    Raises UsageError when one of them cannot be read.
    """

    def __init__(self, sink: Callable[[ConsoleLine], None], run_dir: Path, tee: str, redirects: str) -> None:
        self._sink = sink
        self._run_dir = run_dir
        self._tee = parse_streams(tee, "--tee")
        self._redirects = parse_streams(redirects, "--redirects")
        self._followed: dict[int, _Followed] = {}

    async def run(self) -> None:
        """Show what is new, until cancelled."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            self.turn()

    def follow(self, worker: int, slot: int, *, from_now: bool = False) -> None:
        """A worker starts; its output is held until its part is known. `from_now`: it runs already."""
        tails = {stream: _Tail(log_path(self._run_dir, worker, stream)) for stream in STREAMS}
        if from_now:
            for tail in tails.values():
                tail.skip()
        self._followed[worker] = _Followed(worker, slot, tails)

    def greeted(self, worker: int) -> None:
        """It came to init(): its part will be told."""
        if (followed := self._followed.get(worker)) is not None:
            followed.greeted = True

    def promoted(self, worker: int, rank: int | None, generation: int, *, fresh: bool) -> None:
        """It is a member from here on. In a fresh world its start belongs to the story as well."""
        followed = self._followed.get(worker)
        if followed is None:
            return
        if followed.show is not _Show.HELD:
            self._turn(followed)
        elif not fresh:
            self._skip(followed)
        followed.rank, followed.generation, followed.show = rank, generation, _Show.SHOWN

    def hide(self, worker: int) -> None:
        """It is a spare that may rehearse, or fenced: from here on its output stays in its own log."""
        followed = self._followed.get(worker)
        if followed is not None and followed.show is not _Show.HIDDEN:
            if followed.show is _Show.SHOWN:
                self._turn(followed)
                self._rest(followed)
            followed.show = _Show.HIDDEN

    def ended(self, worker: int, *, failed: bool) -> None:
        """Its process is gone: the last lines, finished or not. Output held is shown when it failed."""
        followed = self._followed.pop(worker, None)
        if followed is None:
            return
        if followed.show is _Show.HELD and failed:
            followed.show = _Show.SHOWN
        self._turn(followed)
        self._rest(followed)

    def turn(self) -> None:
        """Show what is new now."""
        for followed in list(self._followed.values()):
            if (
                followed.show is _Show.HELD
                and not followed.greeted
                and time.monotonic() - followed.started_s > HOLD_LIMIT_S
            ):
                followed.show = _Show.SHOWN
            if followed.show is _Show.SHOWN:
                self._show_new(followed)

    def _turn(self, followed: _Followed) -> None:
        """Its part changes: show what is new, and go past what will never be shown."""
        if followed.show is _Show.HIDDEN:
            self._skip(followed)
        elif followed.show is _Show.SHOWN:
            self._show_new(followed)
            for stream, tail in followed.tails.items():
                if not self._wanted(followed, stream):
                    tail.skip()

    def _show_new(self, followed: _Followed) -> None:
        for stream, tail in followed.tails.items():
            if self._wanted(followed, stream):
                for line in tail.lines():
                    self._emit(followed, stream, line)

    def _skip(self, followed: _Followed) -> None:
        for tail in followed.tails.values():
            tail.skip()

    def _rest(self, followed: _Followed) -> None:
        if followed.show is _Show.SHOWN:
            for stream, tail in followed.tails.items():
                for line in tail.rest():
                    self._emit(followed, stream, line)

    def _wanted(self, followed: _Followed, stream: str) -> bool:
        bit = _MASK_OF[stream]
        if self._tee(followed.slot) & bit:
            return True
        by_default = stream == "stderr" or followed.rank == 0
        return by_default and not self._redirects(followed.slot) & bit

    def _emit(self, followed: _Followed, stream: str, line: bytes) -> None:
        who = f"worker {followed.worker}"
        if followed.rank is not None:
            who = f"rank {followed.rank} | {who} | gen {followed.generation}"
        shown = ConsoleLine(
            text=f"[{who}] {readable(line)}",
            stream=stream,
            worker=followed.worker,
            rank=followed.rank,
            generation=followed.generation,
        )
        try:
            self._sink(shown)
        except OSError as error:  # whoever read it has gone: the files have everything
            log.debug("a line could not be shown: %s", error)


def readable(line: bytes) -> str:
    """Any bytes as one line of text: the last drawing of a progress bar, junk escaped, colours kept."""
    drawn = line.rstrip(b"\r").rpartition(b"\r")[2]
    return drawn.decode("utf-8", "backslashreplace").translate(_CONTROL)

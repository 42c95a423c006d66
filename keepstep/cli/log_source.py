"""Where `keepstep logs` gets its lines: the files of the run directory, or every node through the controller.

Both give batches with cursors, so that memory stays bounded and a follower goes on where it was. It does
not know how lines are shown.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from keepstep.agent.log_reader import Batch, Line, Query, read_batch
from keepstep.cli.source import NoAnswer, fetch
from keepstep.controller.rundir import Address

ANSWER_TIMEOUT_S = 20.0
MAX_ANSWER_BYTES = 16 << 20

Read = Callable[[dict[str, int]], Batch]


def from_files(run_dir: Path, query: Query) -> Read:
    """Lines of the logs that lie here."""
    return lambda cursors: read_batch(run_dir, query, cursors)


def from_node(address: Address, node: str, query: Query) -> Read:
    """Lines of one node's logs. Reading raises NoAnswer."""

    def read(cursors: dict[str, int]) -> Batch:
        about = json.dumps({**dataclasses.asdict(query), "cursors": cursors})
        path = f"/api/nodes/{quote(node, safe='')}/logs?about={quote(about)}"
        try:
            value: Any = json.loads(fetch(address, path, MAX_ANSWER_BYTES, ANSWER_TIMEOUT_S))
            lines = [Line.from_list(line) for line in value["lines"]]
            after = {str(name): int(at) for name, at in value["cursors"].items()}
            return Batch(lines, after, bool(value["more"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NoAnswer(f"node {node} answers with no lines: {error}") from None

    return read


class Stream:
    """All that one source has, read on from where it was; `failed` says why it gives no more."""

    def __init__(self, name: str, read: Read) -> None:
        self.name = name
        self.cursors: dict[str, int] = {}
        self.failed = ""
        self._read = read

    def lines(self) -> Iterator[Line]:
        """Lines that are there now, a batch at a time; the cursors move with each batch."""
        while True:
            try:
                batch = self._read(self.cursors)
            except NoAnswer as error:
                self.failed = str(error)
                return
            self.failed = ""
            yield from batch.lines
            self.cursors = batch.cursors
            if not batch.more:
                return


def merged(streams: list[Stream]) -> Iterator[Line]:
    """What all of them have now, by time."""
    return heapq.merge(*(stream.lines() for stream in streams), key=lambda line: line.time_ns)

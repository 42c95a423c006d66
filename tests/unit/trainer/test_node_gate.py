"""The gate of one node: everybody learns the largest value, nobody passes alone, and a cut frees who waits."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from keepstep.trainer import futex
from keepstep.trainer.node_gate import NodeGate
from keepstep.wire.page import Page

pytestmark = pytest.mark.skipif(not futex.available(), reason="this machine's futex call is not known")

GENERATION = 7
WAIT_S = 20.0


@pytest.fixture
def pages(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / f"worker-{number}.page") for number in range(3)]
    for number, path in enumerate(paths):
        Page.create(path, number, 4096).close()
    return paths


def gate_of(pages: list[str], rank: int, generation: int = GENERATION) -> NodeGate:
    return NodeGate(generation, pages[rank], [path for path in pages if path != pages[rank]])


def in_processes(pages: list[str], play: object) -> list[int]:
    """Fork one process a rank; each exits with what `play(rank)` returns."""
    children = []
    for rank in range(len(pages)):
        child = os.fork()
        if child == 0:
            try:
                os._exit(play(rank))  # type: ignore[operator]
            except BaseException:
                os._exit(99)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_every_rank_learns_the_largest_value_gate_after_gate(pages: list[str]) -> None:
    def play(rank: int) -> int:
        gate = gate_of(pages, rank)
        for count in range(500):
            planned = GENERATION + 1 + count % 3 if rank == count % 3 else 0
            if gate.reduce(planned, lambda: False) != GENERATION + 1 + count % 3:
                return 1
        return 0

    assert in_processes(pages, play) == [0, 0, 0]


def test_nobody_passes_before_the_last_has_come(pages: list[str]) -> None:
    first, second, last = (gate_of(pages, rank) for rank in range(3))
    passed: list[int | None] = []
    threads = [
        threading.Thread(target=lambda gate=gate: passed.append(gate.reduce(0, lambda: False)))
        for gate in (first, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(0.2)
    assert passed == []
    assert last.reduce(GENERATION + 1, lambda: False) == GENERATION + 1
    for thread in threads:
        thread.join(WAIT_S)
    assert passed == [GENERATION + 1, GENERATION + 1]


def test_an_interruption_frees_a_sleeper_at_once(pages: list[str]) -> None:
    gate = gate_of(pages, 0)
    interrupted = threading.Event()
    answers: list[int | None] = [1]
    thread = threading.Thread(target=lambda: answers.append(gate.reduce(0, interrupted.is_set)))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    interrupted.set()
    gate.wake()
    thread.join(WAIT_S)
    assert answers == [1, None]


def test_words_of_an_older_generation_let_nobody_pass(pages: list[str]) -> None:
    older = [gate_of(pages, rank, GENERATION) for rank in range(3)]
    for gate in older[1:]:
        gate.reduce(0, lambda: True)  # they contribute, and are interrupted before they see the others
    assert older[0].reduce(0, lambda: False) == 0  # of that generation all are there: it passes
    deadline_s = time.monotonic() + 0.1
    newer = gate_of(pages, 0, GENERATION + 1)
    assert newer.reduce(0, lambda: time.monotonic() > deadline_s) is None


def test_a_rank_alone_passes_at_once(pages: list[str]) -> None:
    gate = NodeGate(GENERATION, pages[0], [])
    assert gate.reduce(0, lambda: False) == 0
    assert gate.reduce(GENERATION + 2, lambda: False) == GENERATION + 2

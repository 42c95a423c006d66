"""What Keepstep costs while nothing fails: step time under it, divided by that of plain DDP.

Two whole jobs live at the same time and train by turns, some steps each, so that whatever else the machine
does meets both. The one runs under torchrun and never imports Keepstep; the other under `keepstep run`, with
its agent and controller. A step is timed on rank 0, from the head of its iteration to the head of the next;
the first steps of a turn and the first turn are left out. A pair of jobs gives the ratio of its two medians.
Where its memory happens to lie makes one process faster than its twin for all its life, so several pairs
are made, one after the other; the figure is the median of their ratios.

With more than one node a step also waits for another node's word on its record: see acknowledgement.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import acknowledgement
from common import Options, start, table, write

JOB = Path(__file__).resolve().parent / "overhead_job.py"
RANKS = 2
LEFT_OUT_STEPS, LEFT_OUT_TURNS = 2, 1
POLL_S = 0.001
JOB_LIMIT_S = 400.0
WORD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A multilayer perceptron, and how its steps are cut into turns."""

    figure: str
    parameters: str
    width: int
    layers: int
    turn_steps: int
    turns: int
    pairs: int

    @property
    def arguments(self) -> list[str]:
        return [
            *("--width", str(self.width), "--layers", str(self.layers)),
            *("--turns", str(self.turns), "--turn-steps", str(self.turn_steps)),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The outcome of two jobs that lived at the same time: median steps in milliseconds."""

    plain_ms: float
    keepstep_ms: float
    steps: int

    @property
    def ratio(self) -> float:
        return self.keepstep_ms / self.plain_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One size's outcome: medians over its pairs."""

    size: Size
    pairs: list[Pair]

    @property
    def ratio(self) -> float:
        return median(pair.ratio for pair in self.pairs)

    @property
    def plain_ms(self) -> float:
        return median(pair.plain_ms for pair in self.pairs)

    @property
    def keepstep_ms(self) -> float:
        return median(pair.keepstep_ms for pair in self.pairs)

    @property
    def steps(self) -> int:
        return sum(pair.steps for pair in self.pairs)

    @property
    def spread(self) -> str:
        return f"{min(pair.ratio for pair in self.pairs):.2f} to {max(pair.ratio for pair in self.pairs):.2f}"


def plan(quick: bool) -> list[Size]:
    small = (
        {"turn_steps": 40, "turns": 5, "pairs": 2} if quick else {"turn_steps": 40, "turns": 15, "pairs": 9}
    )
    large = {"turn_steps": 6, "turns": 3, "pairs": 1} if quick else {"turn_steps": 8, "turns": 8, "pairs": 5}
    return [
        Size(figure="ratio_0p8m", parameters="0.8M", width=512, layers=4, **small),
        Size(figure="ratio_16m", parameters="16M", width=1800, layers=6, **large),
    ]


def measure(size: Size, folder: Path) -> Pair:
    """Run two jobs by turns. Raises RuntimeError, with the end of the output, when one fails."""
    turns = folder / f"{size.figure}.turns"
    turns.write_bytes(bytes(WORD * (1 + RANKS)))
    results = {name: folder / f"{size.figure}.{name}.json" for name in ("plain", "keepstep")}
    shared = ["--turns-file", str(turns), *size.arguments]
    commands = {
        "plain": [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(RANKS), str(JOB), *shared),
        ],
        "keepstep": [
            *(sys.executable, "-m", "keepstep", "run", "--nproc-per-node", str(RANKS), "--spares", "0"),
            *("--log-dir", str(folder / f"{size.figure}.run"), str(JOB), "--keepstep", *shared),
        ],
    }
    logs = {name: folder / f"{size.figure}.{name}.txt" for name in commands}
    jobs: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            with logs[name].open("wb") as log:
                jobs[name] = subprocess.Popen(
                    [*command, "--result", str(results[name])],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        conduct(turns, 2 * size.turns, lambda: check(jobs, logs))
        for name, job in jobs.items():
            if job.wait(60) != 0:
                raise RuntimeError(f"the {name} job ended with {job.returncode}:\n{tail(logs[name])}")
    finally:
        for job in jobs.values():
            if job.poll() is None:
                job.terminate()
                job.wait(60)
    times = {name: used_times(json.loads(path.read_text()), size) for name, path in results.items()}
    return Pair(
        plain_ms=1000 * median(times["plain"]),
        keepstep_ms=1000 * median(times["keepstep"]),
        steps=len(times["plain"]),
    )


def conduct(turns: Path, total: int, check_alive: Callable[[], None]) -> None:
    """Open turn after turn as soon as both ranks of the job whose turn it was are done."""
    deadline = time.monotonic() + JOB_LIMIT_S
    with turns.open("r+b", buffering=0) as file:
        for turn in range(total):
            file.seek(0)
            file.write(turn.to_bytes(WORD, sys.byteorder))
            while True:
                file.seek(WORD)
                words = memoryview(file.read(WORD * RANKS)).cast("Q")
                if min(words) > turn:
                    break
                check_alive()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"turn {turn} of {total} was not done after {JOB_LIMIT_S:.0f} s")
                time.sleep(POLL_S)


def check(jobs: dict[str, subprocess.Popen[bytes]], logs: dict[str, Path]) -> None:
    for name, job in jobs.items():
        if job.poll() not in (None, 0):
            raise RuntimeError(f"the {name} job ended with {job.returncode}:\n{tail(logs[name])}")


def tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def used_times(times: list[float], size: Size) -> list[float]:
    """Without the first turn (buckets are rebuilt, caches are cold) and the first steps of each."""
    return [
        seconds
        for number, seconds in enumerate(times)
        if number // size.turn_steps >= LEFT_OUT_TURNS and number % size.turn_steps >= LEFT_OUT_STEPS
    ]


def measure_all(quick: bool) -> list[Ratio]:
    ratios = []
    for size in plan(quick):
        pairs = []
        for number in range(size.pairs):
            with tempfile.TemporaryDirectory(prefix="keepstep-overhead-") as name:
                pairs.append(measure(size, Path(name)))
            print(
                f"{size.parameters}, pair {number + 1} of {size.pairs}: {pairs[-1].ratio:.3f}",
                file=sys.stderr,
            )
        ratios.append(Ratio(size=size, pairs=pairs))
    return ratios


def measure_acknowledgement(quick: bool) -> dict[str, float]:
    """What a step of a job on two nodes pays besides, on loopback."""
    found = acknowledgement.measure(quick)
    print(
        f"\nrecord acknowledged by another node before the gate: {1000 * found.ack_s:.3f} ms a step "
        f"(99 of 100 within {1000 * found.tail_s:.3f} ms; {found.record_bytes} bytes, {found.steps} steps, loopback)"
    )
    return {"gate_ack_s": found.ack_s, "gate_ack_p99_s": found.tail_s}


def main(chosen: Options) -> None:
    ratios = measure_all(chosen.quick)
    print(
        table(
            ("parameters", "ranks", "pairs", "steps each", "plain DDP ms", "Keepstep ms", "ratio", "from to"),
            [
                (
                    *(one.size.parameters, RANKS, len(one.pairs), one.steps),
                    *(one.plain_ms, one.keepstep_ms, one.ratio, one.spread),
                )
                for one in ratios
            ],
        )
    )
    print("\nmedians over pairs of jobs that train by turns on the same machine")
    figures: dict[str, float] = {}
    for one in ratios:
        name = one.size.figure.removeprefix("ratio_")
        figures |= {one.size.figure: one.ratio, f"plain_ms_{name}": one.plain_ms}
        figures[f"keepstep_ms_{name}"] = one.keepstep_ms
    figures |= measure_acknowledgement(chosen.quick)
    write(chosen, figures)


if __name__ == "__main__":
    start(main, __doc__)

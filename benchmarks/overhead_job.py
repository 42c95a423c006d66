"""The job that overhead.py times: the same training loop with plain DDP, or with Keepstep around it."""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WAIT_S = 0.001
WAIT_LIMIT_S = 300.0
INPUTS, OUTPUTS, BATCH = 64, 16, 32


class Turns:
    """The shared file of the two jobs: word 0 is the turn's number, word 1 + rank says "my turn is done".

    Turn t belongs to job t % 2. Each word has one writer.
    """

    def __init__(self, path: Path, job: int, rank: int) -> None:
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
        self._job = job
        self._word = 1 + rank
        self._mine = 0

    def wait(self) -> None:
        """Wait for this job's next turn."""
        deadline = time.monotonic() + WAIT_LIMIT_S
        while self._words[0] < 2 * self._mine + self._job:
            if time.monotonic() > deadline:
                raise TimeoutError("the other job never finished its turn")
            time.sleep(WAIT_S)

    def done(self) -> None:
        """This rank has finished its turn."""
        self._words[self._word] = 2 * self._mine + self._job + 1
        self._mine += 1


def build(width: int, layers: int) -> nn.Sequential:
    """A multilayer perceptron with `layers` hidden layers."""
    sizes = [INPUTS, *[width] * layers, OUTPUTS]
    parts: list[nn.Module] = []
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):  # noqa: RUF007
        parts += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*parts[:-1])


def train(args: argparse.Namespace, turns: Turns, run: Any, rank: int) -> list[float]:
    """Seconds of each step of this rank. `run` is None for plain DDP."""
    torch.manual_seed(0)
    model = DistributedDataParallel(build(args.width, args.layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.randn(16, BATCH, INPUTS, generator=torch.Generator().manual_seed(rank))
    total = args.turns * args.turn_steps
    steps: Iterable[AbstractContextManager[Any]]
    if run is None:
        steps = (contextlib.nullcontext() for _ in range(total))
    else:
        run.protect(model=model, optimizer=optimizer)
        steps = run.steps(until=total)

    ends, begins = [], []
    for number, step in enumerate(steps):
        if number:
            ends.append(time.perf_counter())
        if number % args.turn_steps == 0:
            if number:
                turns.done()
            turns.wait()
        begins.append(time.perf_counter())
        with step:
            x = batches[number % len(batches)]
            loss = (model(x) - torch.sin(2 * x[:, :OUTPUTS])).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    ends.append(time.perf_counter())
    turns.done()
    return [end - begin for begin, end in zip(begins, ends, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keepstep", action="store_true")
    parser.add_argument("--turns-file", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    for name in ("width", "layers", "turns", "turn-steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    if args.keepstep:
        import keepstep

        run: Any = keepstep.init()
        rank, job = run.rank, 1
        if not run.is_protected:
            raise SystemExit("this job was to run under `keepstep run`")
    else:
        dist.init_process_group("gloo")
        run, rank, job = None, dist.get_rank(), 0
    times = train(args, Turns(args.turns_file, job, rank), run, rank)
    if rank == 0:
        args.result.write_text(json.dumps(times))
    if run is None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

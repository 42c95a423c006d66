"""One TensorBoard run through the death of rank 0: no step logged twice, none missing.

keepstep run --nproc-per-node 2 --spares 1 examples/tensorboard_logging.py --logdir build/tensorboard
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torch.utils.tensorboard import SummaryWriter

import keepstep


class Board:
    """The writer of whoever plays rank 0; everybody else's stays closed."""

    def __init__(self, logdir: str) -> None:
        self._logdir = logdir
        self._writer: SummaryWriter | None = None
        self._next = 0

    def open(self, first: int) -> None:
        """Begin with step `first`: readers forget what an earlier writer said of it and later ones."""
        self._writer = SummaryWriter(self._logdir, purge_step=first)
        self._next = first

    def write(self, last: dict[str, Any]) -> None:
        """The last committed step, unless it was written already."""
        if self._writer is None or last["step"] < self._next:
            return
        self._writer.add_scalar("loss", last["loss"], last["step"])
        self._writer.flush()  # in the file, hence safe from the death of this process
        self._next = last["step"] + 1

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--logdir", default="build/tensorboard")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--symmetric", action="store_true", help="spares build the model ahead (hot)")
    args = parser.parse_args()

    run = keepstep.init(symmetric=args.symmetric)
    torch.manual_seed(0)
    labels = torch.arange(64 * args.steps) % 10
    images = torch.randn(10, 64)[labels] + 1.5 * torch.randn(len(labels), 64)
    data = TensorDataset(images, labels)
    loader = DataLoader(data, batch_size=64 // run.world_size, sampler=DistributedSampler(data))
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    model = DistributedDataParallel(layers.to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # What was committed last. It is protected, so a replacement of rank 0 knows it too.
    last: dict[str, Any] = {"step": -1, "loss": 0.0}
    run.protect(model=model, optimizer=optimizer, last=last)

    board = Board(args.logdir)
    if run.live and run.rank == 0:
        board.open(0)

    @run.on_promote
    def continue_the_board(rank: int) -> None:
        # The dead worker may or may not have written its last step: it is written (again), the older one forgotten.
        if rank == 0:
            board.open(max(0, last["step"]))

    for step in run.steps(loader, until=args.steps):
        with step.aside():
            board.write(last)  # committed by now: a step that is served again is not in `last`
        with step as (x, y):
            loss = F.cross_entropy(model(x.to(run.device)), y.to(run.device))
            loss.backward()
            mean = loss.detach() / run.world_size
            dist.all_reduce(mean)
            last["step"], last["loss"] = step.number, mean.item()
            run.report(loss=mean.item())
            optimizer.step()
            optimizer.zero_grad()

    run.finish(lambda: board.write(last))
    board.close()


if __name__ == "__main__":
    main()

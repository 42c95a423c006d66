"""The job that recovery.py harms: a small network under DDP or HSDP that trains in bursts.

With `--permit FILE` it pauses between steps wherever the number in the file is reached, so that a burst (and
a kill in it) begins only when the spare is ready. What is computed does not depend on the pauses.
"""

from __future__ import annotations

import argparse
import os
from itertools import pairwise
from pathlib import Path

import torch
from network import block, spread
from permit import pause
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import keepstep

INPUTS, WIDTH, LAYERS, OUTPUTS, BATCH = 64, 512, 4, 16, 32
PAUSE_LIMIT_S = 120.0


def build(parallel: str, world_size: int, device: torch.device) -> nn.Module:
    """0.8 million parameters."""
    sizes = [INPUTS] + [WIDTH] * LAYERS
    return spread(
        [block(inputs, outputs) for inputs, outputs in pairwise(sizes)],
        nn.Linear(WIDTH, OUTPUTS),
        parallel,
        world_size,
        device,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parallel", choices=("ddp", "hsdp"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--hot", type=int, default=0, help="so many spares build the model ahead")
    parser.add_argument("--permit", type=Path)
    args = parser.parse_args()

    ranks, worker = int(os.environ["WORLD_SIZE"]), int(os.environ.get("KEEPSTEP_WORKER", "0"))
    run = keepstep.init(symmetric=bool(args.hot) and worker < ranks + args.hot)
    torch.manual_seed(0)
    x = torch.randn(args.steps * BATCH * run.world_size, INPUTS)
    data = TensorDataset(x, torch.sin(2 * x[:, :OUTPUTS]))
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data), drop_last=True)
    model = build(args.parallel, run.world_size, run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.protect(model=model, optimizer=optimizer)

    for step in run.steps(loader, epochs=1):
        if run.live:
            pause(args.permit, step.number, PAUSE_LIMIT_S)
        with step as (inputs, targets):
            loss = (model(inputs.to(run.device)) - targets.to(run.device)).square().mean()
            loss.backward()
            run.report(loss=loss.item())
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()

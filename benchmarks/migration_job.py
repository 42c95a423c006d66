"""The job that migration.py moves ranks of: a network of a given size under DDP that trains in bursts."""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import torch
from network import block, spread
from permit import pause
from torch import nn

import keepstep

INPUTS, OUTPUTS, BATCH = 64, 16, 32
PAUSE_LIMIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--permit", type=Path)
    args = parser.parse_args()

    run = keepstep.init(symmetric=True)
    torch.manual_seed(0)
    sizes = [INPUTS] + [args.width] * args.layers
    blocks = [block(inputs, outputs) for inputs, outputs in pairwise(sizes)]
    model = spread(blocks, nn.Linear(args.width, OUTPUTS), "ddp", run.world_size, run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run.protect(model=model, optimizer=optimizer)
    torch.manual_seed(100 + run.rank)

    for step in run.steps(until=args.steps):
        if run.live:
            pause(args.permit, step.number, PAUSE_LIMIT_S)
        with step:
            inputs = torch.randn(BATCH, INPUTS)
            loss = (model(inputs) - torch.sin(2 * inputs[:, :OUTPUTS])).square().mean()
            loss.backward()
            run.report(loss=loss.item())
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()

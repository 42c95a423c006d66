"""The job that the soak harms: much of what a training script does, in small, and paused where asked.

With `--permit FILE` it pauses between steps wherever the number in the file is reached. What it computes does
not depend on the pauses.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import keepstep

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from network import block, spread
from permit import pause

WIDTH, LAYERS, BATCH = 32, 4, 4
PAUSE_LIMIT_S = 400.0


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Sample i is made from i, with noise from the rank's own generator."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return sample + 0.01 * torch.randn(WIDTH), index


def build(parallel: str, world_size: int) -> nn.Module:
    """With batch norm where its buffers are one rank's own."""
    blocks = [block(WIDTH, WIDTH, norm=parallel == "ddp", dropout=0.1) for _ in range(LAYERS)]
    head = nn.Linear(WIDTH, 8)
    return spread(blocks, head, parallel, world_size, torch.device("cpu"), bucket_cap_mb=0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", choices=("ddp", "hsdp"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--permit", type=Path)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    run = keepstep.init(symmetric=arguments.symmetric)
    torch.manual_seed(7)
    model = build(arguments.parallel, run.world_size)
    torch.manual_seed(100 + run.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    totals = {"samples": 0}
    run.protect(model=model, optimizer=optimizer, scheduler=scheduler, totals=totals)
    data = Samples(7 * BATCH * run.world_size)  # an epoch is seven steps: bursts end at other places
    sampler = DistributedSampler(data, num_replicas=run.world_size, rank=run.rank, shuffle=True)
    loader = DataLoader(data, BATCH, sampler=sampler)

    for step in run.steps(loader, epochs=10_000, until=arguments.steps):
        if run.live:
            pause(arguments.permit, step.number, PAUSE_LIMIT_S)
        with step.aside():
            probe = torch.full((1,), float(step.number))
            torch.distributed.all_reduce(probe)
        with step as (samples, indices):
            totals["samples"] += len(indices)
            loss = model(samples).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            run.report(loss=loss.item(), norm=norm.item(), samples=totals["samples"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()

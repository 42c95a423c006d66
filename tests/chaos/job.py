"""The job that the soak harms: much of what a training script does, in small, and paused where asked.

With `--permit FILE` it pauses between steps wherever the number in the file is reached. What it computes does
not depend on the pauses.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import keepstep

WIDTH, LAYERS, BATCH = 32, 4, 4
PAUSE_S, PAUSE_LIMIT_S = 0.005, 400.0


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
    """DDP with batch norm, or HSDP with two shards."""
    blocks = [
        nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH) if parallel == "ddp" else nn.Identity(),
            nn.Tanh(),
            nn.Dropout(0.1),
        )
        for _ in range(LAYERS)
    ]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 8))
    if parallel == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.01)
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def pause(permit: Path | None, steps_done: int) -> None:
    """Wait until more steps are permitted."""
    deadline = time.monotonic() + PAUSE_LIMIT_S
    while permit is not None and int(permit.read_text()) <= steps_done:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step after {steps_done} was permitted for {PAUSE_LIMIT_S:.0f} s")
        time.sleep(PAUSE_S)


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
            pause(arguments.permit, step.number)
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

"""The job that recovery.py harms: a small network under DDP or HSDP that trains in bursts.

With `--permit FILE` it pauses between steps wherever the number in the file is reached, so that a burst (and
a kill in it) begins only when the spare is ready. What is computed does not depend on the pauses.
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
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import keepstep

WIDTH, LAYERS, BATCH = 512, 4, 32
PAUSE_S = 0.002
PAUSE_LIMIT_S = 120.0


def build(how: str, world_size: int, device: torch.device) -> nn.Module:
    """0.8 million parameters under DDP, or HSDP with two shards."""
    sizes = [64] + [WIDTH] * LAYERS + [16]
    layers = [nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]  # noqa: RUF007
    model = nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())][:-1]).to(device)
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parallel", choices=("ddp", "hsdp"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--permit", type=Path)
    args = parser.parse_args()

    run = keepstep.init(symmetric=args.symmetric)
    torch.manual_seed(0)
    x = torch.randn(args.steps * BATCH * run.world_size, 64)
    data = TensorDataset(x, torch.sin(2 * x[:, :16]))
    loader = DataLoader(data, BATCH, sampler=DistributedSampler(data), drop_last=True)
    model = build(args.parallel, run.world_size, run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.protect(model=model, optimizer=optimizer)

    for step in run.steps(loader, epochs=1):
        if run.live:
            pause(args.permit, step.number)
        with step as (inputs, targets):
            loss = (model(inputs.to(run.device)) - targets.to(run.device)).square().mean()
            loss.backward()
            run.report(loss=loss.item())
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()

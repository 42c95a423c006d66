"""One training script for the whole matrix of failures: what it uses is chosen by flags."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import keepstep


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Sample i is made from i; with `augment` it also draws from the global generator."""

    def __init__(self, count: int, width: int, augment: bool) -> None:
        self.count, self.width, self.augment = count, width, augment

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample = torch.randn(self.width, generator=torch.Generator().manual_seed(index))
        if self.augment:
            sample = sample + 0.01 * torch.randn(self.width)
        return sample, index


class Block(nn.Module):
    def __init__(self, width: int, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.relu(self.norm(self.linear(x))))


def wrap(model: nn.Module, parallel: str, blocks: nn.ModuleList, world: int) -> nn.Module:
    if parallel == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.05)
    if parallel == "hsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


class Net(nn.Module):
    def __init__(self, width: int, depth: int, norm: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, norm) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def pause(permit: Path, step: int, limit_s: float = 120.0) -> None:
    """Wait until the file's number is above `step`; what is computed does not depend on it."""
    deadline_s = time.monotonic() + limit_s
    while int(permit.read_text() or 0) <= step:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"step {step} was not permitted in {limit_s} s")
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", default="ddp", choices=["ddp", "hsdp", "plain"])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--until", type=int)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--augment", action="store_true")
    parser.add_argument("--aside", action="store_true")
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--counters", action="store_true")
    parser.add_argument("--no-loader", action="store_true")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--permit", type=Path, help="pause where the number in this file is reached")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    run = keepstep.init(symmetric=arguments.symmetric)
    torch.manual_seed(7)
    net = Net(arguments.width, arguments.depth, arguments.norm)
    model = wrap(net, arguments.parallel, net.blocks, run.world_size)
    torch.manual_seed(100 + run.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    seen: dict[str, list[int]] = {"indices": []}
    totals = {"batches": 0}
    protected = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    scaler = torch.amp.GradScaler("cpu", enabled=True, init_scale=256.0) if arguments.scaler else None
    if scaler is not None:
        protected["scaler"] = scaler
    if arguments.counters:
        run.protect(**protected, totals=totals, per_rank={"seen": seen})
    else:
        run.protect(**protected)
    if arguments.no_loader:
        steps = run.steps(until=arguments.until)
    else:
        data = Samples(arguments.samples, arguments.width, arguments.augment)
        sampler = DistributedSampler(data, num_replicas=run.world_size, rank=run.rank, shuffle=True)
        loader = DataLoader(data, arguments.batch, sampler=sampler, num_workers=arguments.workers)
        steps = run.steps(loader, epochs=arguments.epochs, until=arguments.until)

    for step in steps:
        if arguments.permit is not None and run.live:
            pause(arguments.permit, step.number)
        if arguments.aside and step.micro == 0 and step.number % 5 == 4:
            with step.aside():
                probe = torch.full((1,), float(step.number))
                torch.distributed.all_reduce(probe)
                if arguments.parallel == "hsdp":
                    model(torch.zeros(2, arguments.width))
        with step as batch:
            if batch is None:
                samples = torch.randn(arguments.batch, arguments.width)
            else:
                samples, indices = batch
                if arguments.counters:
                    seen["indices"] = seen["indices"] + indices.tolist()
                    totals["batches"] += 1
            last = step.micro + 1 == arguments.accumulate
            quiet: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if arguments.parallel == "ddp" and not last:
                quiet = model.no_sync()
            if arguments.parallel == "hsdp":
                model.set_requires_gradient_sync(last)
            with quiet:
                with torch.autocast("cpu", torch.bfloat16, enabled=arguments.autocast):
                    loss = model(samples).float().pow(2).mean()
                if scaler is not None:
                    scaler.scale(loss).backward()
                else:
                    loss.backward()
            if last:
                if arguments.parallel == "plain":
                    for parameter in model.parameters():
                        torch.distributed.all_reduce(parameter.grad)
                if scaler is not None:
                    scaler.unscale_(optimizer)
                if arguments.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                run.report(loss=loss.item())
                if scaler is not None:
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if arguments.step_s:
                time.sleep(arguments.step_s)
    if arguments.counters and run.live:
        print(f"rank {run.rank} totals {totals['batches']} seen {sorted(seen['indices'])}", flush=True)
    if run.rank == 0:
        print("finished", flush=True)


if __name__ == "__main__":
    main()

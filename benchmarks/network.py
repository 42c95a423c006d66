"""The small network of the jobs that are harmed, and the two ways in which it is spread over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def block(inputs: int, outputs: int, *, norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    """One hidden layer; with `norm` it has buffers of its own on every rank, with `dropout` it draws."""
    parts: list[nn.Module] = [nn.Linear(inputs, outputs)]
    parts += [nn.BatchNorm1d(outputs)] if norm else []
    parts += [nn.Tanh()]
    parts += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*parts)


def spread(
    blocks: Sequence[nn.Module],
    head: nn.Module,
    parallel: str,
    world_size: int,
    device: torch.device,
    *,
    bucket_cap_mb: float | None = None,
) -> nn.Module:
    """The whole network under DDP, or under HSDP with two shards and one FSDP unit for each block."""
    model = nn.Sequential(*blocks, head).to(device)
    if parallel == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)

    mesh = init_device_mesh(device.type, (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    for part in blocks:
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model

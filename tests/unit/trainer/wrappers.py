"""Two gloo processes that train a wrapped model, with exceptions on the way: for test_resets.py and test_shard.py."""

from __future__ import annotations

import contextlib
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, STEPS = 24, 4, 8


class BoomError(RuntimeError):
    """What the user's code raises in the middle of a step."""


class Bomb(torch.autograd.Function):
    armed: tuple[str, int] | None = None

    @staticmethod
    def forward(ctx, x, place):
        ctx.place = place
        if Bomb.armed == ("forward", place):
            raise BoomError("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Bomb.armed == ("backward", ctx.place):
            raise BoomError("backward")
        return gradient, None


class Layer(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.linear, self.place = nn.Linear(WIDTH, WIDTH), place

    def forward(self, x):
        return torch.relu(self.linear(Bomb.apply(x, self.place)))


def build(kind, size):
    """The bare and the wrapped model."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(place) for place in range(LAYERS)))
    if kind.startswith("ddp"):
        options = {"static_graph": "static" in kind, "find_unused_parameters": "unused" in kind}
        return model, DistributedDataParallel(model, bucket_cap_mb=0.003, **options)
    mesh = (
        init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replicate", "shard"))
        if "hsdp" in kind
        else None
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh} | ({"mp_policy": policy} if "bf16" in kind else {})
    for layer in model:
        fully_shard(layer, **options)
    return model, fully_shard(model, **options)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def batch(step, rank, micro=0):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step * 100 + micro * 10 + rank))


def train(kind, rank, size, bombs, reset):
    """Losses and final parameters; `bombs`: step -> (where, layer, micro-batch) tried before the real step."""
    model, wrapped = build(kind, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    micros = 3 if "accumulate" in kind else 1

    def forward_backward(step, bomb=None):
        total = 0.0
        for micro in range(micros):
            Bomb.armed = bomb[:2] if bomb and bomb[2] == micro else None
            last = micro == micros - 1
            context = contextlib.nullcontext()
            if kind.startswith("ddp"):
                context = context if last else wrapped.no_sync()
            else:
                wrapped.set_requires_gradient_sync(last)
            with context:
                loss = wrapped(batch(step, rank, micro)).float().pow(2).mean()
                loss.backward()
            total += loss.item()
        return total

    losses = []
    for step in range(STEPS):
        if step in bombs:
            with contextlib.suppress(RuntimeError):
                forward_backward(step, bombs[step])
            Bomb.armed = None
            for parameter in model.parameters():
                parameter.grad = None
            if reset:
                # All ranks' collectives of the lost step have ended before any rank resets.
                dist.barrier()
                from keepstep.trainer.adapters import resets

                resets.reset([wrapped])
                resets.reset([wrapped])
                for parameter in model.parameters():
                    parameter.grad = None
        losses.append(forward_backward(step))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [local(parameter).detach().clone() for parameter in model.parameters()]


def serve(rank, size, path, work, *arguments):
    """Entry point of a process: join, do `work`, leave its result in a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{path}/store", size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=30),
    )
    try:
        torch.save(work(rank, size, *arguments), f"{path}/{rank}.pt")
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise
    dist.destroy_process_group()


def train_both_ways(rank, size, jobs):
    """For each job (kind, bombs, reset): the undisturbed run, then the one with exceptions."""
    return [
        (train(kind, rank, size, {}, False), train(kind, rank, size, bombs, reset))
        for kind, bombs, reset in jobs
    ]

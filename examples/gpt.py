"""A small GPT on the Python standard library's own source text: the script of `keepstep demo`.

    keepstep run --nproc-per-node 4 --spares 1 examples/gpt.py --parallel hsdp --symmetric
    torchrun --nproc-per-node 4 examples/gpt.py --parallel hsdp        # unprotected, unchanged
    python examples/gpt.py                                             # one process

Everything is plain PyTorch; what Keepstep adds are the lines with `run` and `step`.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import keepstep

VOCABULARY = 128  # 7-bit characters; anything else becomes "?"
CONTEXT = 64
TEXT_BYTES = 2_000_000


class SourceText(Dataset[tuple[Tensor, Tensor]]):
    """Windows of CONTEXT characters of the standard library, in the order of the file names."""

    def __init__(self, windows: int) -> None:
        self.text = standard_library_text(TEXT_BYTES)
        self.windows = min(windows, (len(self.text) - 1) // CONTEXT)

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        at = index * ((len(self.text) - CONTEXT - 1) // self.windows)
        window = self.text[at : at + CONTEXT + 1].long()
        return window[:-1], window[1:]


def standard_library_text(limit_bytes: int) -> Tensor:
    """The first `limit_bytes` characters of the standard library's top-level sources, as uint8."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    values = torch.frombuffer(text, dtype=torch.uint8)[:limit_bytes]
    return torch.where(values < VOCABULARY, values, ord("?"))


class Block(nn.Module):
    """Attention and a small MLP, each behind a norm and with a residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    """A decoder of 1.6 million parameters by default."""

    def __init__(self, layers: int = 6, width: int = 144, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.characters(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def parallelize(model: GPT, how: str, world_size: int, device: torch.device) -> nn.Module:
    """DDP, or HSDP: sharded over pairs of ranks, replicated over the pairs."""
    if how == "ddp":
        return DistributedDataParallel(model)
    shard = 2 if world_size >= 4 and world_size % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (world_size // shard, shard), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def warmup_then_cosine(steps: int, warmup: int) -> Callable[[int], float]:
    """Factor of the learning rate by step."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup))))

    return factor


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parallel", choices=("ddp", "hsdp"), default="ddp")
    parser.add_argument("--steps", type=int, default=80, help="optimizer updates, over two epochs")
    parser.add_argument("--batch", type=int, default=4, help="windows per rank and step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--symmetric", action="store_true", help="spares build the model ahead (hot)")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    run = keepstep.init(symmetric=args.symmetric)

    torch.manual_seed(args.seed)  # the same weights on every rank ...
    model = parallelize(GPT().to(run.device), args.parallel, run.world_size, run.device)
    torch.manual_seed(args.seed + 1000 * (run.rank + 1))  # ... and other dropout on each
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(args.steps, 10))

    epochs = 2 if args.steps % 2 == 0 else 1
    data = SourceText(windows=args.batch * run.world_size * args.steps // epochs)
    loader = DataLoader(data, args.batch, sampler=DistributedSampler(data, seed=args.seed), drop_last=True)

    counters = {"characters": 0}  # plain locals stay behind with a dead worker; protected ones do not
    run.protect(model=model, optimizer=optimizer, scheduler=scheduler, counters=counters)

    for step in run.steps(loader, epochs=epochs):
        with step as (x, y):
            x, y = x.to(run.device), y.to(run.device)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            run.report(loss=loss.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            counters["characters"] += y.numel() * run.world_size

    if run.rank == 0 and run.live:
        print(f"{args.steps} steps, {counters['characters']} characters, last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()

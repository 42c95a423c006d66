"""Loaders of every kind, and the plain loop that a cursor over them is held against."""

from __future__ import annotations

import random

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from keepstep.trainer import values
from keepstep.trainer.adapters import rng
from keepstep.trainer.data import Cursor, clone

SAMPLES = 23


class Augmented(Dataset):
    """Sample i: [i, torch's draw, Python's draw], so that any wrong draw shows."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([float(index), float(torch.rand(())), random.random()], dtype=torch.float64)


class Loads(Augmented):
    def __init__(self):
        self.loaded = []

    def __getitem__(self, index):
        self.loaded.append(index)
        return super().__getitem__(index)


class EagerSampler:
    """Draws in __iter__ itself, not at the first item."""

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        return iter(torch.randperm(SAMPLES).tolist())


class PythonSampler:
    def __len__(self):
        return SAMPLES

    def __iter__(self):
        order = list(range(SAMPLES))
        random.shuffle(order)
        return iter(order)


class SamplerWithoutLength:
    def __iter__(self):
        for index in range(SAMPLES):
            yield (index * 7) % SAMPLES


class CarriedOrder:
    """Shuffles its order further in every epoch: a fresh process cannot know it."""

    def __init__(self):
        self.order = list(range(SAMPLES))

    def __len__(self):
        return SAMPLES

    def __iter__(self):
        random.Random(1).shuffle(self.order)
        return iter(self.order)


class LazySampler:
    def __iter__(self):
        for _ in range(SAMPLES):
            yield int(torch.randint(SAMPLES, ()))


def seeded_generator():
    return torch.Generator().manual_seed(5)


LOADERS = {
    "sequential": lambda **kw: DataLoader(Augmented(), batch_size=4, **kw),
    "shuffle": lambda **kw: DataLoader(Augmented(), batch_size=4, shuffle=True, **kw),
    "shuffle drop_last": lambda **kw: DataLoader(
        Augmented(), batch_size=4, shuffle=True, drop_last=True, **kw
    ),
    "shuffle own generator": lambda **kw: DataLoader(
        Augmented(), batch_size=4, shuffle=True, generator=seeded_generator(), **kw
    ),
    "replacement": lambda **kw: DataLoader(
        Augmented(),
        batch_size=4,
        sampler=RandomSampler(Augmented(), replacement=True, num_samples=40, generator=seeded_generator()),
        **kw,
    ),
    "no batches": lambda **kw: DataLoader(Augmented(), batch_size=None, shuffle=True, **kw),
    "subset": lambda **kw: DataLoader(
        Augmented(), batch_size=4, sampler=SubsetRandomSampler(range(3, SAMPLES)), **kw
    ),
    "weighted": lambda **kw: DataLoader(
        Augmented(), batch_size=4, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES), **kw
    ),
    "distributed": lambda **kw: DataLoader(
        Augmented(), batch_size=3, sampler=DistributedSampler(Augmented(), 3, 1, seed=2), **kw
    ),
    "batch sampler": lambda **kw: DataLoader(
        Augmented(), batch_sampler=BatchSampler(RandomSampler(Augmented()), 5, False), **kw
    ),
    "eager": lambda **kw: DataLoader(Augmented(), batch_size=4, sampler=EagerSampler(), **kw),
    "eager no batches": lambda **kw: DataLoader(Augmented(), batch_size=None, sampler=EagerSampler(), **kw),
    "python": lambda **kw: DataLoader(Augmented(), batch_size=4, sampler=PythonSampler(), **kw),
    "without length": lambda **kw: DataLoader(
        Augmented(), batch_size=4, sampler=SamplerWithoutLength(), **kw
    ),
    "list": lambda **kw: DataLoader(Augmented(), batch_sampler=[[0, 1], [5], [7, 8, 9]], **kw),
}


def seed(value=0):
    torch.manual_seed(value)
    random.seed(value)


def step(batch):
    """A training step that draws (dropout), and may not disturb the data."""
    return float(batch.sum()) + float(torch.rand(()))


def plain_run(loader, epochs):
    out = []
    for epoch in range(epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        out += [(clone(batch), step(batch)) for batch in loader]
    return out


def run_to_end(cursor):
    out = []
    while True:
        try:
            batch = cursor.next_batch()
        except StopIteration:
            return out
        out.append((clone(batch), step(batch)))


def same(left, right):
    return len(left) == len(right) and all(
        torch.equal(a, b) and x == y for (a, x), (b, y) in zip(left, right, strict=True)
    )


def records(cursor):
    """Run to the end, keeping before every step what a rank's record would hold."""
    kept, out = [], []
    while True:
        kept.append((values.to_bytes(cursor.state()), rng.capture()))
        try:
            batch = cursor.next_batch()
        except StopIteration:
            return kept, out
        out.append((clone(batch), step(batch)))


def resumed(make, epochs, record):
    """What another process serves: other random state, a loader of its own."""
    seed(99)
    torch.rand(17)
    cursor = Cursor(make(), epochs)
    cursor.restore(values.from_bytes(record[0]))
    rng.restore(record[1])
    try:
        return run_to_end(cursor)
    finally:
        cursor.close()

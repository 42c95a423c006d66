"""Fills shared memory at some steps and empties it at others, while rank 1's record grows beyond its room."""

from __future__ import annotations

import contextlib
import os

import torch
from torch.nn.parallel import DistributedDataParallel

import keepstep

FILLER = "/dev/shm/filler"


def fill() -> None:
    with contextlib.suppress(OSError), open(FILLER, "ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


run = keepstep.init(symmetric=True)
torch.manual_seed(1)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
own = {"text": ""}
run.protect(model=model, optimizer=optimizer, per_rank={"own": own})
for step in run.steps(until=30):
    with step:
        model(torch.ones(2, 4)).sum().backward()
        if run.rank == 1 and run.live:
            if step.number in (5, 20):
                fill()
                own["text"] = "x" * (300_000 if step.number == 5 else 900_000)
            elif step.number == 8:
                os.unlink(FILLER)
        optimizer.step()
        optimizer.zero_grad()

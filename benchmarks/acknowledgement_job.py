"""The job that acknowledgement.py times: a small model, and per step what its gate spent on another node's word."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from overhead_job import BATCH, INPUTS, OUTPUTS, build
from torch.nn.parallel import DistributedDataParallel

import keepstep


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    run = keepstep.init()
    torch.manual_seed(run.rank)
    model = DistributedDataParallel(build(512, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.protect(model=model, optimizer=optimizer)
    session = run._session
    assert session is not None
    spent, steps, began_s = [], [], time.perf_counter()
    for step in run.steps(until=args.steps):
        with step:
            x = torch.randn(BATCH, INPUTS)  # draws: the record of every step differs from the one before
            loss = (model(x) - torch.sin(2 * x[:, :OUTPUTS])).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        now_s = time.perf_counter()
        steps.append(now_s - began_s)
        began_s = now_s
        spent.append(session.keeper.spent_s)
    if run.rank == 0:
        record = session.page.records()[0]
        args.result.write_text(
            json.dumps({"spent_s": spent, "steps_s": steps, "record_bytes": len(record.payload)})
        )


if __name__ == "__main__":
    main()

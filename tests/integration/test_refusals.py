"""What the library refuses, each with one clear line that says what to do; the job ends with code 2."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.integration.jobs import run_job

HEAD = """
import sys, torch, torch.distributed as dist, keepstep
from torch import nn
from keepstep.errors import UsageError
from keepstep.trainer.ends import own_line
run = keepstep.init()
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def protect(done=[]):
    if not done:
        done.append(run.protect(model=model, optimizer=optimizer))
def update():
    optimizer.zero_grad(); model(torch.ones(2, 4)).sum().backward(); optimizer.step()
"""
CAUGHT = """
try:
{body}
    sys.exit("was not refused")
except UsageError as error:
    print(f"keepstep: refused: {{own_line(error.__traceback__)}}: {{error}}", file=sys.stderr)
"""
PROTECT = "protect()\n"

REFUSED = {
    "a collective after the gate": (
        PROTECT + "for step in run.steps(until=3):\n    with step:\n        update()\n"
        "        dist.all_reduce(torch.ones(1))\n",
        "after optimizer.step() in the same block",
    ),
    "a collective outside a step": (
        PROTECT + "for step in run.steps(until=3):\n    dist.all_reduce(torch.ones(1))\n    with step:\n"
        "        update()\n",
        "outside a step",
    ),
    "a group made after setup": (
        PROTECT
        + "for step in run.steps(until=3):\n    with step:\n        dist.new_group([0])\n        update()\n",
        "make every group before run.steps()",
    ),
    "an optimizer that is not protected": (
        "run.protect(model=model, optimizer=optimizer)\n"
        "other = torch.optim.Adam(nn.Linear(2, 2).parameters())\n"
        "for step in run.steps(until=3):\n    with step:\n        update()\n    with step:\n        other.step()\n".replace(
            "    with step:\n        other.step()\n", ""
        ).replace("        update()\n", "        other.step()\n"),
        "is not protected: its state would be lost",
    ),
    "an update outside the block": (
        PROTECT + "for step in run.steps(until=3):\n    update()\n",
        "outside `with step:`",
    ),
    "a second init": ("keepstep.init()\n", "called twice"),
    "an object without state": (PROTECT + "run.protect(thing=object())\n", "thing"),
    "a model whose optimizer is missing": (
        "run.protect(model=model)\nnext(run.steps(until=3))\n",
        "optimizer",
    ),
    "a closure that is evaluated twice": (
        "optimizer = torch.optim.LBFGS(model.parameters())\nrun.protect(model=model, optimizer=optimizer)\n",
        "LBFGS",
    ),
    "a large tensor changed before the gate": (
        "model.register_buffer('average', torch.zeros(2_000_000))\n"
        + PROTECT
        + "for step in run.steps(until=3):\n    with step:\n        model.average.add_(1.0)\n        update()\n",
        "changed in place before optimizer.step()",
    ),
    "a second loop": (
        PROTECT + "list_of = run.steps(until=3)\nfor step in list_of:\n    with step:\n        update()\n"
        "run.steps(until=5)\n",
        "a second time",
    ),
    "a loop without an end": (PROTECT + "run.steps()\n", "without an end"),
    "an iterable dataset": (
        PROTECT
        + "class Stream(torch.utils.data.IterableDataset):\n    def __iter__(self):\n        yield 1\n"
        "for step in run.steps(torch.utils.data.DataLoader(Stream()), epochs=1):\n    pass\n",
        "map-style dataset",
    ),
    "protecting after the loop began": (
        PROTECT + "loop = run.steps(until=3)\nrun.protect(counters={'a': 1})\n",
        "before the loop",
    ),
    "a record larger than the limit": (
        "run.protect(model=model, optimizer=optimizer, per_rank={'cache': {'t': torch.zeros(3_000_000)}})\n"
        "for step in run.steps(until=3):\n    with step:\n        update()\n",
        "cache",
    ),
    "the next step inside a block": (
        PROTECT + "loop = run.steps(until=3)\nfor step in loop:\n    with step:\n        next(loop)\n",
        "inside `with step:`",
    ),
}


# A job for each, except where a refusal leaves everything as it was: there the script may catch it and be refused again.
SHARED = (
    "a second init",
    "an object without state",
    "a loop without an end",
    "an iterable dataset",
)
JOBS = (SHARED, *((name,) for name in REFUSED if name not in SHARED))


@pytest.mark.parametrize("names", JOBS, ids="; ".join)
def test_is_refused_with_one_clear_line(names: tuple[str, ...], tmp_path: Path) -> None:
    """Nobody catches the last one."""
    script = tmp_path / "script.py"
    *caught, last = (REFUSED[name][0] for name in names)
    tried = (CAUGHT.format(body=textwrap.indent(body, "    ")) for body in caught)
    script.write_text("".join((HEAD, *tried, last)))
    job = run_job(tmp_path / "run", [str(script)], ranks=1)
    assert job.status == 2, job.output + job.worker_log()
    refusals = [line for line in job.worker_log().splitlines() if line.startswith("keepstep: refused:")]
    assert len(refusals) == len(names), job.worker_log()
    for refusal, name in zip(refusals, names, strict=True):
        assert REFUSED[name][1] in refusal
        assert "script.py:" in refusal
    assert REFUSED[names[-1]][1] in job.output

"""After an exception in mid-step and a reset, wrappers train on as if nothing had been."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from keepstep.trainer.adapters import resets


def load_wrappers():
    """The workers' module, importable under one name here and in spawned processes."""
    folder = str(Path(__file__).parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module("wrappers")


wrappers = load_wrappers()

BOMBS = {2: ("forward", 2, 0), 3: ("backward", 2, 0), 4: ("backward", 0, 0), 6: ("forward", 0, 0)}
IN_ACCUMULATION = {2: ("forward", 2, 1), 3: ("backward", 2, 2), 5: ("backward", 1, 1)}


KINDS = ["ddp", "ddp static", "ddp unused", "ddp accumulate", "fsdp", "fsdp bf16", "fsdp accumulate"]
JOBS = {kind: (kind, IN_ACCUMULATION if "accumulate" in kind else BOMBS, True) for kind in KINDS} | {
    "fsdp without reset": ("fsdp", BOMBS, False)
}


def equal(one, other):
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


@pytest.fixture(scope="module")
def identical(tmp_path_factory):
    """Job -> whether both ranks ended bit for bit as without exceptions. One pair of processes runs all."""
    path, jobs = tmp_path_factory.mktemp("ranks"), list(JOBS.values())
    mp.spawn(wrappers.serve, (2, str(path), wrappers.train_both_ways, jobs), nprocs=2, join=True)
    results = [torch.load(path / f"{rank}.pt") for rank in range(2)]
    return {name: all(equal(*ranks[index]) for ranks in results) for index, name in enumerate(JOBS)}


@pytest.mark.parametrize("kind", KINDS)
def test_exceptions_in_mid_step_and_a_reset_leave_no_trace(kind, identical):
    assert identical[kind]


def test_without_the_reset_fsdp_would_be_silently_wrong(identical):
    assert not identical["fsdp without reset"]


def test_plain_modules_have_no_wrappers_and_a_reset_does_nothing():
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert resets.find_wrappers([plain]) == []
    resets.reset([plain])

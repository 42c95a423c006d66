"""`keepstep replicas` of real jobs: running, ended, and of scripts that are only tried."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import SCRIPT, environment, run_job

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SHARDED = """
import pathlib, sys
import torch, keepstep
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.set_num_threads(1)
run = keepstep.init()
model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)))
optimizer = torch.optim.AdamW(model.parameters())
run.protect(model=model, optimizer=optimizer)
for step in run.steps(until=int(sys.argv[1])):
    with step:
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
pathlib.Path(__file__).with_name("the-end").write_text("was reached")
"""


def replicas(*arguments: str, expect: int = 0) -> Any:
    """What the command prints, as JSON; with `expect`, what it complains of."""
    command = [sys.executable, "-m", "keepstep", "replicas", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=environment(), check=False
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stderr if expect else json.loads(done.stdout)


def test_a_job_says_its_replicas_at_its_start_and_after_a_recovery_and_its_ledger_knows_them(
    tmp_path: Path,
) -> None:
    arguments = ("--parallel", "ddp", "--norm", "--until", "14", "--symmetric", "--step-s", "0.05")
    job = run_job(tmp_path / "run", arguments, ranks=3, spares=1, faults=["rank=1,step=8,at=backward"])
    assert job.status == 0, job.output + job.worker_log()
    lines = [line for line in job.output.splitlines() if line.startswith("keepstep: state: ")]
    assert len(lines) == 2, job.output
    assert all("in 1 shard, with 3 live copies on 1 node" in line for line in lines)
    assert all("12 tensors and values of each rank" in line and "no twin: records" in line for line in lines)
    table = replicas(str(tmp_path / "run"), "--json")
    assert (table["complete"], table["live"], table["generation"]) == (True, False, 1)
    assert table["shards"][0]["workers"] == [0, 3, 2]
    rows = {row["part"]: row for row in table["parts"]}
    assert {row["check"] for name, row in rows.items() if name != "per rank"} == {"verified"}
    assert rows["optimizer state"]["least_copies"] == 3


def test_hsdp_tried_as_on_two_nodes_has_two_verified_copies_of_each_of_two_shards() -> None:
    table = replicas(
        *("--json", "--ranks", "4", "--nodes", "2"), str(SCRIPT), *("--parallel", "hsdp", "--until", "500")
    )
    assert [(row["ranks"], row["nodes"], row["check"]) for row in table["shards"]] == [
        ([0, 2], ["node0", "node1"], "verified"),
        ([1, 3], ["node0", "node1"], "verified"),
    ]
    assert "every shard has 2 live copies on 2 nodes" in table["line"]


def test_plain_fsdp_has_no_twin_and_a_trial_carries_out_nothing_behind_the_second_update(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SHARDED)
    table = replicas("--json", "--ranks", "2", str(script), "3")
    assert (
        "no rank has a twin: when any rank is lost, all ranks go back to the script's own checkpoint"
        in (table["line"])
    )
    assert table["without_twin"] == [0, 1]
    named = {row["name"]: row["bytes"] for row in table["alone"] if row["kept"] == "nowhere"}
    assert named["model.0.weight"] == 64 * 64 * 4 // 2
    assert named["optimizer/model.0.weight/exp_avg"] == 64 * 64 * 4 // 2
    assert not (tmp_path / "the-end").exists()
    complaint = replicas("--ranks", "1", str(script), "1", expect=2)
    assert "ended before its second update" in complaint


def test_a_command_line_that_means_nothing_is_one_line(tmp_path: Path) -> None:
    assert "no script given" in replicas("--ranks", "2", expect=2)
    assert "spread evenly" in replicas("--ranks", "3", "--nodes", "2", "x.py", expect=2)
    assert "--ranks" in replicas("run", "x", expect=2)
    assert "there is no run directory" in replicas(str(tmp_path / "none"), expect=2)

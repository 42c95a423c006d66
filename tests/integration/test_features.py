"""What real scripts use (accumulation, autocast, scaler, loaders, counters) survives a kill bit for bit."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.jobs import assert_identical, reference, run_job

FEATURES = {
    "ddp-accumulation-no_sync": (2, ("--parallel", "ddp", "--accumulate", "3", "--until", "12", "--clip")),
    "hsdp-accumulation-clip": (4, ("--parallel", "hsdp", "--accumulate", "2", "--until", "12", "--clip")),
    "ddp-autocast-scaler": (2, ("--parallel", "ddp", "--autocast", "--scaler", "--until", "14")),
    "ddp-loader-workers-augment": (2, ("--parallel", "ddp", "--workers", "2", "--augment", "--until", "14")),
    "ddp-augment-batchnorm": (2, ("--parallel", "ddp", "--augment", "--norm", "--until", "14")),
    "plain-loop-without-loader": (2, ("--parallel", "plain", "--no-loader", "--until", "14")),
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("place", ["backward", "after_gate"])
def test_a_feature_survives_a_kill(name: str, place: str, references: Path, tmp_path: Path) -> None:
    ranks, arguments = FEATURES[name]
    undisturbed = reference(references, arguments, ranks)
    fault = f"rank=1,step=7,at={place}"
    job = run_job(tmp_path / "run", (*arguments, "--symmetric"), ranks=ranks, spares=1, faults=[fault])
    assert_identical(undisturbed, job)


def test_every_sample_is_seen_exactly_once_per_epoch_in_spite_of_three_kills(tmp_path: Path) -> None:
    arguments = ("--parallel", "ddp", "--counters", "--samples", "96", "--epochs", "2", "--symmetric")
    faults = [
        "rank=1,step=5,at=backward",
        "rank=0,step=12,at=after_gate",
        "rank=2,step=10,at=block_end",
    ]
    job = run_job(tmp_path / "run", arguments, ranks=3, spares=3, faults=faults)
    assert job.status == 0, job.output + job.worker_log()
    lines = [
        re.search(r"rank \d+ totals (\d+) seen \[(.*)\]", path.read_text())
        for path in sorted((tmp_path / "run" / "logs").glob("*.stdout"))
    ]
    found = [line for line in lines if line is not None]
    assert len(found) == 3, job.output + job.worker_log()
    seen = Counter(int(index) for line in found for index in line.group(2).split(", "))
    assert seen == Counter(dict.fromkeys(range(96), 2))
    assert {line.group(1) for line in found} == {"16"}

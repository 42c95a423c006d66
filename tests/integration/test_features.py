"""What real scripts use (accumulation, autocast, scaler, loaders, counters) survives kills bit for bit."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.harmed import Harm, Story, harmed_job

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    arguments: tuple[str, ...]
    ranks: int = 2
    until: int = 16


MIXED = ("--accumulate", "3", "--clip", "--autocast", "--scaler", "--augment", "--norm", "--epochs", "9")
FEATURES = {
    "ddp-accumulation-no_sync-clip-autocast-scaler-augment-batchnorm": Feature(
        arguments=("--parallel", "ddp", *MIXED)
    ),
    "hsdp-accumulation-clip": Feature(
        arguments=("--parallel", "hsdp", "--accumulate", "2", "--clip", "--epochs", "9"), ranks=4
    ),
    "plain-loop-without-loader": Feature(arguments=("--parallel", "plain", "--no-loader")),
}
# Two epochs of eight steps: sixty-four samples.
COUNTED = Feature(
    arguments=(
        *("--parallel", "ddp", "--workers", "2", "--augment", "--norm"),
        *("--counters", "--samples", "64", "--epochs", "2"),
    )
)
BACKWARD = Harm(name="backward", faults=("rank=1,step=+0,at=backward",), spares=2)
AFTER_GATE = Harm(name="after the gate", faults=("rank=0,step=+0,at=after_gate",))
BLOCK_END = Harm(name="at the block's end", faults=("rank=1,step=last,at=block_end",))


def harmed(feature: Feature, harms: list[Harm], references: Path, tmp_path: Path) -> Story:
    story = harmed_job(
        tmp_path,
        references,
        (*feature.arguments, "--until", str(feature.until)),
        harms,
        ranks=feature.ranks,
        spares=2,
    )
    for harm in harms:
        story.assert_cost_nothing(harm.name)
    story.assert_ended_identical()
    assert len(story.incidents) == len(harms)
    return story


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_survives_kills_before_and_after_the_gate(
    name: str, references: Path, tmp_path: Path
) -> None:
    harmed(FEATURES[name], [BACKWARD, AFTER_GATE], references, tmp_path)


def test_with_loader_workers_every_sample_is_seen_exactly_once_per_epoch_in_spite_of_three_kills(
    references: Path, tmp_path: Path
) -> None:
    story = harmed(COUNTED, [BACKWARD, AFTER_GATE, BLOCK_END], references, tmp_path)
    lines = [
        re.search(r"rank \d+ totals (\d+) seen \[(.*)\]", path.read_text())
        for path in sorted((story.run_dir / "logs").glob("*.stdout"))
    ]
    found = [line for line in lines if line is not None]
    assert len(found) == COUNTED.ranks, story.output
    seen = Counter(int(index) for line in found for index in line.group(2).split(", "))
    assert seen == Counter(dict.fromkeys(range(64), 2))
    assert {line.group(1) for line in found} == {"16"}

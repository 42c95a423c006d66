"""Random harm to real jobs, DDP and HSDP: a few kills in `make test`, many in `make soak`."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.chaos.plan import BURST_STEPS, LAST_STEPS, PLACES, draw
from tests.chaos.soak import BLOWS_PER_JOB, soak, told

SHORT_SEED = 5
TWINS = 2  # ranks r and r + 2 of the HSDP job hold the same shard


def chosen_seed(default: int) -> int:
    """KEEPSTEP_SOAK_SEED repeats a soak."""
    return int(os.environ.get("KEEPSTEP_SOAK_SEED", default))


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_few_random_kills_cost_nothing(tmp_path: Path) -> None:
    """One DDP and one HSDP job, two blows each."""
    seed = chosen_seed(SHORT_SEED)
    print(f"seed {seed}")
    count = soak(tmp_path, seed, 4, blows_per_job=2)
    print(told(seed, count))
    assert count.kills >= 4 and count.jobs >= 2


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_random_kills_cost_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`make soak`: KEEPSTEP_SOAK_KILLS kills, another seed every time; told while it goes on."""
    seed = chosen_seed(random.SystemRandom().randrange(1_000_000))
    kills = int(os.environ.get("KEEPSTEP_SOAK_KILLS", "50"))
    with capfd.disabled():
        print(
            f"\nseed {seed}: repeat with KEEPSTEP_SOAK_SEED={seed} make soak SOAK_KILLS={kills}", flush=True
        )
        count = soak(tmp_path, seed, kills, say=lambda text: print(text, flush=True))
        print(told(seed, count), flush=True)
    assert count.kills >= kills


def test_a_seed_repeats_what_is_drawn_whatever_was_drawn_before() -> None:
    assert draw(5, 3, BLOWS_PER_JOB) == draw(5, 3, BLOWS_PER_JOB)
    assert draw(5, 3, BLOWS_PER_JOB) != draw(6, 3, BLOWS_PER_JOB)


def test_the_plans_come_to_every_place_and_never_take_both_twins() -> None:
    plans = [draw(seed, number, BLOWS_PER_JOB) for seed in range(40) for number in range(4)]
    faults = [fault for plan in plans for blow in plan.blows for fault in blow.faults]
    assert {fault.at for fault in faults} == {*PLACES, "transfer_source", "transfer_target"}
    assert {plan.parallel for plan in plans} == {"ddp", "hsdp"}
    assert {blow.signal for plan in plans for blow in plan.blows} == {"", "KILL", "STOP"}
    assert any(blow.at_spare for plan in plans for blow in plan.blows)
    for plan in plans:
        assert plan.steps == BURST_STEPS * (len(plan.blows) + 1) + LAST_STEPS
        for burst, blow in enumerate(plan.blows, 1):
            assert burst * BURST_STEPS < blow.step < (burst + 1) * BURST_STEPS - 1
            assert all(fault.step == blow.step for fault in blow.faults)
            ranks = {fault.rank for fault in blow.faults}
            if plan.parallel == "hsdp" and len(ranks) == 2:
                first, second = ranks
                assert abs(first - second) != TWINS

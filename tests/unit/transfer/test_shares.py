"""Whatever happens to sources, every stripe arrives exactly once, or no source is left."""

from __future__ import annotations

import random

import pytest

from keepstep.core.transfer_plan import Stripe, plan_stripes
from keepstep.transfer.shares import MAX_SPOILT, Shares


@pytest.mark.parametrize("seed", range(200))
def test_every_stripe_arrives_once_or_every_source_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    sources = rng.randint(1, 4)
    plan = plan_stripes([rng.randint(0, 60) for _ in range(rng.randint(0, 6))], range(sources), 7)
    shares = Shares(plan, range(sources))
    alive = list(range(sources))
    flying: dict[int, list[Stripe]] = {source: [] for source in alive}
    arrived: list[tuple[int, int, int]] = []
    while not shares.over:
        source = rng.choice(alive)
        event = rng.choices(["take", "arrive", "spoil", "lose"], [40, 40, 3, 2])[0]
        if event == "take":
            stripe = shares.take(source, wait=False)
            if stripe is not None:
                flying[source].append(stripe)
        elif event == "lose" or not flying[source]:
            if event == "lose":
                shares.lost(source, "died")
                alive.remove(source)
        elif event == "arrive":
            stripe = flying[source].pop(rng.randrange(len(flying[source])))
            shares.arrived(source, stripe)
            arrived.append((stripe.piece, stripe.offset, stripe.length))
        elif not shares.spoilt(source, flying[source].pop(rng.randrange(len(flying[source])))):
            shares.lost(source, "spoils")
            alive.remove(source)
    assert len(set(arrived)) == len(arrived)
    assert shares.complete == (len(arrived) == len(plan))
    assert shares.complete or not alive
    assert sum(shares.arrived_bytes.values()) == sum(length for _, _, length in arrived)


def test_an_idle_source_takes_work_from_the_one_with_most_left() -> None:
    shares = Shares(plan_stripes([100], [0, 1], 10), [0, 1])
    taken = []
    while (stripe := shares.take(1, wait=False)) is not None:
        shares.arrived(1, stripe)
        taken.append(stripe.offset)
    assert shares.complete and sorted(taken) == list(range(0, 100, 10))
    assert taken[-5:] == [40, 30, 20, 10, 0]  # from the far end of the other's queue


def test_a_source_that_spoils_again_and_again_is_given_up() -> None:
    shares = Shares(plan_stripes([10], [0], 10), [0])
    for attempt in range(1, MAX_SPOILT + 1):
        stripe = shares.take(0, wait=False)
        assert stripe is not None
        assert shares.spoilt(0, stripe) == (attempt < MAX_SPOILT)

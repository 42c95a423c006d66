"""A captured random state is put back bit for bit, and an unmoved one is noticed, never guessed."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from keepstep.trainer import rng

DRAWS: dict[str, Callable[[], object]] = {
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0.0, 1.0),
    "numpy.rand": lambda: np.random.rand(2).tolist(),
    "numpy.randn once": lambda: float(np.random.randn()),
    "numpy.randn thrice": lambda: np.random.randn(3).tolist(),
    "torch.randn": lambda: torch.randn(3).tolist(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_draw_after_a_capture_can_be_repeated(name: str) -> None:
    draw = DRAWS[name]
    taken = []
    for _ in range(6):
        taken.append((rng.capture(), draw()))
    for state, value in reversed(taken):
        rng.restore(state)
        assert draw() == value


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_seen_as_a_change_and_no_draw_as_none(name: str) -> None:
    packer = rng.Packer()
    for _ in range(4):
        before = packer.pack(rng.capture())
        assert before == packer.pack(rng.capture())
        DRAWS[name]()
        assert before != packer.pack(rng.capture())


def test_a_generator_that_did_not_move_is_not_copied_again() -> None:
    random.seed(1)
    np.random.seed(1)
    one, other = rng.capture(), rng.capture()
    assert one["random"] is other["random"]
    assert one["numpy"] is other["numpy"]


@pytest.mark.parametrize("name", DRAWS)
def test_a_packed_state_is_put_back_bit_for_bit(name: str) -> None:
    draw = DRAWS[name]
    for _ in range(3):
        packed = rng.Packer().pack(rng.capture())
        value = draw()
        rng.restore({part: rng.unpacked(part, data) for part, data in packed.items()})
        assert draw() == value

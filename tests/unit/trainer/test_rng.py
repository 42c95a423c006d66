"""A captured random state is put back bit for bit, and an unmoved one is noticed, never guessed."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from keepstep.trainer import rng, values

DRAWS: dict[str, Callable[[], object]] = {
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0.0, 1.0),
    "numpy.rand": lambda: np.random.rand(2).tolist(),
    "numpy.randn once": lambda: float(np.random.randn()),
    "numpy.randn thrice": lambda: np.random.randn(3).tolist(),
    "torch.randn": lambda: torch.randn(3).tolist(),
    "torch.randn once": lambda: torch.randn(1).tolist(),
    "torch.rand": lambda: torch.rand(3).tolist(),
    "torch.normal, double": lambda: torch.empty(1, dtype=torch.float64).normal_().tolist(),
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
    assert all(one[name] is other[name] for name in ("torch", "random", "numpy"))


BLOCK = 624  # words of a Mersenne Twister: after so many draws its position is the same again


@pytest.mark.parametrize(
    "draw",
    [
        lambda: [random.getrandbits(32) for _ in range(BLOCK)],
        lambda: np.random.randint(0, 2**32, BLOCK, dtype=np.uint32),
        lambda: [torch.randint(0, 2**31, (1,)) for _ in range(BLOCK)],
        lambda: torch.manual_seed(int(torch.initial_seed()) + 1),
    ],
)
def test_a_whole_block_of_draws_is_seen(draw: Callable[[], object]) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    random.random(), np.random.rand(), torch.rand(1)
    for _ in range(3):
        before = {name: rng.Packer().pack(rng.capture())[name] for name in ("torch", "random", "numpy")}
        draw()
        now = rng.Packer().pack(rng.capture())
        truly = {
            "torch": bytes(torch.get_rng_state().numpy()),
            "random": values.to_bytes(random.getstate()),
            "numpy": values.to_bytes(np.random.get_state()),
        }
        assert now == truly
        assert sum(now[name] != before[name] for name in now) == 1


@pytest.mark.parametrize("name", DRAWS)
def test_a_torch_or_python_of_another_layout_costs_time_and_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rng, "_torch_at", 0)
    monkeypatch.setattr(rng, "_python_at", 0)
    test_a_draw_is_seen_as_a_change_and_no_draw_as_none(name)


@pytest.mark.parametrize("name", DRAWS)
def test_a_packed_state_is_put_back_bit_for_bit(name: str) -> None:
    draw = DRAWS[name]
    for _ in range(3):
        packed = rng.Packer().pack(rng.capture())
        value = draw()
        rng.restore({part: rng.unpacked(part, data) for part, data in packed.items()})
        assert draw() == value

"""The random number generators of one process: taken and put back, bit for bit.

torch (CPU and this rank's GPU), Python's random, and numpy when the script has imported it.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """The state of every generator, cheap enough for each step (about 20 us)."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "random": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        state["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` took. A generator that was not there is left alone."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["random"])
    numpy = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two captured states are equal."""
    if one.keys() != other.keys() or one["random"] != other["random"]:
        return False
    for name in ("torch", "cuda"):
        if name in one and not torch.equal(one[name], other[name]):
            return False
    if "numpy" in one:
        left, right = one["numpy"], other["numpy"]
        return bool(left[0] == right[0] and left[2:] == right[2:] and (left[1] == right[1]).all())
    return True

"""Host random number generators <-> bytes: torch's default, Python's, numpy's (when loaded), others given.

A sampler, an augmentation or dropout may draw from any of them. Device generators are not kept here.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from keepstep.errors import UsageError
from keepstep.trainer import values


def capture(generators: Sequence[Any] = ()) -> bytes:
    """The state of all host generators and of `generators`, about 12 KB."""
    numpy = sys.modules.get("numpy")
    return values.to_bytes(
        {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": None if numpy is None else numpy.random.get_state(legacy=False),
            "others": [state_of(generator) for generator in generators],
        }
    )


def restore(captured: bytes, generators: Sequence[Any] = ()) -> None:
    """Put back what `capture` returned. Raises UsageError when the generators are not the same ones."""
    states = values.from_bytes(captured)
    if len(states["others"]) != len(generators):
        raise UsageError(
            f"the data loader has {len(generators)} random generators of its own, its record {len(states['others'])}: "
            "build the same loader in every process"
        )
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and states["numpy"] is not None:
        numpy.random.set_state(states["numpy"])
    for generator, state in zip(generators, states["others"], strict=True):
        set_state_of(generator, state)


def capture_each(generators: Sequence[Any]) -> bytes:
    """The state of `generators` alone; empty when there are none."""
    return values.to_bytes([state_of(generator) for generator in generators]) if generators else b""


def restore_each(captured: bytes, generators: Sequence[Any]) -> None:
    """Put back what `capture_each` returned."""
    for generator, state in zip(generators, values.from_bytes(captured) if captured else (), strict=True):
        set_state_of(generator, state)


def is_generator(value: Any) -> bool:
    """True for objects whose state `capture` can keep."""
    if isinstance(value, (torch.Generator, random.Random)):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def state_of(generator: Any) -> Any:
    """The state of one generator object (see `is_generator`)."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_state_of(generator: Any, state: Any) -> None:
    """Put back what `state_of` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)

"""One object's state as plain values, taken and put back: schedulers, scalers, generators, dicts.

Anything with state_dict/load_state_dict, any host random generator, and dicts of the user's own
counters. Values are copies: what happens to the object afterwards does not change them.
"""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import Tensor

from keepstep.errors import UsageError
from keepstep.trainer import values
from keepstep.trainer.adapters import rng

MAX_TENSOR_BYTES = 16 << 20  # of one object: it is copied at every step
IMMUTABLE = frozenset({type(None), bool, int, float, str, bytes})


def copied(value: Any) -> Any:
    """A copy that shares neither containers nor tensors with `value`."""
    if type(value) in IMMUTABLE:  # the usual case, many times a step
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        items = [copied(item) for item in value]
        if type(value) in (list, tuple):
            return type(value)(items)
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, collections.defaultdict):
        return collections.defaultdict(
            value.default_factory, {key: copied(item) for key, item in value.items()}
        )
    if isinstance(value, dict):
        items_ = {key: copied(item) for key, item in value.items()}
        return items_ if type(value) is dict else type(value)(items_)
    if isinstance(value, (set, bytearray, collections.deque)) or hasattr(value, "__array_interface__"):
        return value.copy()
    return value


def refuse_stateless(name: str, value: Any) -> None:
    """Raises UsageError, by name, when `value` has no state that could be kept."""
    if isinstance(value, (dict, Tensor)) or rng.is_generator(value):
        return
    has = [hasattr(value, method) for method in ("state_dict", "load_state_dict")]
    if not any(has):
        raise UsageError(
            f"run.protect({name}=...): a {type(value).__name__} has no state that could be kept: give it "
            "state_dict() and load_state_dict(), or protect a dict of its numbers"
        )
    if not all(has):
        missing = "load_state_dict" if has[0] else "state_dict"
        raise UsageError(f"run.protect({name}=...): {type(value).__name__} has no {missing}()")


def take(value: Any) -> Any:
    """The state of one object, as copies."""
    if isinstance(value, (dict, Tensor)):
        return copied(value)
    if isinstance(value, torch.Generator):
        return value.get_state()
    if rng.is_generator(value):
        return rng.state_of(value)
    return copied(value.state_dict())


def give(value: Any, state: Any) -> None:
    """Put `state` back into the very object; `state` stays as it is."""
    if isinstance(value, Tensor):
        with torch.no_grad():
            value.copy_(state)
    elif isinstance(value, dict):
        kept = copied(state)
        value.clear()
        value.update(kept)
    elif rng.is_generator(value):
        rng.set_state_of(value, state)
    else:
        value.load_state_dict(copied(state))


def refuse_unpackable(name: str, state: Any) -> None:
    """Raises UsageError, by name, when a state holds code or unknown objects, or is too large for every step."""
    try:
        _, tensors = values.pack(state)
    except values.UnpackableError as error:
        where = f"{name}: {error.path} " if error.path else f"{name} "
        raise UsageError(
            f"{where}holds a {error.type_name}, which cannot be kept: leave it out of state_dict() "
            "(functions and objects are rebuilt by the script, only their data moves)"
        ) from None
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if size_bytes > MAX_TENSOR_BYTES:
        raise UsageError(
            f"{name} holds {size_bytes >> 20} MiB of tensors, which would be copied at every step: keep them as buffers "
            "of an nn.Module and protect that"
        )

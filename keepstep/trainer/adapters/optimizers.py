"""What one optimizer holds besides its parameters: group values, and state made for a copy to be received."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from keepstep.trainer.adapters import stateful
from keepstep.trainer.adapters.tensors import dtype_named, in_memory_order, local_part


def group_values(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Copies of everything in `param_groups` but the parameters."""
    copied, immutable = stateful.copied, stateful.IMMUTABLE  # at every step, and nearly all are immutable
    return [
        {
            key: value if type(value) in immutable else copied(value)
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def load_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Put one group's values back; tensors are written in place."""
    for key in [key for key in group if key != "params" and key not in saved]:
        del group[key]
    for key, value in saved.items():
        held = group.get(key)
        if isinstance(held, Tensor) and isinstance(value, Tensor) and held.shape == value.shape:
            with torch.no_grad():
                held.copy_(value)  # a learning rate in a tensor: compiled code holds the very object
        else:
            group[key] = stateful.copied(value)


def new_state(
    group: Mapping[str, Any], parameter: Tensor, key: str, dtype: str, shape: tuple[int, ...]
) -> Tensor:
    """An uninitialised-by-anyone state tensor as the optimizer itself would have made it."""
    wanted = dtype_named(dtype)
    if tuple(in_memory_order(local_part(parameter)).shape) == tuple(shape) and key != "step":
        return torch.zeros_like(parameter, dtype=wanted, requires_grad=False)
    on_device = bool(group.get("capturable") or group.get("fused"))
    device = parameter.device if shape or on_device else torch.device("cpu")
    return torch.zeros(shape, dtype=wanted, device=device)

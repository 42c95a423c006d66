"""What `run.protect` cannot keep, refused by name and with the cure, before training begins."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.swa_utils import AveragedModel

from keepstep.errors import UsageError
from keepstep.trainer.adapters.tensors import storage_key

_EMPTY = types.CellType()


def refuse_empty_module(name: str, module: nn.Module) -> None:
    """Raises UsageError for a module without parameters and buffers."""
    if next(module.parameters(), None) is None and next(module.buffers(), None) is None:
        raise UsageError(
            f"run.protect({name}=...): this {type(module).__name__} has neither parameters nor buffers: nothing to keep"
        )


def refuse_optimizer(name: str, optimizer: Optimizer) -> None:
    """Raises UsageError for optimizers whose step cannot be repeated or whose state has no twin."""
    if isinstance(optimizer, LBFGS):
        raise UsageError(
            f"run.protect({name}=...): LBFGS evaluates the model several times in one step, which cannot be served "
            "again as a whole; use an optimizer with one evaluation per step"
        )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise UsageError(
            f"run.protect({name}=...): every rank of ZeroRedundancyOptimizer holds another part of its state and no "
            "rank has a twin; shard with fully_shard over a 2-D mesh (HSDP) instead"
        )


def refuse_untrained(modules: Mapping[str, nn.Module], optimizers: Mapping[str, Optimizer]) -> None:
    """Raises UsageError when a trainable parameter is in no protected optimizer: that one's state would be lost."""
    trained: set[Any] = set()
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                trained |= {id(parameter), storage_key(parameter)}
    for prefix, module in modules.items():
        if isinstance(module, AveragedModel):
            continue  # follows another model's parameters, by no optimizer
        for name, parameter in module.named_parameters(prefix):
            if not parameter.requires_grad or id(parameter) in trained or storage_key(parameter) in trained:
                continue
            raise UsageError(
                f"{name} is trainable, but no protected optimizer holds it: the state of its optimizer would be lost. "
                "Name that optimizer in run.protect(), or call requires_grad_(False) when nothing trains it"
            )


def refuse_optimizer_in_backward(optimizers: Mapping[str, Optimizer]) -> None:
    """Raises UsageError when updates happen during backward, before all gradients are known to be complete."""
    for name, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
                if getattr(parameter, "_in_backward_optimizers", None) or any(map(_steps, hooks.values())):
                    raise UsageError(
                        f"{name} is stepped during backward (by a hook on its parameters): such an update cannot be "
                        "held back until every rank is known to be alive; call optimizer.step() after backward"
                    )


def _steps(hook: Callable[..., Any]) -> bool:
    """Whether a hook's code, or what it closes over, steps an optimizer."""
    if isinstance(hook, functools.partial):
        return _steps(hook.func) or any(isinstance(value, Optimizer) for value in hook.args)
    hook = getattr(hook, "__func__", hook)
    code = getattr(hook, "__code__", None)
    if code is None:
        return False
    cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or () if cell != _EMPTY]
    return "step" in code.co_names or any(isinstance(value, Optimizer) for value in cells)

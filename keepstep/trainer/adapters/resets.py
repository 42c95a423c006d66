"""Makes DDP and FSDP2 wrappers usable again after a step that was poisoned or left by an exception.

DDP's reducer still waits for the gradients of the lost backward and raises in the next forward; FSDP2
raises nothing and computes wrong losses from then on. Call `reset` on **all** ranks, a replacement
included, and only after all in-flight Work is drained: an old all-reduce writes into reused buckets.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


def find_wrappers(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """DDP modules and FSDP2 roots within `modules`, each once, outermost first."""
    found: list[nn.Module] = []
    beneath: set[int] = set()  # FSDP modules that belong to a root already found
    for top in modules:
        for module in top.modules():
            if id(module) in beneath:
                continue
            if isinstance(module, FSDPModule):
                assert isinstance(module, nn.Module)
                beneath |= {id(part) for part in module.modules() if isinstance(part, FSDPModule)}
                found.append(module)
            elif isinstance(module, DistributedDataParallel) and module not in found:
                found.append(module)
    return found


def reset(modules: Iterable[nn.Module]) -> None:
    """Forget the lost step in every wrapper within `modules`; idempotent.

    Gradients of FSDP2 parameters that the step had accumulated are gone, `.grad` is left alone.
    """
    for wrapper in find_wrappers(modules):
        if isinstance(wrapper, DistributedDataParallel):
            _reset_ddp(wrapper)
        else:
            assert isinstance(wrapper, FSDPModule)
            _reset_fsdp(wrapper)


def _reset_ddp(wrapper: DistributedDataParallel) -> None:
    """Buckets are rebuilt in the next iterations, on all ranks alike: their layout decides the rounding."""
    wrapper._update_process_group(wrapper.process_group)
    # Whether the next forward sends buffers round: False behind a micro-batch under no_sync(), and then a replacement,
    # which stands before a step's first one, would wait for buffers that nobody sends.
    wrapper.require_forward_param_sync = True


def _reset_fsdp(root: FSDPModule) -> None:
    state = root._get_fsdp_state()
    if state._is_root is None:
        return  # never ran: nothing to forget, and its root is not known yet
    root.reset_iter_state()
    # What the public method forgets (torch 2.13): gradients of the lost step on unsharded parameters.
    assert isinstance(root, nn.Module)
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

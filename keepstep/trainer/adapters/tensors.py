"""Local parts of tensors: what of a (distributed) tensor lies in this process, and who shares its bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter


def local_part(tensor: Tensor) -> Tensor:
    """The bytes that this rank holds, as a detached tensor over the same storage."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
        if hasattr(tensor, "elem"):  # an asynchronous collective's result, waited for by its first use
            tensor = tensor.view_as(tensor)
    return tensor.detach()


def in_memory_order(tensor: Tensor) -> Tensor:
    """The tensor with its dimensions permuted as they lie in memory: contiguous for channels_last, no copy."""
    if tensor.is_contiguous():
        return tensor
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim))
    permuted = tensor.permute(order)
    return permuted if permuted.is_contiguous() else tensor


def storage_key(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors over the same bytes; empty tensors are equal to themselves only."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if part.numel() == 0 or part.device.type == "meta":
        return ("empty", id(tensor))
    return (part.data_ptr(), part.numel() * part.element_size(), part.device)


def version(tensor: Tensor) -> int:
    """Counts changes in place; -1 for inference tensors, which cannot be watched."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return -1 if part.is_inference() else part._version


def versions(tensors: list[Tensor]) -> list[int]:
    """`version` of each; most tensors are plain ones, and a step asks twice."""
    try:
        return [tensor._version if type(tensor) is Parameter else version(tensor) for tensor in tensors]
    except RuntimeError:  # an inference tensor has none
        return [version(tensor) for tensor in tensors]


def dtype_named(name: str) -> torch.dtype:
    """`float32` or `torch.float32`. Raises KeyError for anything else."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise KeyError(name)
    return dtype

"""A CPU tensor's own memory as a memoryview, so that sockets read and write it without a copy."""

from __future__ import annotations

import ctypes

import torch


def view(tensor: torch.Tensor, name: str = "tensor") -> memoryview:
    """The tensor's bytes, writable, no copy; the view keeps the tensor's memory alive.

    Raises ValueError, naming `name`, when the tensor is not plain contiguous CPU memory.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ValueError(f"{name}: no plain CPU memory ({tensor.device}, {tensor.layout}); stage it")
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{name}: not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}); stage it"
        )
    if tensor.nbytes == 0:
        return memoryview(b"")
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor.untyped_storage()  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def is_viewable(tensor: torch.Tensor) -> bool:
    """Whether `view` takes the tensor."""
    plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return plain and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()

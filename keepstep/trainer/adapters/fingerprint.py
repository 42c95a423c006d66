"""Digests of tensors over dtype, shape and bytes: to compare ranks and runs without their bytes."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from keepstep.trainer.adapters.tensors import local_part

_DIGEST_BYTES = 16
_CHUNK_BYTES = 64 << 20  # bounds the copy of a tensor that lies on a device or is not contiguous


def digest(tensor: Tensor) -> str:
    """32 hex characters over dtype, local shape and the local part's bytes in logical order."""
    part = local_part(tensor)
    hasher = hashlib.blake2b(f"{part.dtype} {tuple(part.shape)} ".encode(), digest_size=_DIGEST_BYTES)
    flat = part.reshape(-1) if part.is_contiguous() else part.contiguous().reshape(-1)
    for chunk in flat.split(max(1, _CHUNK_BYTES // max(1, flat.element_size()))) if flat.numel() else ():
        _add_bytes(hasher, chunk)
    return hasher.hexdigest()


def _add_bytes(hasher: hashlib.blake2b, flat: Tensor) -> None:
    """Hash the memory of a flat tensor, without a copy when it lies on the host."""
    host = flat.to("cpu").resolve_conj().resolve_neg()
    size_bytes = host.numel() * host.element_size()
    hasher.update((ctypes.c_char * size_bytes).from_address(host.data_ptr()))


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """`digest` of each tensor."""
    with torch.no_grad():
        return {name: digest(tensor) for name, tensor in tensors.items()}


def combined(digests_: Mapping[str, str]) -> str:
    """One digest over names and digests, whatever their order."""
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(digests_):
        hasher.update(f"{name}={digests_[name]}\n".encode())
    return hasher.hexdigest()

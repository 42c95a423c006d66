"""Digests of tensors: dtype, shape and bytes, without numpy. (being written)"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def digest(tensor: Tensor) -> str:
    """32 hex characters over dtype, local shape and bytes."""
    raise NotImplementedError


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """`digest` of each."""
    raise NotImplementedError


def combined(digests_: Mapping[str, str]) -> str:
    """One digest over names and digests, independent of order."""
    raise NotImplementedError

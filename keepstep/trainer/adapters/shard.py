"""Which bytes a rank must hold, told from structure alone. (being written)"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def shard_identity(tensors: Mapping[str, Tensor]) -> str:
    """Hex digest: equal at replicas, different for other shards or pipeline stages."""
    raise NotImplementedError


def describe(tensors: Mapping[str, Tensor]) -> str:
    """The same in words, for people."""
    raise NotImplementedError

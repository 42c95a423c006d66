"""Turns a built spare from one rank into another of the same shape, in place. (being written)"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import nn


class ElasticGroup(Protocol):
    """What re-ranking needs of a process group that the script made."""

    ranks: list[int]

    def set_rank(self, group_rank: int, ranks: list[int]) -> None: ...


class Reranker:
    """Finds at construction (slow, when the spare parks) what `apply` changes later (fast)."""

    def __init__(self, groups: Sequence[ElasticGroup], modules: Iterable[nn.Module] = ()) -> None:
        raise NotImplementedError

    def check(self, old_rank: int, new_rank: int) -> None:
        """Raise UsageError when the shapes of the two ranks differ."""
        raise NotImplementedError

    def apply(self, old_rank: int, new_rank: int) -> None:
        """Turn this process from `old_rank` into `new_rank`. Raises UsageError."""
        raise NotImplementedError

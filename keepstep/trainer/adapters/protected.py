"""The state that `run.protect` keeps alive: what it is called, and how it is read and put back. (being written)"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

Spec = Mapping[str, tuple[str, tuple[int, ...]]]


class Protected:
    """Everything that the script protects, under stable names."""

    modules: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    others: dict[str, Any]  # replicated: the same on every rank
    per_rank: dict[str, Any]  # one copy: belongs into this rank's record

    def add(self, /, **objects: Any) -> None:
        """Protect objects that every replica holds alike. Raises UsageError, by name."""
        raise NotImplementedError

    def add_per_rank(self, /, **objects: Any) -> None:
        """Protect objects that only this rank holds. Raises UsageError, by name."""
        raise NotImplementedError

    def check(self) -> None:
        """Refuse what cannot be kept (call once, when training begins). Raises UsageError."""
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Every replicated tensor under its name: parameters, optimizer state, buffers; local parts."""
        raise NotImplementedError

    def spec(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, local shape) of `tensors()`, for `ensure` on another worker."""
        raise NotImplementedError

    def ensure(self, spec: Spec) -> None:
        """Create missing and drop superfluous optimizer state, so that a copy can be received in place."""
        raise NotImplementedError

    def values(self) -> dict[str, Any]:
        """Replicated state that is no tensor of `tensors()`: plain values (see `plain.pack`)."""
        raise NotImplementedError

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Put back what `values()` returned, into the live objects."""
        raise NotImplementedError

    def per_rank_values(self) -> dict[str, Any]:
        """State of the objects that only this rank holds: copies, plain values and small tensors."""
        raise NotImplementedError

    def load_per_rank_values(self, values: Mapping[str, Any]) -> None:
        """Put back what `per_rank_values()` returned."""
        raise NotImplementedError

    def buffers(self) -> dict[str, Tensor]:
        """All module buffers by name (BatchNorm's running statistics differ per rank: record them)."""
        raise NotImplementedError

    def watch_mutations(self) -> None:
        """Remember the versions of parameters and buffers: call at the start of a step's block."""
        raise NotImplementedError

    def mutated_before_gate(self) -> list[str]:
        """Names of parameters and buffers that changed in place since `watch_mutations()`."""
        raise NotImplementedError

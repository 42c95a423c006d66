"""What ranks tell each other while setting up and is no tensor state, kept to be told again.

A run id by broadcast_object_list, a pipeline's shapes: a replacement, which rehearses alone, could
not guess them. Every rank keeps the small non-float outputs of its setup's collectives; whoever
takes that rank gets them replayed in the same order. Float tensors are state: the transfer brings
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from keepstep.trainer import values

MAX_TENSOR_BYTES = 1 << 20
MAX_JOURNAL_BYTES = 8 << 20


def _eligible(tensor: torch.Tensor) -> bool:
    size = tensor.numel() * tensor.element_size()
    return not tensor.is_floating_point() and not tensor.is_complex() and size <= MAX_TENSOR_BYTES


def outputs_of(name: str, arguments: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that collective `name` writes, flat, in the order of its arguments."""
    if not arguments or name in ("send", "barrier", "reduce", "scatter_object"):
        return []
    first = arguments[0]
    if isinstance(first, torch.Tensor):
        return [first]
    flat: list[torch.Tensor] = []
    for item in first or []:
        flat.extend([item] if isinstance(item, torch.Tensor) else item)
    return flat


class Journal:
    """Keeps (live setup) or replays (rehearsal) the small outputs, by group and collective."""

    def __init__(self) -> None:
        self._entries: dict[str, deque[list[torch.Tensor]]] = {}
        self._bytes = 0
        self.overflowed = False
        self.groups: list[str] = []  # keys of the rank's groups, in the order of their making

    def keep(self, group_key: str, name: str, outputs: Sequence[torch.Tensor]) -> None:
        """Note the outputs of one finished collective; floats and large tensors are left out."""
        kept = [tensor.detach().cpu().clone() if _eligible(tensor) else torch.empty(0) for tensor in outputs]
        if not any(tensor.numel() for tensor in kept):
            return
        self._bytes += sum(tensor.numel() * tensor.element_size() for tensor in kept)
        if self._bytes > MAX_JOURNAL_BYTES:
            self.overflowed = True
            return
        self._entries.setdefault(f"{group_key}/{name}", deque()).append(kept)

    def replay(self, group_key: str, name: str, outputs: Sequence[torch.Tensor]) -> bool:
        """Write the next kept outputs of this collective; False when there is nothing to replay."""
        if not any(_eligible(tensor) for tensor in outputs):
            return False
        waiting = self._entries.get(f"{group_key}/{name}")
        if not waiting:
            return False
        with torch.no_grad():
            for output, kept in zip(outputs, waiting.popleft(), strict=False):
                if kept.numel() and kept.numel() == output.numel():
                    output.copy_(kept.view(output.shape))
        return True

    def to_bytes(self) -> bytes:
        """The journal as it is handed to the agent."""
        entries = {key: list(kept) for key, kept in self._entries.items()}
        return values.to_bytes({"groups": self.groups, "entries": entries})

    @classmethod
    def from_bytes(cls, data: bytes) -> Journal:
        """The inverse of `to_bytes`."""
        journal = cls()
        content = values.from_bytes(data)
        journal.groups = content["groups"]
        journal._entries = {key: deque(kept) for key, kept in content["entries"].items()}
        return journal

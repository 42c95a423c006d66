"""Tensors whose memory no socket can reach (GPU, not contiguous): a copy on the way out, and on the way in.

Only such tensors cost extra memory, each its own size; all others pass through `buffers.view`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from keepstep.transfer.buffers import is_viewable, view


def outgoing(tensor: torch.Tensor, name: str = "tensor") -> memoryview:
    """The tensor's bytes for a source: its own memory, or a contiguous CPU copy made now."""
    plain = tensor.detach()
    if not is_viewable(plain):
        plain = plain.to("cpu").resolve_conj().resolve_neg().contiguous()
    return view(plain, name)


class Landing:
    """Where a target's bytes arrive: the tensors' own memory, or a staging copy until `land`."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.views: list[memoryview] = []
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        for tensor in tensors:
            plain = tensor.detach()
            if not is_viewable(plain):
                stage = torch.empty(plain.shape, dtype=plain.dtype)
                self._staged.append((plain, stage))
                plain = stage
            self.views.append(view(plain))

    @property
    def staged_bytes(self) -> int:
        """Extra memory held until `land`, in bytes."""
        return sum(stage.nbytes for _, stage in self._staged)

    def land(self) -> None:
        """Move what arrived in staging into the tensors, and let the staging go."""
        while self._staged:
            tensor, stage = self._staged.pop()
            tensor.copy_(stage)

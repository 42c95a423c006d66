"""What a source says of its state: the manifest with the tensors' memory, and sums by which two states compare."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from keepstep.trainer import rng, values
from keepstep.transfer import Manifest, TensorSpec
from keepstep.transfer.checksum import checksum
from keepstep.transfer.staging import outgoing

if TYPE_CHECKING:
    from keepstep.trainer.session import Session


def manifest_of(
    session: Session,
    cursor: dict[str, Any] | None,
    closed_gates: int,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    extra: Mapping[str, Any] | None = None,
    lineage: str | None = None,
) -> tuple[Manifest, list[memoryview]]:
    """This worker's state (or only `tensors` of it) with its values, and the memory of each tensor, in order.

    `extra`: more values. `lineage`: its digest, where it is not the machine's own.
    """
    held = session.protected.tensors() if tensors is None else tensors
    content = {
        "values": session.protected.values(),
        "cursor": cursor,
        "closed": closed_gates,
        "rng": rng.capture(),
        **(extra or {}),
    }
    manifest = Manifest(
        tensors=tuple(
            TensorSpec(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                bytes=tensor.numel() * tensor.element_size(),
            )
            for name, tensor in held.items()
        ),
        values=values.to_bytes(content),
        step=session.machine.step_count,
        lineage=session.machine.lineage.digest if lineage is None else lineage,
    )
    return manifest, [outgoing(tensor, name) for name, tensor in held.items()]


def sums_of(session: Session) -> dict[str, int]:
    """A checksum of every protected tensor, and one of the values: equal for equal state."""
    sums = {name: checksum(outgoing(tensor, name)) for name, tensor in session.protected.tensors().items()}
    return {**sums, "": zlib.crc32(values.to_bytes(session.protected.values()))}

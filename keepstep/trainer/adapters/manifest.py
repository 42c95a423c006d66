"""What a rank's state consists of, part by part: sizes, names, which bytes, and digests to hold against twins'.

Names are bounded to the largest tensors. It does not know where twins are: equal identities say so.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from keepstep.core.replicas import PER_RANK
from keepstep.core.types import StatePart
from keepstep.trainer import values
from keepstep.trainer.adapters.fingerprint import combined, digest, digests
from keepstep.trainer.adapters.protected import Protected
from keepstep.trainer.adapters.shard import held
from keepstep.trainer.adapters.tensors import in_memory_order, local_part

PARAMETERS, OPTIMIZER, BUFFERS, VALUES = "parameters", "optimizer state", "buffers", "values"
REST = "random state and place in the data"
MOST_NAMES = 24
SAMPLED_BYTES = 64 << 10


class Manifest:
    """The state of this rank at one moment, sorted by part. `own_buffers`: those that differ per rank."""

    def __init__(self, protected: Protected, own_buffers: Collection[str], record_bytes: int = 0) -> None:
        """`record_bytes`: size of this rank's record."""
        self._protected = protected
        self._record_bytes = record_bytes
        buffers = protected.buffers()
        own = set(own_buffers)
        owned = {tensor.data_ptr() for name, tensor in buffers.items() if name in own and tensor.numel()}
        self._own = {name: tensor for name, tensor in buffers.items() if name in own}
        self._parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in protected.whole_tensors().items():
            if local_part(tensor).data_ptr() in owned and tensor.numel():
                continue
            self._parts.setdefault(self._part_of(name, buffers), {})[name] = tensor

    def _part_of(self, name: str, buffers: Mapping[str, Tensor]) -> str:
        if name in buffers:
            return BUFFERS
        if name in self._protected.others:
            return VALUES
        return OPTIMIZER if name.partition("/")[0] in self._protected.optimizers else PARAMETERS

    def parts(self) -> tuple[StatePart, ...]:
        """The parts, replicated ones first."""
        held_parameters = {name: held(tensor) for name, tensor in self._parts.get(PARAMETERS, {}).items()}
        found = []
        for part, tensors in self._parts.items():
            told = {name: held(tensor) for name, tensor in tensors.items()}
            if part == OPTIMIZER:  # its tensors may be plain while the parameters are sharded
                told = {
                    name: f"{text} of {held_parameters.get(_parameter(name))}" for name, text in told.items()
                }
            found.append(self._part(part, told, {name: local_part(t) for name, t in tensors.items()}))
        packed = self._packed_values()
        if packed:
            found = [part for part in found if part.part != VALUES]
            tensors = {name: local_part(t) for name, t in self._parts.get(VALUES, {}).items()}
            found.append(self._part(VALUES, {"": "values"}, tensors, {"values": len(packed)}))
        found.append(self._per_rank())
        return tuple(found)

    def _part(
        self, part: str, told: Mapping[str, str], tensors: Mapping[str, Tensor], more: Mapping[str, int] = {}
    ) -> StatePart:
        hasher = hashlib.blake2b(digest_size=16)
        for name in sorted(told):
            hasher.update(f"{name} {told[name]}\n".encode())
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()} | dict(more)
        dtypes: Counter[str] = Counter()
        for tensor in tensors.values():
            dtypes[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
        if more:
            dtypes["other"] += sum(more.values())
        largest = sorted(sizes, key=lambda name: (-sizes[name], name))[:MOST_NAMES]
        return StatePart(
            part=part,
            identity=hasher.hexdigest(),
            tensors=len(tensors),
            bytes=sum(sizes.values()),
            dtypes=dict(dtypes),
            largest={name[-200:]: sizes[name] for name in largest},
        )

    def _per_rank(self) -> StatePart:
        """What only this rank knows: the same things at every rank, though never the same bytes."""
        more = {
            name: len(values.to_bytes(value)) for name, value in self._protected.per_rank_values().items()
        }
        told = {name: str(tuple(tensor.shape)) for name, tensor in self._own.items()} | dict.fromkeys(
            more, ""
        )
        named = sum(more.values()) + sum(tensor.nbytes for tensor in self._own.values())
        if self._record_bytes > named:
            more[REST] = self._record_bytes - named
        return self._part(PER_RANK, told, self._own, more)

    def _packed_values(self) -> bytes:
        shared: dict[str, Any] = self._protected.values()
        return values.to_bytes(shared) if any(shared.values()) else b""

    def digests(self) -> dict[str, str]:
        """A digest of each part that twins share, long tensors by their ends."""
        found = {}
        with torch.no_grad():
            for part, tensors in self._parts.items():
                sampled: dict[str, str] = {}
                for name, tensor in tensors.items():
                    sampled |= digests(_ends(name, in_memory_order(local_part(tensor))))
                found[part] = combined(sampled)
        packed = self._packed_values()
        if packed:
            data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
            found[VALUES] = combined({"values": digest(data), "tensors": found.get(VALUES, "")})
        return found


def _ends(name: str, tensor: Tensor) -> dict[str, Tensor]:
    flat = tensor.reshape(-1)
    count = max(1, SAMPLED_BYTES // max(1, flat.element_size()))
    if flat.numel() <= 2 * count:
        return {name: flat}
    return {f"{name}/head": flat[:count], f"{name}/tail": flat[-count:]}


def _parameter(name: str) -> str:
    """The parameter that a tensor of optimizer state belongs to."""
    return name.partition("/")[2].rpartition("/")[0]

"""Which bytes a rank must hold, told from structure alone: names, shapes, dtypes, mesh coordinates.

Equal bytes prove nothing (every rank starts with the same ones); the place in a mesh does. Only the
coordinates along sharded dimensions count: ranks that differ in replicated ones are twins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

_DIGEST_BYTES = 16


def shard_identity(tensors: Mapping[str, Tensor]) -> str:
    """32 hex characters: equal at replicas, different for other shards or other pipeline stages.

    Pass the parameters as the optimizer holds them (DTensors, not their local parts).
    """
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name in sorted(tensors):
        hasher.update(f"{name} {held(tensors[name])}\n".encode())
    return hasher.hexdigest()


def held(tensor: Tensor) -> str:
    """Which bytes of a tensor lie here, in words that are equal exactly where the same bytes must lie."""
    spec = _spec_of(tensor)
    if spec is None:
        return f"{tuple(tensor.shape)} {tensor.dtype}"
    text = f"{tuple(spec.shape)} {tensor.dtype}"
    coordinate = spec.mesh.get_coordinate()
    for dim in _sharded_dims(spec):
        place = "outside" if coordinate is None else coordinate[dim]
        text += f" {spec.placements[dim]} {place}/{spec.mesh.size(dim)}"
    return text


def _spec_of(tensor: Tensor) -> DTensorSpec | None:
    """How a tensor is sharded; tensor parallelism inside DDP keeps it beside a plain local tensor."""
    spec = tensor._spec if isinstance(tensor, DTensor) else getattr(tensor, "_st_info", None)
    return spec if isinstance(spec, DTensorSpec) else None


def describe(tensors: Mapping[str, Tensor]) -> str:
    """The same for people: "shard 1 of 2 along mesh dimension 'shard'"; "a whole copy" without shards."""
    places: dict[str, None] = {}
    for tensor in tensors.values():
        if (spec := _spec_of(tensor)) is None:
            continue
        mesh, coordinate = spec.mesh, spec.mesh.get_coordinate()
        for dim in _sharded_dims(spec):
            name = mesh.mesh_dim_names[dim] if mesh.mesh_dim_names else str(dim)
            place = "none" if coordinate is None else coordinate[dim]
            places[f"shard {place} of {mesh.size(dim)} along mesh dimension '{name}'"] = None
    return ", ".join(places) or "a whole copy"


def replica_ranks(tensors: Mapping[str, Tensor], world_size: int) -> tuple[int, ...] | None:
    """Global ranks that hold the same bytes as this one, itself included; None when meshes do not tell.

    Plain tensors count as held by all ranks, which pipeline stages contradict: compare identities then.
    """
    twins = set(range(world_size))
    for tensor in tensors.values():
        if (spec := _spec_of(tensor)) is not None:
            ranks = _twins_in(spec.mesh, _sharded_dims(spec))
            if ranks is None:
                return None
            twins &= ranks
    return tuple(sorted(twins))


def _sharded_dims(spec: DTensorSpec) -> Sequence[int]:
    return [dim for dim, placement in enumerate(spec.placements) if not placement.is_replicate()]


def _twins_in(mesh: DeviceMesh, sharded: Sequence[int]) -> set[int] | None:
    """Ranks of the root mesh that share this rank's coordinates along the sharded dimensions."""
    root = mesh._get_root_mesh()
    here = root.get_coordinate()
    if here is None or mesh.mesh_dim_names is None or root.mesh_dim_names is None:
        if root is not mesh or here is None:
            return None
        root_dims = list(sharded)
    else:
        names = [mesh.mesh_dim_names[dim] for dim in sharded]
        if any(name not in root.mesh_dim_names for name in names):
            return None  # a flattened dimension
        root_dims = [root.mesh_dim_names.index(name) for name in names]
    place: list[Any] = [slice(None)] * root.ndim
    for dim in root_dims:
        place[dim] = here[dim]
    return set(root.mesh[tuple(place)].flatten().tolist())

"""Turns a built spare from one rank into another of the same shape, in place.

Groups, meshes and FSDP remember the rank they were made with. What holds one is found when the spare
parks (a scan of all objects takes up to a second), and changed when it is promoted. DDP and DTensor's
specifications read the rank from their group and mesh. Ranks in the user's own variables are out of
reach: `init(symmetric=True)` promises that there are none, or that `on_rank_change` mends them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from keepstep.errors import UsageError


class ElasticGroup(Protocol):
    """What re-ranking needs of a process group that the script made."""

    ranks: list[int]  # global ranks, by group rank

    def set_rank(self, group_rank: int, ranks: list[int]) -> None:
        """Be `group_rank` of the group of these global ranks from now on."""


class Reranker:
    """Finds at construction (slow, when the spare parks) what `apply` changes later (fast)."""

    def __init__(self, groups: Sequence[ElasticGroup], modules: Iterable[nn.Module] = ()) -> None:
        """`modules`: what the spare built; the local shapes of its sharded parameters are compared."""
        self._groups = list(groups)
        objects = gc.get_objects()  # `type`, since isinstance wakes up lazy modules and proxies
        self._meshes = [found for found in objects if issubclass(type(found), DeviceMesh)]
        self._mesh_infos = [found for found in objects if issubclass(type(found), DataParallelMeshInfo)]
        self._specs = {
            (tuple(tensor.shape), id(tensor.device_mesh), tensor.placements): tensor
            for module in modules
            for tensor in module.parameters()
            if isinstance(tensor, DTensor)
        }
        # Root meshes are read as tensors now: `DeviceMesh.mesh` costs tens of microseconds each time.
        self._layouts = {id(mesh): _full_layout(mesh) for mesh in self._meshes}

    def check(self, old_rank: int, new_rank: int) -> None:
        """Raises UsageError when `new_rank` needs other groups or other local shapes than `old_rank`."""
        self._moves(old_rank, new_rank)
        self._check_shapes(old_rank, new_rank)

    def apply(self, old_rank: int, new_rank: int) -> None:
        """Turn this process from `old_rank` into `new_rank`; nothing is changed when it raises UsageError."""
        if old_rank == new_rank:
            return
        moves = self._moves(old_rank, new_rank)
        self._check_shapes(old_rank, new_rank)
        for group, ranks in moves:
            group.set_rank(ranks.index(new_rank), ranks)
            _remember_ranks(group, ranks)
        for mesh in self._meshes:
            mesh._rank = new_rank
            mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()
        for info in self._mesh_infos:
            if isinstance(info, FSDPMeshInfo):
                info.shard_mesh_rank = info.shard_process_group.rank()
            if isinstance(info, DDPMeshInfo):
                info.replicate_mesh_rank = info.replicate_process_group.rank()

    # ---- groups ---------------------------------------------------------------------------------

    def _moves(self, old: int, new: int) -> list[tuple[ElasticGroup, list[int]]]:
        return [(group, self._ranks_after(group.ranks, old, new)) for group in self._groups]

    def _ranks_after(self, ranks: list[int], old: int, new: int) -> list[int]:
        """The group that plays the part for `new` which the group of `ranks` plays for `old`."""
        if new in ranks:
            return ranks
        candidates = {
            tuple(moved)
            for layout in self._layouts.values()
            if (moved := _slice_after(layout, ranks, new)) is not None
        }
        if len(candidates) != 1:
            raise UsageError(
                f"a spare built as rank {old} cannot become rank {new}: which group it needs in place of the group of "
                f"ranks {ranks} cannot be told (make groups with init_device_mesh, or use init(symmetric=False))"
            )
        return list(candidates.pop())

    # ---- shapes ---------------------------------------------------------------------------------

    def _check_shapes(self, old: int, new: int) -> None:
        for (shape, _, placements), tensor in self._specs.items():
            layout = _layout_of(tensor.device_mesh)
            shapes = [_local_shape(shape, layout, rank, placements) for rank in (old, new)]
            if shapes[0] != shapes[1]:
                raise UsageError(
                    f"a spare built as rank {old} cannot become rank {new}: of a tensor of shape {shape} they hold "
                    f"{shapes[0]} and {shapes[1]}; make the dimension a multiple of the number of shards, or use "
                    "init(symmetric=False)"
                )


def _full_layout(mesh: DeviceMesh) -> Tensor:
    """The ranks of a mesh's whole root, whichever part of it contains this process."""
    root = mesh._get_root_mesh()
    return root._layout.remap_to_tensor(root._rank_map)[0]


def _layout_of(mesh: DeviceMesh) -> Tensor:
    """All copies of a (sub)mesh within its root: shape (copies, *mesh.shape)."""
    return mesh._layout.remap_to_tensor(mesh._rank_map)


def _local_shape(shape: Any, layout: Tensor, rank: int, placements: Any) -> tuple[int, ...] | None:
    place = (layout == rank).nonzero()
    if len(place) != 1:
        return None
    coordinate = place[0].tolist()[1:]
    local, _ = _compute_local_shape_and_global_offset(
        shape, tuple(layout.shape[1:]), coordinate, placements, skip_offset=True
    )
    return tuple(local)


def _slice_after(layout: Tensor, ranks: Sequence[int], new: int) -> list[int] | None:
    """Move a slice of a mesh along its fixed dimensions to where `new` stands; None when it is no slice."""
    places = {int(rank): place for place, rank in _enumerated(layout).items()}
    if new not in places or any(rank not in places for rank in ranks):
        return None
    held = [places[rank] for rank in ranks]
    varying = [dim for dim in range(layout.ndim) if len({place[dim] for place in held}) > 1]
    size = 1
    for dim in varying:
        size *= layout.shape[dim]
    if size != len(ranks):
        return None
    target = places[new]
    return [
        int(layout[tuple(place[dim] if dim in varying else target[dim] for dim in range(layout.ndim))])
        for place in held
    ]


def _enumerated(layout: Tensor) -> Mapping[tuple[int, ...], int]:
    places = torch.cartesian_prod(*(torch.arange(size) for size in layout.shape)).reshape(-1, layout.ndim)
    return {
        tuple(place): int(rank)
        for place, rank in zip(places.tolist(), layout.flatten().tolist(), strict=True)
    }


def _remember_ranks(group: Any, ranks: Sequence[int]) -> None:
    known = dist.distributed_c10d._world.pg_group_ranks
    if group in known:
        known[group] = {rank: position for position, rank in enumerate(ranks)}

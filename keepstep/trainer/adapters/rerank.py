"""Turns a built spare from one rank into another of the same shape, in place.

Groups, meshes and FSDP remember the rank they were made with. What holds one is found when the spare
parks (a scan of all objects takes up to a second), and changed when it is promoted. DDP and DTensor's
specifications read the rank from their group and mesh. Ranks in the user's own variables are out of
reach: `init(symmetric=True)` promises that there are none, or that `on_rank_change` mends them.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
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
        self._sharded = {
            (tuple(tensor.shape), _copies_of(tensor.device_mesh), tensor.placements)
            for module in modules
            for tensor in module.parameters()
            if isinstance(tensor, DTensor)
        }
        self._layouts = list(dict.fromkeys(map(_layout_of_root, self._meshes)))

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
        coordinates: dict[Any, tuple[int, ...] | None] = {}  # FSDP makes many meshes of one layout
        for mesh in self._meshes:
            mesh._rank = new_rank
            key = (mesh._layout, mesh._rank_map.data_ptr())
            if key not in coordinates:
                coordinates[key] = mesh._compute_coordinate_on_dim()
            mesh._coordinate_on_dim = coordinates[key]
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
            tuple(moved) for layout in self._layouts if (moved := layout.slice_after(ranks, new)) is not None
        }
        if len(candidates) != 1:
            raise UsageError(
                f"a spare built as rank {old} cannot become rank {new}: which group it needs in place of the group of "
                f"ranks {ranks} cannot be told (make groups with init_device_mesh, or use init(symmetric=False))"
            )
        return list(candidates.pop())

    # ---- shapes ---------------------------------------------------------------------------------

    def _check_shapes(self, old: int, new: int) -> None:
        for shape, copies, placements in self._sharded:
            shapes = [_local_shape(shape, copies, rank, placements) for rank in (old, new)]
            if shapes[0] != shapes[1]:
                raise UsageError(
                    f"a spare built as rank {old} cannot become rank {new}: of a tensor of shape {shape} they hold "
                    f"{shapes[0]} and {shapes[1]}; make the dimension a multiple of the number of shards, or use "
                    "init(symmetric=False)"
                )


@dataclass(frozen=True)
class _Layout:
    """Where each rank stands in a whole mesh."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]  # row by row

    @functools.cached_property
    def places(self) -> dict[int, tuple[int, ...]]:
        everywhere = itertools.product(*(range(size) for size in self.shape))
        return dict(zip(self.ranks, everywhere, strict=True))

    @functools.cached_property
    def by_place(self) -> dict[tuple[int, ...], int]:
        return {place: rank for rank, place in self.places.items()}

    def slice_after(self, ranks: Sequence[int], new: int) -> list[int] | None:
        """Move a slice of the mesh along its fixed dimensions to where `new` stands; None when it is no slice."""
        if new not in self.places or any(rank not in self.places for rank in ranks):
            return None
        held = [self.places[rank] for rank in ranks]
        varying = [len({place[dim] for place in held}) > 1 for dim in range(len(self.shape))]
        if len(ranks) != math.prod(itertools.compress(self.shape, varying)):
            return None
        target = self.places[new]
        return [
            self.by_place[
                tuple(own if free else fixed for own, fixed, free in zip(place, target, varying, strict=True))
            ]
            for place in held
        ]


def _layout_of_root(mesh: DeviceMesh) -> _Layout:
    """The ranks of a mesh's whole root, whichever part of it contains this process."""
    root = mesh._get_root_mesh()
    whole = root._layout.remap_to_tensor(root._rank_map)[0]
    return _Layout(tuple(whole.shape), tuple(whole.flatten().tolist()))


def _copies_of(mesh: DeviceMesh) -> _Layout:
    """All copies of a (sub)mesh within its root: dimensions (copies, *mesh.shape)."""
    copies = mesh._layout.remap_to_tensor(mesh._rank_map)
    return _Layout(tuple(copies.shape), tuple(copies.flatten().tolist()))


def _local_shape(shape: Any, copies: _Layout, rank: int, placements: Any) -> tuple[int, ...] | None:
    """What `rank` holds of a tensor of global `shape`; None outside of the mesh."""
    if rank not in copies.places:
        return None
    local, _ = _compute_local_shape_and_global_offset(
        shape, copies.shape[1:], list(copies.places[rank][1:]), placements, skip_offset=True
    )
    return tuple(local)


def _remember_ranks(group: Any, ranks: Sequence[int]) -> None:
    known = dist.distributed_c10d._world.pg_group_ranks
    if group in known:
        known[group] = {rank: position for position, rank in enumerate(ranks)}

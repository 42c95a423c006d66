"""The pieces of PyTorch that protection leans on and PyTorch promises nobody: one list, each checked by name.

`missing()` is cheap and done by `keepstep.init`; `try_out()` uses them for real, in a world of one rank
(`keepstep doctor`, or `python -m keepstep.trainer.torch_pieces`). A missing piece switches protection off,
never training: nothing here imports what may be missing.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

SUPPORTED = "2.13"

_FSDP = "torch.distributed.fsdp._fully_shard"
_MESH = "torch.distributed.device_mesh.DeviceMesh"
_DIST = "torch.distributed"
_LOADER = "torch.utils.data"

GROUPS = "elastic process groups"
FREE = "freeing a blocked rank"
RESET = "using the model again after a lost step"
SHARDS = "telling which ranks are twins"
RERANK = "turning a hot spare into another rank"
GATE = "the gate before optimizer.step()"
LOADERS = "loader workers that die"
REDO = "serving a step again"

# Dotted name -> what for. A name that cannot be reached is missing.
PIECES: dict[str, str] = {
    f"{_DIST}.ProcessGroup": GROUPS,
    f"{_DIST}.ProcessGroup._register_backend": GROUPS,
    f"{_DIST}.ProcessGroup._set_default_backend": GROUPS,
    f"{_DIST}.ProcessGroup.BackendType.GLOO": GROUPS,
    f"{_DIST}.ProcessGroup.allreduce": GROUPS,
    f"{_DIST}.ProcessGroup.broadcast": GROUPS,
    f"{_DIST}.ProcessGroup.all_gather_single": GROUPS,
    f"{_DIST}.ProcessGroup.reduce_scatter_single": GROUPS,
    f"{_DIST}.ProcessGroup.all_to_all_single": GROUPS,
    f"{_DIST}.Backend.register_backend": GROUPS,
    f"{_DIST}.distributed_c10d.Work": GROUPS,
    f"{_DIST}.Store": GROUPS,
    f"{_DIST}.PrefixStore": GROUPS,
    f"{_DIST}.ProcessGroupGloo": FREE,
    f"{_DIST}.ProcessGroupGloo.create_device": FREE,
    f"{_DIST}.ProcessGroupGloo._Options": FREE,
    f"{_DIST}.ProcessGroupGloo._set_default_timeout": FREE,
    f"{_DIST}.AllreduceOptions": GATE,
    "torch.optim.optimizer.register_optimizer_step_pre_hook": GATE,
    "torch.amp.GradScaler": GATE,
    "torch.nn.parallel.DistributedDataParallel._update_process_group": RESET,
    f"{_DIST}.fsdp.FSDPModule._get_fsdp_state": RESET,
    f"{_DIST}.fsdp.FSDPModule.reset_iter_state": RESET,
    f"{_FSDP}._fsdp_param.FSDPParam": RESET,
    f"{_FSDP}._fsdp_common.DataParallelMeshInfo": RERANK,
    f"{_FSDP}._fsdp_common.DDPMeshInfo": RERANK,
    f"{_FSDP}._fsdp_common.FSDPMeshInfo": RERANK,
    f"{_DIST}.distributed_c10d._world": RERANK,
    f"{_DIST}.distributed_c10d._world.pg_group_ranks": RERANK,
    f"{_DIST}.tensor._utils._compute_local_shape_and_global_offset": RERANK,
    f"{_MESH}._compute_coordinate_on_dim": RERANK,
    f"{_MESH}._get_root_mesh": SHARDS,
    f"{_MESH}.get_coordinate": SHARDS,
    f"{_DIST}.tensor.DTensor": SHARDS,
    f"{_DIST}.tensor._dtensor_spec.DTensorSpec": SHARDS,
    "torch.Tensor._version": REDO,
    "torch.Tensor.is_inference": REDO,
    "torch.nn.modules.batchnorm._NormBase": REDO,
    "torch.nn.modules.module.register_module_forward_hook": REDO,
    f"{_LOADER}._utils.signal_handling._SIGCHLD_handler_set": LOADERS,
    f"{_LOADER}._utils.signal_handling._remove_worker_pids": LOADERS,
    f"{_LOADER}._utils.MP_STATUS_CHECK_INTERVAL": LOADERS,
    f"{_LOADER}.dataloader._MultiProcessingDataLoaderIter": LOADERS,
    f"{_LOADER}.dataloader._MultiProcessingDataLoaderIter._try_get_data": LOADERS,
    f"{_LOADER}.dataloader._MultiProcessingDataLoaderIter._try_put_index": LOADERS,
    f"{_LOADER}.dataloader._MultiProcessingDataLoaderIter._reset": LOADERS,
}


@dataclass(frozen=True, slots=True)
class Missing:
    """A piece that is not there, or does not do what it should."""

    name: str
    purpose: str
    detail: str


def missing() -> list[Missing]:
    """The pieces of the list that cannot be reached, and those with another signature. Well under 10 ms."""
    found = [Missing(name, purpose, why) for name, purpose in PIECES.items() if (why := _unreachable(name))]
    named = {piece.name for piece in found}
    for name, wanted in (
        (f"{_DIST}.Backend.register_backend", ("extended_api", "devices")),
        (f"{_DIST}.tensor._utils._compute_local_shape_and_global_offset", ("skip_offset",)),
    ):
        if name not in named:
            known = inspect.signature(_reach(name)).parameters
            lacks = [word for word in wanted if word not in known]
            if lacks:
                found.append(Missing(name, PIECES[name], f"takes no {', '.join(lacks)}"))
    return found


def explain(pieces: list[Missing]) -> str:
    """One line: what is missing, what it is for, and which PyTorch to take."""
    first = pieces[0]
    more = f", and {len(pieces) - 1} more" if len(pieces) > 1 else ""
    cure = f"this Keepstep needs PyTorch {SUPPORTED}"
    if torch.__version__.startswith(f"{SUPPORTED}."):
        cure = f"something changed this PyTorch: install torch=={SUPPORTED}.* anew"
    return f"PyTorch {torch.__version__}: {first.name} {first.detail} (for {first.purpose}){more}; {cure}"


def _reach(name: str) -> Any:
    """What a dotted name stands for. Raises AttributeError or ImportError."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for count, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            if not inspect.ismodule(found):
                raise
            found = importlib.import_module(".".join(parts[:count]))
    return found


def _unreachable(name: str) -> str:
    try:
        _reach(name)
    except (AttributeError, ImportError):
        return "is missing"
    return ""


# ---- for real ---------------------------------------------------------------------------------------


def try_out() -> list[Missing]:
    """Use the pieces in a world of one rank: what a name alone cannot promise."""
    uses: dict[str, tuple[str, Callable[[], None]]] = {
        "a ProcessGroup made in Python": (GROUPS, _use_group),
        "DistributedDataParallel on it": (RESET, _use_ddp),
        "a DeviceMesh and its coordinates": (SHARDS, _use_mesh),
        "fully_shard and its state": (RESET, _use_fsdp),
        "a GradScaler's memory": (GATE, _use_scaler),
    }
    found = []
    for name, (purpose, use) in uses.items():
        try:
            use()
        except Exception as error:  # whatever another PyTorch raises is the finding
            first = (str(error).splitlines() or [""])[0]
            found.append(Missing(name, purpose, f"does not work: {type(error).__name__}: {first[:200]}"))
    return found


def _use_group() -> None:
    """As `keepstep.trainer.elastic` does it: torch builds our group, C++ asks it for its rank."""
    from keepstep.trainer.elastic import BACKEND_NAME, Groups, Place, register

    registry = Groups(1)
    registry.settle(place=Place.SETUP, solo=True)
    register(registry, devices=["cpu"])
    dist.init_process_group(BACKEND_NAME, store=dist.HashStore(), rank=0, world_size=1)
    total = torch.ones(1)
    dist.all_reduce(total)
    if float(total) != 1.0 or dist.get_rank() != 0 or not registry.members:
        raise RuntimeError("torch did not use the group that it was given")
    _use_gloo()


def _use_gloo() -> None:
    from keepstep.trainer.gloo import GlooFabric

    fabric = GlooFabric("127.0.0.1")
    if not fabric.endpoints:
        raise RuntimeError("the listener of a gloo device was not found")
    group = fabric.connect(dist.HashStore(), 0, 1, 5.0)
    total = torch.ones(1)
    group.allreduce([total]).wait()
    fabric.cut()


def _use_ddp() -> None:
    from keepstep.trainer.adapters import resets

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    resets.reset([model])


def _use_mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    from keepstep.trainer.adapters import rerank

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    for name in ("_rank", "_layout", "_rank_map", "_coordinate_on_dim"):
        getattr(mesh, name)
    if rerank._layout_of_root(mesh["shard"]).ranks != (0,):
        raise RuntimeError("the ranks of a mesh were not found")


def _use_fsdp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from keepstep.trainer.adapters import resets, shard

    model: Any = torch.nn.Linear(2, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)))
    model(torch.ones(1, 2)).sum().backward()
    resets.reset([model])
    parameter = model._get_fsdp_state()._fsdp_param_groups[0].fsdp_params[0]
    for name in ("unsharded_accumulated_grad", "_unsharded_param"):
        getattr(parameter, name)
    if "shard 0 of 1" not in shard.describe({"weight": model.weight}):
        raise RuntimeError("where a sharded parameter lies was not found")


def _use_scaler() -> None:
    torch.amp.GradScaler("cpu")._per_optimizer_states.clear()


def main() -> int:
    """Print what was found, as JSON. Exit code 0 also when pieces are missing."""
    started_s = time.monotonic()
    found = missing()
    used = not found
    if used:
        found = try_out()
    gpus = []
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    answer = {
        "torch": torch.__version__,
        "supported": SUPPORTED,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "pieces": PIECES,
        "used": used,
        "missing": [{"name": p.name, "purpose": p.purpose, "detail": p.detail} for p in found],
        "line": explain(found) if found else "",
        "seconds": time.monotonic() - started_s,
    }
    print(json.dumps(answer))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

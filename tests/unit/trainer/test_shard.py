"""Twins have one identity, other shards and stages another; a spare can be turned into another rank in place."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.testing._internal.distributed.fake_pg import FakeStore

from keepstep.errors import UsageError
from keepstep.trainer import elastic
from keepstep.trainer.adapters import fingerprint
from keepstep.trainer.adapters.protected import Protected
from keepstep.trainer.adapters.rerank import Reranker
from keepstep.trainer.adapters.shard import describe, replica_ranks, shard_identity

WORLD = 4


def in_child(function, *arguments):
    """Call in a forked process: torch keeps meshes in caches, so a process can be built as one rank only."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def answer():
        try:
            there.send((function(*arguments), None))
        except Exception as error:
            there.send((None, f"{type(error).__name__}: {error}"))

    child = context.Process(target=answer)
    child.start()
    try:
        assert here.poll(60), "the child does not answer"
        result, error = here.recv()
    finally:
        child.kill()
        child.join()
    if error is not None:
        raise UsageError(error)
    return result


@contextmanager
def world(rank, backend="fake"):
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, rank=rank, world_size=WORLD, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def hsdp(features=8):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(features, features), nn.Linear(features, features))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tp_in_ddp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    _pre_dp_module_transform(model)
    return model


def tp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def fsdp():
    return fully_shard(nn.Linear(8, 8))


def stages():
    return nn.ModuleDict({f"layer{dist.get_rank() // 2}": nn.Linear(8, 8)})


def replicated():
    return nn.Linear(8, 8)


MODELS = {build.__name__: build for build in (replicated, hsdp, tp, tp_in_ddp, fsdp, stages)}


def structures(rank):
    found = {}
    for name, build in MODELS.items():
        with world(rank):
            model = build()
            protected = Protected()
            protected.add(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1))
            tensors = protected.parameters()
            found[name] = shard_identity(tensors), describe(tensors), replica_ranks(tensors, WORLD)
    return found


@pytest.fixture(scope="module")
def of_all_ranks():
    return [in_child(structures, rank) for rank in range(WORLD)]


@pytest.mark.parametrize(
    ("name", "groups", "words"),
    [
        ("replicated", [{0, 1, 2, 3}], "a whole copy"),
        ("hsdp", [{0, 2}, {1, 3}], "shard 1 of 2 along mesh dimension 'shard'"),
        ("tp", [{0, 2}, {1, 3}], "shard 1 of 2 along mesh dimension 'tp'"),
        ("tp_in_ddp", [{0, 2}, {1, 3}], "shard 1 of 2 along mesh dimension 'tp'"),
        ("fsdp", [{0}, {1}, {2}, {3}], "shard 3 of 4 along mesh dimension '0'"),
    ],
)
def test_twins_and_only_twins_share_an_identity(name, groups, words, of_all_ranks):
    found = [ranks[name] for ranks in of_all_ranks]
    for one in range(WORLD):
        twins = next(group for group in groups if one in group)
        assert {other for other in range(WORLD) if found[other][0] == found[one][0]} == twins
        assert set(found[one][2]) == twins
    assert found[WORLD - 1][1] == words


def test_pipeline_stages_differ_by_their_names(of_all_ranks):
    identities = [ranks["stages"][0] for ranks in of_all_ranks]
    assert identities[0] == identities[1] != identities[2] == identities[3]


# ---- re-ranking ---------------------------------------------------------------------------------


@contextmanager
def elastic_world(rank):
    """The registry of elastic groups of a spare that builds the script's model alone."""
    registry = elastic.Groups(WORLD)
    registry.settle(place=elastic.Place.SETUP, solo=True)
    elastic.register(registry, devices=["cpu"])
    with world(rank, elastic.BACKEND_NAME):
        yield registry


def seen_by_torch(registry, model):
    """Everything that depends on the rank: groups, meshes, FSDP's own copies."""
    parameters = dict(model.named_parameters())
    mesh = next(iter(parameters.values())).device_mesh
    states = [module._get_fsdp_state() for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    infos = [group.mesh_info for state in states for group in state._fsdp_param_groups]
    return {
        "rank": dist.get_rank(),
        "groups": [(group.ranks, group.getRank(), dist.get_process_group_ranks(group)) for group in registry],
        "coordinate": mesh.get_coordinate(),
        "submeshes": [
            (mesh[name].get_coordinate(), mesh[name].mesh.tolist()) for name in mesh.mesh_dim_names
        ],
        "fsdp": [(info.shard_mesh_rank, info.replicate_mesh_rank) for info in infos],
        "shard": shard_identity(parameters),
        "words": describe(parameters),
    }


def built_as(rank):
    with elastic_world(rank) as registry:
        return seen_by_torch(registry, hsdp())


def built_then_made(old, new):
    with elastic_world(old) as registry:
        model = hsdp()
        before = seen_by_torch(registry, model)
        model(torch.ones(2, 8)).sum().backward()  # as a rehearsal does: caches are filled
        reranker = Reranker(list(registry), [model])
        start_s = time.perf_counter()
        reranker.apply(old, new)
        return before, seen_by_torch(registry, model), time.perf_counter() - start_s


@pytest.mark.parametrize(("old", "new"), [(1, 2), (3, 0)])
def test_spare_built_as_one_rank_becomes_another_in_every_place_that_torch_looks(old, new):
    expected = in_child(built_as, new)
    before, after, took_s = in_child(built_then_made, old, new)
    assert before != expected and before == in_child(built_as, old)
    assert after == expected
    assert took_s < 1  # 2 ms when idle


def uneven():
    with elastic_world(2) as registry:
        model = hsdp(features=5)
        before = seen_by_torch(registry, model)
        reranker = Reranker(list(registry), [model])
        reranker.check(2, 0)  # the same shard, elsewhere
        try:
            reranker.apply(2, 1)
        except UsageError as error:
            return str(error), seen_by_torch(registry, model) == before
        return "accepted", False


def test_uneven_shards_are_refused_and_nothing_is_changed():
    text, unchanged = in_child(uneven)
    assert "they hold (3, 5) and (2, 5)" in text and unchanged


def without_mesh(new):
    with elastic_world(1) as registry:
        dist.new_group([0, 1])
        Reranker(list(registry)).apply(1, new)
        return [group.getRank() for group in registry]


def test_group_without_a_mesh_that_lacks_the_new_rank_is_refused():
    with pytest.raises(UsageError, match=r"group of ranks \[0, 1\] cannot be told"):
        in_child(without_mesh, 3)
    assert in_child(without_mesh, 0) == [0, 0]


# ---- protected state of sharded models ----------------------------------------------------------


def sharded_training():
    """A hot spare's optimizer state, made by `ensure` alone, against that of a rank that trained."""
    with elastic_world(1):
        parts = []
        for _ in range(2):
            torch.manual_seed(0)
            model = hsdp()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            protected = Protected()
            protected.add(model=model, optimizer=optimizer)
            protected.check()
            parts.append((model, optimizer, protected))
        (_, _, protected), (_, other_optimizer, target) = parts

        def step(model, optimizer, protected):
            protected.watch_mutations()
            model(torch.ones(2, 8)).pow(2).sum().backward()
            mutated = protected.mutated_before_gate()
            optimizer.step()
            optimizer.zero_grad()
            return mutated

        mutated = [step(*parts[0]) for _ in range(2)]
        target.ensure(protected.spec())
        own, sent = target.tensors(), protected.tensors()
        for name, tensor in sent.items():
            own[name].copy_(tensor)
        target.load_values(protected.values())
        step(*parts[0])
        step(*parts[1])
        equal = fingerprint.digests(target.tensors()) == fingerprint.digests(protected.tensors())
        shapes = {name: tuple(tensor.shape) for name, tensor in sent.items()}
        kinds = {type(state["exp_avg"]).__name__ for state in other_optimizer.state.values()}
        return mutated, equal, shapes, kinds


def test_sharded_state_is_named_made_and_received_as_local_parts():
    mutated, equal, shapes, kinds = in_child(sharded_training)
    assert mutated == [[], []]  # FSDP's own moves between sharded and whole are no mutation
    assert equal
    assert shapes["model.0.weight"] == shapes["optimizer/model.1.weight/exp_avg_sq"] == (4, 8)
    assert kinds == {"DTensor"}

"""What run.protect keeps: complete, named alike in every process, and put back bit for bit."""

from __future__ import annotations

import copy
import functools
import random
import timeit

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from keepstep.errors import UsageError
from keepstep.trainer import values
from keepstep.trainer.adapters import fingerprint
from keepstep.trainer.adapters.protected import Protected


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.tied = self.head

    def forward(self, x):
        return self.tied(self.head(self.norm(self.conv(x)).mean((2, 3))))


class Training:
    """A model, two optimizers, schedulers and counters, all protected."""

    def __init__(self, seed=0, make=torch.optim.AdamW):
        torch.manual_seed(seed)
        self.net = Net()
        self.sgd = torch.optim.SGD(self.net.conv.parameters(), lr=0.1, momentum=0.9)
        self.adam = make([*self.net.norm.parameters(), *self.net.head.parameters()], lr=0.01)
        self.schedulers = [
            torch.optim.lr_scheduler.MultiStepLR(self.sgd, [2, 4]),
            torch.optim.lr_scheduler.SequentialLR(
                self.adam,
                [
                    torch.optim.lr_scheduler.LinearLR(self.adam, total_iters=3),
                    torch.optim.lr_scheduler.CosineAnnealingLR(self.adam, 7),
                ],
                [3],
            ),
        ]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.counters = {"seen": 0, "names": ["a"]}
        self.mine = {"rank": 3}
        self.generator = torch.Generator().manual_seed(4)
        self.protected = Protected()
        self.protected.add(
            model=self.net,
            sgd=self.sgd,
            adam=self.adam,
            scheduler=self.schedulers,
            scaler=self.scaler,
            counters=self.counters,
            generator=self.generator,
        )
        self.protected.add_per_rank(mine=self.mine, dice=random.Random(seed))

    def step(self, index):
        x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(index))
        x = x + torch.rand((), generator=self.generator)
        self.sgd.zero_grad()
        self.adam.zero_grad()
        self.net(x).pow(2).sum().backward()
        self.sgd.step()
        self.adam.step()
        for scheduler in self.schedulers:
            scheduler.step()
        self.counters["seen"] += 2
        self.counters["names"].append(str(index))

    def everything(self):
        return (
            fingerprint.digests(self.protected.tensors()),
            values.to_bytes(self.protected.values()),
            values.to_bytes(self.protected.per_rank_values()),
        )


def transfer(source, target):
    """What a replacement receives: tensors in place, values through bytes."""
    target.protected.ensure(source.protected.spec())
    own = target.protected.tensors()
    sent = source.protected.tensors()
    assert list(own) and set(own) == set(sent)
    for name, tensor in sent.items():
        own[name].copy_(tensor)
    target.protected.load_values(values.from_bytes(values.to_bytes(source.protected.values())))
    target.protected.load_per_rank_values(
        values.from_bytes(values.to_bytes(source.protected.per_rank_values()))
    )


@pytest.mark.parametrize("rehearsed", [0, 2, 9])
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_replacement_that_received_everything_trains_on_bit_for_bit(rehearsed):
    source, target = Training(), Training(seed=1)
    source.protected.check()
    for index in range(5):
        source.step(index)
    for index in range(rehearsed):
        target.step(index)
    transfer(source, target)
    assert target.everything() == source.everything()
    for index in range(5, 9):
        source.step(index)
        target.step(index)
    assert target.everything() == source.everything()


def test_values_put_back_undo_a_step_and_are_not_changed_by_later_steps():
    training = Training()
    training.step(0)
    kept = training.protected.values()
    before = values.to_bytes(kept)
    training.step(1)
    training.protected.load_values(kept)
    training.step(2)
    assert values.to_bytes(kept) == before


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.Adam,
        functools.partial(torch.optim.Adam, amsgrad=True),
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
        torch.optim.Adafactor,
        functools.partial(torch.optim.SGD, momentum=0.9),
        functools.partial(torch.optim.Adam, lr=torch.tensor(0.01), fused=True),
        functools.partial(torch.optim.Adam, lr=torch.tensor(0.01), capturable=False, foreach=False),
    ],
    ids=lambda make: getattr(make, "__name__", None) or f"{make.func.__name__} {make.keywords}",
)
@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:Non-lazily")
def test_state_of_every_optimizer_of_torch_is_made_and_received(make):
    def training(seed):
        torch.manual_seed(seed)
        net = nn.Linear(4, 4)
        optimizer = (
            make(net.parameters())
            if "lr" in getattr(make, "keywords", {})
            else make(net.parameters(), lr=0.01)
        )
        protected = Protected()
        protected.add(model=net, optimizer=optimizer)

        def step(index):
            optimizer.zero_grad()
            net(torch.ones(2, 4) * (index + 1)).pow(2).sum().backward()
            optimizer.step()

        return protected, step

    (source, source_step), (target, target_step) = training(0), training(1)
    for index in range(3):
        source_step(index)
    spec = source.spec()
    target.ensure(spec)
    assert target.spec() == spec
    for name, tensor in source.tensors().items():
        target.tensors()[name].copy_(tensor)
    target.load_values(values.from_bytes(values.to_bytes(source.values())))
    source_step(3)
    target_step(3)
    assert fingerprint.digests(target.tensors()) == fingerprint.digests(source.tensors())
    assert values.to_bytes(target.values()) == values.to_bytes(source.values())


def test_names_are_the_scripts_own_and_bytes_are_listed_once():
    training = Training()
    training.step(0)
    names = list(training.protected.tensors())
    assert names[0] == "model.conv.weight"
    assert "adam/model.head.weight/exp_avg" in names and "sgd/model.conv.bias/momentum_buffer" in names
    assert "model.norm.running_mean" in names
    assert not any("tied" in name for name in names)


def test_superfluous_optimizer_state_is_dropped():
    training, fresh = Training(), Training()
    training.step(0)
    training.protected.ensure(fresh.protected.spec())
    assert not training.sgd.state and not training.adam.state


def test_plain_optimizer_state_moves_with_the_values():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1

    nets = [nn.Linear(2, 2) for _ in range(2)]
    optimizers = [Counting(net.parameters(), lr=0.1) for net in nets]
    source, target = Protected(), Protected()
    source.add(model=nets[0], optimizer=optimizers[0])
    target.add(model=nets[1], optimizer=optimizers[1])
    for _ in range(3):
        nets[0](torch.ones(2)).sum().backward()
        optimizers[0].step()
    target.load_values(source.values())
    assert optimizers[1].state[nets[1].weight]["count"] == 3
    source.load_values({**source.values(), "state": {}})
    assert "count" not in optimizers[0].state[nets[0].weight]


def test_another_model_at_the_twin_is_refused_by_name():
    small, large = Protected(), Protected()
    small.add(model=nn.Linear(2, 2))
    large.add(model=nn.Linear(2, 3))
    with pytest.raises(UsageError, match=r"model\.weight is \(2, 2\)"):
        small.ensure(large.spec())


def test_channels_last_weights_can_be_viewed_as_flat_memory():
    training = Training()
    training.step(0)
    assert all(tensor.is_contiguous() for tensor in training.protected.tensors().values())


# ---- mutations ----------------------------------------------------------------------------------


BATCH_NORM = ["model.norm.running_mean", "model.norm.running_var", "model.norm.num_batches_tracked"]


def test_running_statistics_are_named_although_their_version_does_not_change():
    training = Training()
    training.protected.watch_mutations()
    version = training.net.norm.running_mean._version
    training.net(torch.ones(2, 3, 5, 5)).sum().backward()
    assert training.net.norm.running_mean._version == version  # PyTorch's kernel does not raise it
    assert training.protected.mutated_before_gate() == BATCH_NORM


def test_buffer_that_changes_behind_its_version_counter_is_found_in_the_first_steps():
    class Sly(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))
            self.register_buffer("still", torch.zeros(2))

    sly = Sly()
    protected = Protected()
    protected.add(model=sly)
    protected.watch_mutations()
    assert protected.mutated_before_gate() == []
    sly.seen.data.add_(1)
    assert protected.mutated_before_gate() == ["model.seen"]


def test_parameter_changed_in_place_is_noticed():
    training = Training()
    training.protected.watch_mutations()
    with torch.no_grad():
        training.net.head.weight.mul_(2)
    assert training.protected.mutated_before_gate() == ["model.head.weight", *BATCH_NORM]


def test_buffer_replaced_by_another_object_is_noticed():
    net = nn.Module()
    net.register_buffer("mask", torch.zeros(2))
    protected = Protected()
    protected.add(model=net)
    protected.watch_mutations()
    net.mask = torch.zeros(2)
    assert protected.mutated_before_gate() == ["model.mask"]


def test_update_of_the_last_step_does_not_count():
    training = Training()
    training.step(0)
    training.protected.watch_mutations()
    assert training.protected.mutated_before_gate() == BATCH_NORM


def test_each_steps_bookkeeping_is_cheap():
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(50)]
    net = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(net.parameters())
    protected = Protected()
    protected.add(model=net, optimizer=optimizer)

    def each_step():
        protected.values()
        protected.watch_mutations()
        protected.mutated_before_gate()

    assert min(timeit.repeat(each_step, number=10, repeat=10)) / 10 < 5e-3  # 0.3 ms when idle


# ---- refusals -----------------------------------------------------------------------------------


def refused(says, **objects):
    with pytest.raises(UsageError, match=says):
        protect_and_check(objects)


def protect_and_check(objects):
    protected = Protected()
    protected.add(**objects)
    protected.check()


def test_objects_without_state_are_refused_by_name():
    class Half:
        def state_dict(self):
            return {}

    refused("answer.*int has no state", answer=42)
    refused(r"net.*neither parameters nor buffers", net=nn.ReLU())
    refused(r"half.*Half has no load_state_dict", half=Half())


def test_trainable_parameter_without_a_protected_optimizer_is_refused_by_name():
    net = Net()
    refused(
        r"model\.norm\.weight is trainable.*run\.protect",
        model=net,
        o=torch.optim.SGD(net.conv.parameters(), lr=1),
    )


def test_frozen_and_averaged_models_and_foreign_parameters_are_fine():
    net, teacher, other = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    protected = Protected()
    protected.add(
        model=net,
        teacher=teacher,
        averaged=AveragedModel(net),
        optimizer=torch.optim.SGD([*net.parameters(), *other.parameters()], lr=1),
    )
    protected.check()
    assert "optimizer.group0.2" in protected.tensors()


def test_lbfgs_and_zero_are_refused():
    net = nn.Linear(2, 2)
    refused("LBFGS", optimizer=torch.optim.LBFGS(net.parameters()))

    class ZeroRedundancyOptimizer(torch.optim.SGD):
        pass

    refused("fully_shard", optimizer=ZeroRedundancyOptimizer(net.parameters(), lr=1))


def test_optimizer_in_backward_is_refused():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1)

    def hook(parameter):
        optimizer.step()

    net.weight.register_post_accumulate_grad_hook(hook)
    refused("stepped during backward", model=net, optimizer=optimizer)


def test_harmless_gradient_hooks_are_not_refused():
    net = nn.Linear(2, 2)
    net.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(2))
    protected = Protected()
    protected.add(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=1))
    protected.check()


def test_code_within_a_state_is_refused_with_its_path():
    refused(r"counters: .*callback.* holds a ", counters={"callback": len})


def test_large_state_outside_of_modules_is_refused():
    refused("20 MiB of tensors", ema={"weights": torch.zeros(5 << 20)})


def test_a_name_is_given_once_and_per_rank_takes_no_modules():
    protected = Protected()
    protected.add(counters={})
    with pytest.raises(UsageError, match="already protected"):
        protected.add_per_rank(counters={})
    with pytest.raises(UsageError, match="has no twin"):
        protected.add_per_rank(net=nn.Linear(1, 1))


def test_values_for_an_object_that_is_not_protected_here_are_refused():
    source, target = Protected(), Protected()
    source.add(counters={"a": 1})
    with pytest.raises(UsageError, match="counters"):
        target.load_values(source.values())


# ---- fingerprints -------------------------------------------------------------------------------


def test_digest_tells_dtype_shape_and_every_bit_apart():
    zero = torch.zeros(4)
    others = [
        -zero,
        zero.double(),
        zero.reshape(2, 2),
        zero[:3],
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(0),
    ]
    assert len({fingerprint.digest(tensor) for tensor in [zero, *others]}) == 7
    assert (
        fingerprint.digest(zero) == fingerprint.digest(copy.deepcopy(zero))
        and len(fingerprint.digest(zero)) == 32
    )


def test_digest_does_not_depend_on_the_layout_in_memory():
    matrix = torch.arange(6.0).reshape(2, 3)
    assert fingerprint.digest(matrix.t().contiguous().t()) == fingerprint.digest(matrix)
    for dtype in (torch.bfloat16, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn):
        assert fingerprint.digest(torch.ones(3).to(dtype)) != fingerprint.digest(torch.zeros(3).to(dtype))


def test_combined_digest_ignores_order_but_not_names():
    assert fingerprint.combined({"a": "1", "b": "2"}) == fingerprint.combined({"b": "2", "a": "1"})
    assert fingerprint.combined({"a": "1", "b": "2"}) != fingerprint.combined({"a": "2", "b": "1"})

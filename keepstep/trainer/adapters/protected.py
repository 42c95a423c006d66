"""The state that `run.protect` keeps alive: what it is called, and how it is read and put back.

Names come from the script's own (`model.layers.0.weight`, `optimizer/model.layers.0.weight/exp_avg`) and
are thus the same in every process. It does not know which ranks are twins, nor how bytes travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from keepstep.errors import UsageError
from keepstep.trainer.adapters import refusals, stateful
from keepstep.trainer.adapters.fingerprint import digest
from keepstep.trainer.adapters.optimizers import group_values, load_group, new_state
from keepstep.trainer.adapters.tensors import (
    dtype_named,
    in_memory_order,
    local_part,
    storage_key,
    version,
    versions,
)

_COMPARED_STEPS = 3
_COMPARED_BYTES = 256 << 20

Spec = Mapping[str, tuple[str, tuple[int, ...]]]


class Protected:
    """Everything that the script protects, under stable names."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.others: dict[str, Any] = {}  # replicated: the same on every rank
        self.per_rank: dict[str, Any] = {}  # one copy: belongs into this rank's record
        self._buffer_slots: list[tuple[str, dict[str, Tensor | None], str]] | None = None
        self._watched: list[tuple[str, Tensor]] | None = None
        self._watched_count = -1
        self._trained: list[Tensor] = []
        self._running: set[str] | None = None
        self._versions: list[int] = []
        self._buffers_then: dict[str, tuple[Tensor, int]] = {}
        self._contents: dict[str, Tensor] = {}
        self._compared_steps = 0

    # ---- what is protected ----------------------------------------------------------------------

    def add(self, /, **objects: Any) -> None:
        """Protect objects that every replica holds alike. Raises UsageError, by name."""
        for name, value in objects.items():
            self._add(name, value)

    def _add(self, name: str, value: Any) -> None:
        self._refuse_taken(name)
        if isinstance(value, (list, tuple, nn.ModuleList)) and not isinstance(value, nn.Module):
            for index, item in enumerate(value):
                self._add(f"{name}[{index}]", item)
        elif isinstance(value, nn.Module):
            refusals.refuse_empty_module(name, value)
            self.modules[name] = value
            self._buffer_slots = self._watched = self._running = None
        elif isinstance(value, Optimizer):
            inner = getattr(value, "optimizer", None)  # accelerate and others wrap the one that works
            value = inner if isinstance(inner, Optimizer) else value
            refusals.refuse_optimizer(name, value)
            self.optimizers[name] = value
            self._watched = None
        else:
            stateful.refuse_stateless(name, value)
            self.others[name] = value

    def add_per_rank(self, /, **objects: Any) -> None:
        """Protect objects that only this rank holds. Raises UsageError, by name."""
        for name, value in objects.items():
            self._refuse_taken(name)
            if isinstance(value, (nn.Module, Optimizer)):
                raise UsageError(
                    f"{name}: a {type(value).__name__} per rank has no twin to be copied from; protect what differs "
                    "between ranks as a dict or as an object with state_dict()"
                )
            stateful.refuse_stateless(name, value)
            self.per_rank[name] = value

    def _refuse_taken(self, name: str) -> None:
        for known in (self.modules, self.optimizers, self.others, self.per_rank):
            if name in known:
                raise UsageError(f"run.protect({name}=...): something is already protected under this name")

    def check(self) -> None:
        """Refuse what cannot be kept (call once, when training begins). Raises UsageError, by name."""
        refusals.refuse_untrained(self.modules, self.optimizers)
        refusals.refuse_optimizer_in_backward(self.optimizers)
        for name, value in self.others.items():
            stateful.refuse_unpackable(name, stateful.take(value))
        for name, value in self.per_rank.items():
            stateful.refuse_unpackable(name, stateful.take(value))
        for name, optimizer in self.optimizers.items():
            stateful.refuse_unpackable(f"param_groups of {name}", group_values(optimizer))

    # ---- tensors --------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """Every replicated tensor by name: parameters, optimizer state, buffers; local parts, no copies.

        Dimensions stand in memory order (a channels_last weight is permuted, and so contiguous).
        """
        return {name: in_memory_order(local_part(tensor)) for name, tensor in self.whole_tensors().items()}

    def whole_tensors(self) -> dict[str, Tensor]:
        """The same tensors as they are, DTensors too; each storage once.

        Parameters come from the optimizers first: under tensor parallelism those of the module are
        replaced by its forward.
        """
        found: dict[str, Tensor] = {}
        seen: set[tuple[Any, ...]] = set()

        def add(name: str, tensor: Tensor) -> None:
            key = storage_key(tensor)
            if key not in seen:
                seen.add(key)
                found[name] = tensor

        names = self._parameter_names()
        for _, parameter in self._parameters():
            add(names[id(parameter)], parameter)
        for prefix, module in self.modules.items():
            for name, parameter in module.named_parameters(prefix):
                add(name, parameter)
        for owner, parameter, key, value in self._optimizer_state():
            if isinstance(value, Tensor):
                add(f"{owner}/{names[id(parameter)]}/{key}", value)
        for name, buffer in self.buffers().items():
            add(name, buffer)
        for name, value in self.others.items():
            if isinstance(value, Tensor):
                add(name, value)
        return found

    def parameters(self) -> dict[str, Tensor]:
        """The optimizers' parameters under their names, as they are (DTensors too): for `shard_identity`."""
        names = self._parameter_names()
        return {names[id(parameter)]: parameter for _, parameter in self._parameters()}

    def trained(self) -> list[Tensor]:
        """The optimizers' parameters, each once, in an order that lasts as long as their number."""
        self._watched_parameters()
        return self._trained

    def spec(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, local shape) of `tensors()`, for `ensure` on another worker."""
        return {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in self.tensors().items()}

    def ensure(self, spec: Spec) -> None:
        """Create missing and drop superfluous optimizer state, so that a copy can be received in place.

        Raises UsageError when a parameter or buffer has another shape or dtype than its twin's.
        """
        names = self._parameter_names()
        self._drop_optimizer_state(spec, names)
        for owner, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    prefix = f"{owner}/{names[id(parameter)]}/"
                    held = optimizer.state.get(parameter, {})
                    for name in [name for name in spec if name.startswith(prefix)]:
                        key = name.removeprefix(prefix)
                        if key not in held:
                            made = new_state(group, parameter, key, *spec[name])
                            optimizer.state[parameter][key] = made
        own = self.tensors()
        for name, (dtype, shape) in spec.items():
            if name in own and (own[name].dtype, tuple(own[name].shape)) != (
                dtype_named(dtype),
                tuple(shape),
            ):
                raise UsageError(
                    f"{name} is {tuple(own[name].shape)} {own[name].dtype} here and {tuple(shape)} {dtype} at its twin: "
                    "the script must build the same model in every process"
                )

    def _drop_optimizer_state(self, spec: Spec, names: Mapping[int, str]) -> None:
        for owner, parameter, key, value in list(self._optimizer_state()):
            if not isinstance(value, Tensor):
                continue
            wanted = spec.get(f"{owner}/{names[id(parameter)]}/{key}")
            part = in_memory_order(local_part(value))
            if wanted is None or (part.dtype, tuple(part.shape)) != (
                dtype_named(wanted[0]),
                tuple(wanted[1]),
            ):
                state = self.optimizers[owner].state
                del state[parameter][key]
                if not state[parameter]:
                    del state[parameter]

    def buffers(self) -> dict[str, Tensor]:
        """All module buffers by name (BatchNorm's running statistics differ per rank: record them)."""
        if self._buffer_slots is None:
            self._buffer_slots = list(self._find_buffer_slots())
        return {
            name: buffer for name, slots, key in self._buffer_slots if (buffer := slots.get(key)) is not None
        }

    def _find_buffer_slots(self) -> Iterator[tuple[str, dict[str, Tensor | None], str]]:
        """Where each buffer is looked up: walking all modules at every step would cost too much."""
        seen: set[int] = set()
        for prefix, module in self.modules.items():
            for path, part in module.named_modules(prefix=prefix):
                for key, buffer in part._buffers.items():
                    if buffer is None or id(buffer) not in seen:
                        seen.add(id(buffer))
                        yield f"{path}.{key}", part._buffers, key

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of every optimizer, each once, with a name to fall back on."""
        seen: set[int] = set()
        for owner, optimizer in self.optimizers.items():
            for group_index, group in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield f"{owner}.group{group_index}.{index}", parameter

    def _parameter_names(self) -> dict[int, str]:
        """id(parameter) -> name: the module's where one holds the object or its bytes."""
        by_id: dict[int, str] = {}
        by_storage: dict[tuple[Any, ...], str] = {}
        for prefix, module in self.modules.items():
            for name, parameter in module.named_parameters(prefix):
                by_id.setdefault(id(parameter), name)
                by_storage.setdefault(storage_key(parameter), name)
        return {
            id(parameter): by_id.get(id(parameter)) or by_storage.get(storage_key(parameter)) or fallback
            for fallback, parameter in self._parameters()
        }

    def _optimizer_state(self) -> Iterator[tuple[str, Tensor, str, Any]]:
        """(optimizer, parameter, key, value), in an order that all processes share; creates no entries."""
        for owner, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    entries = optimizer.state.get(parameter)
                    if entries:
                        for key in sorted(entries):
                            yield owner, parameter, key, entries[key]

    # ---- values ---------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """Replicated state that is no tensor of `tensors()`, as copies: plain values and small tensors."""
        return {
            "groups": {name: group_values(optimizer) for name, optimizer in self.optimizers.items()},
            "state": self._plain_optimizer_state(),
            "others": {
                name: stateful.take(value)
                for name, value in self.others.items()
                if not isinstance(value, Tensor)
            },
        }

    def _plain_optimizer_state(self) -> dict[str, dict[str, Any]]:
        plain = [
            entry
            for optimizer in self.optimizers.values()
            for entries in optimizer.state.values()
            if isinstance(entries, dict)
            for entry in entries.values()
            if not isinstance(entry, Tensor)
        ]
        if not plain:  # the usual case, at every step
            return {}
        names = self._parameter_names()
        found: dict[str, dict[str, Any]] = {}
        for owner, parameter, key, value in self._optimizer_state():
            if not isinstance(value, Tensor):
                found.setdefault(f"{owner}/{names[id(parameter)]}", {})[key] = stateful.copied(value)
        return found

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Put back what `values()` returned, into the live objects. Raises UsageError for another shape."""
        for name, groups in values["groups"].items():
            optimizer = self._named(self.optimizers, name, "optimizer")
            if len(groups) != len(optimizer.param_groups):
                raise UsageError(
                    f"{name} has {len(optimizer.param_groups)} parameter groups here and {len(groups)} at its twin"
                )
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                load_group(group, saved)
        self._load_plain_state(values["state"])
        for name, state in values["others"].items():
            stateful.give(self._named(self.others, name, "object"), state)

    def _load_plain_state(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        names = self._parameter_names() if saved or self._plain_optimizer_state() else {}
        if not names:
            return
        for owner, parameter, key, value in list(self._optimizer_state()):
            if not isinstance(value, Tensor) and key not in saved.get(f"{owner}/{names[id(parameter)]}", {}):
                del self.optimizers[owner].state[parameter][key]
        for owner, optimizer in self.optimizers.items():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    for key, value in saved.get(f"{owner}/{names[id(parameter)]}", {}).items():
                        optimizer.state[parameter][key] = stateful.copied(value)

    def _named(self, known: Mapping[str, Any], name: str, kind: str) -> Any:
        if name not in known:
            raise UsageError(
                f"the {kind} protected as {name} at a twin is not protected here: run.protect() must name the same "
                "things in every process"
            )
        return known[name]

    def per_rank_values(self) -> dict[str, Any]:
        """State of the objects that only this rank holds: copies, plain values and small tensors."""
        return {name: stateful.take(value) for name, value in self.per_rank.items()}

    def load_per_rank_values(self, values: Mapping[str, Any]) -> None:
        """Put back what `per_rank_values()` returned."""
        for name, state in values.items():
            stateful.give(self._named(self.per_rank, name, "per-rank object"), state)

    # ---- changes before the gate ----------------------------------------------------------------

    def watch_mutations(self) -> None:
        """Remember the versions of parameters and buffers: call at the start of a step's block."""
        self._versions = versions(self._watched_tensors())
        buffers = self.buffers()
        self._buffers_then = {name: (buffer, version(buffer)) for name, buffer in buffers.items()}
        self._contents = {}
        if self._compared_steps < _COMPARED_STEPS:
            self._compared_steps += 1
            if sum(buffer.nbytes for buffer in buffers.values()) <= _COMPARED_BYTES:
                self._contents = {name: buffer.detach().clone() for name, buffer in buffers.items()}

    def mutated_before_gate(self) -> list[str]:
        """Names of parameters and buffers that changed, or were replaced, since `watch_mutations()`.

        Running statistics of normalisation layers are always among them, and buffers that change behind
        PyTorch's version counter (as those do) are found by their content in the first steps.
        """
        changed = []
        if (now := versions(self._watched_tensors())) != self._versions:
            pairs = zip(self._watched_parameters(), self._versions, now, strict=False)
            changed = [name for (name, _), then, seen in pairs if then != seen]
        buffers, running = self.buffers(), self._running_statistics()
        changed += [
            name for name, buffer in buffers.items() if name in running or self._changed(name, buffer)
        ]
        return changed

    def _changed(self, name: str, buffer: Tensor) -> bool:
        before, then = self._buffers_then.get(name, (None, 0))
        if before is not buffer or then != version(buffer):
            return True
        content = self._contents.get(name)
        # By digest only when unequal: a NaN differs from itself.
        return content is not None and not torch.equal(content, buffer) and digest(content) != digest(buffer)

    def _running_statistics(self) -> set[str]:
        """The fused kernels of BatchNorm and its kin update these without raising their version."""
        if self._running is None:
            self._running = {
                f"{path}.{key}"
                for prefix, module in self.modules.items()
                for path, part in module.named_modules(prefix=prefix)
                if isinstance(part, nn.modules.batchnorm._NormBase)
                for key in part._buffers
            }
        return self._running

    def _watched_tensors(self) -> list[Tensor]:
        return [tensor for _, tensor in self._watched_parameters()]

    def _watched_parameters(self) -> list[tuple[str, Tensor]]:
        count = sum([len(group["params"]) for one in self.optimizers.values() for group in one.param_groups])
        if self._watched is None or count != self._watched_count:
            names = self._parameter_names()
            self._trained = [parameter for _, parameter in self._parameters()]
            self._watched = [(names[id(parameter)], parameter) for parameter in self._trained]
            trained = {storage_key(parameter) for _, parameter in self._watched}
            for prefix, module in self.modules.items():  # frozen ones, a teacher's, an averaged model's
                for name, parameter in module.named_parameters(prefix):
                    if storage_key(parameter) not in trained:
                        self._watched.append((name, parameter))
            self._watched_count = count
        return self._watched

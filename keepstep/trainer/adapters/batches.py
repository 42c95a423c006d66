"""Whether the user's step changed its batch in place, and a copy to serve instead.

A step that is redone must see the batch as it was served. Walks dicts, lists, tuples, named tuples,
dataclasses; leaves that are no tensors are taken to be immutable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def _leaves(batch: Any) -> Iterator[Tensor]:
    """The tensors of a nested batch, always in the same order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _leaves(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _leaves(value)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from _leaves(getattr(batch, field.name))


def snapshot_versions(batch: Any) -> tuple[tuple[int, int], ...]:
    """Identity and version of every tensor in `batch`, to compare with later."""
    if batch is None:
        return ()
    return tuple([(id(leaf), leaf._version) for leaf in _leaves(batch) if not leaf.is_inference()])


def mutated(batch: Any, versions: tuple[tuple[int, int], ...]) -> bool:
    """True when a tensor of `batch` was changed in place, replaced, added or removed since."""
    return snapshot_versions(batch) != versions


def clone(batch: Any) -> Any:
    """A copy whose tensors and containers share nothing with `batch`; other leaves are shared."""
    return _mapped(batch, _copy_tensor)


def _copy_tensor(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return copied.pin_memory() if tensor.is_pinned() else copied


def _mapped(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        with torch.no_grad():
            return change(batch)
    if isinstance(batch, Mapping):
        items = {key: _mapped(value, change) for key, value in batch.items()}
        return items if type(batch) is dict else _rebuilt(batch, items)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return _rebuilt(batch, [_mapped(value, change) for value in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: _mapped(getattr(batch, name), change) for name in names})
    return batch


def _rebuilt(container: Any, items: Any) -> Any:
    """`items` as the container's own class where its constructor allows (a tokenizer's BatchEncoding does)."""
    try:
        return type(container)(items)
    except TypeError:
        return items

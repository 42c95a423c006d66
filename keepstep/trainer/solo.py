"""What a collective answers when nobody is there: every peer is a clone of this rank.

Used while a spare rehearses and while a poisoned step runs to its end. Counts, shapes and sizes
stay consistent, values do not matter: they are overwritten by the transfer or thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


def _as_if_summed(tensor: torch.Tensor, size: int, options: Any) -> None:
    """A sum over clones of this rank is `size` times its own value: counts stay plausible."""
    operation = getattr(options, "reduceOp", None)
    if operation is None or operation == dist.ReduceOp.SUM:
        tensor.mul_(size)
    elif operation == dist.ReduceOp.PRODUCT:
        tensor.pow_(size)
    elif operation == dist.ReduceOp.BXOR and size % 2 == 0:
        tensor.zero_()


def _reduce(size: int, rank: int, tensors: Any, *options: Any) -> None:
    for tensor in tensors:
        _as_if_summed(tensor, size, options[0] if options else None)


def _spread(output: torch.Tensor, own: torch.Tensor, size: int) -> None:
    """Fill `output` with `size` copies of `own`."""
    output.view(size, -1).copy_(own.reshape(1, -1).expand(size, -1))


def _own_part(output: torch.Tensor, whole: torch.Tensor, size: int, rank: int) -> None:
    output.view(-1).copy_(whole.reshape(size, -1)[rank])


def _lists_gather(size: int, rank: int, outputs: Any, inputs: Any, *_: Any) -> None:
    for targets, own in zip(outputs, inputs, strict=False):
        for target in targets:
            target.copy_(own)


def _single_gather(size: int, rank: int, output: Any, own: Any, *_: Any) -> None:
    _spread(output, own, size)


def _many_gather(size: int, rank: int, outputs: Any, inputs: Any, *_: Any) -> None:
    for output, own in zip(outputs, inputs, strict=False):
        _spread(output, own, size)


def _lists_scatter(size: int, rank: int, outputs: Any, inputs: Any, *options: Any) -> None:
    for output, parts in zip(outputs, inputs, strict=False):
        output.copy_(parts[rank])
        _as_if_summed(output, size, options[0] if options else None)


def _single_scatter(size: int, rank: int, output: Any, whole: Any, *options: Any) -> None:
    _own_part(output, whole, size, rank)
    _as_if_summed(output, size, options[0] if options else None)


def _many_scatter(size: int, rank: int, outputs: Any, inputs: Any, *options: Any) -> None:
    for output, whole in zip(outputs, inputs, strict=False):
        _own_part(output, whole, size, rank)
        _as_if_summed(output, size, options[0] if options else None)


def _exchange_single(
    size: int, rank: int, output: Any, own: Any, out_sizes: Any, in_sizes: Any, *_: Any
) -> None:
    if not out_sizes and not in_sizes:
        output.view(size, -1).copy_(own.reshape(size, -1)[rank : rank + 1].expand(size, -1))
        return
    output.zero_()
    parts = own.split(list(in_sizes) if in_sizes else [own.shape[0] // size] * size)
    mine = parts[rank]
    start = 0
    for length in list(out_sizes) if out_sizes else [output.shape[0] // size] * size:
        count = min(length, mine.shape[0])
        output[start : start + count].copy_(mine[:count])
        start += length


def _exchange_lists(size: int, rank: int, outputs: Any, inputs: Any, *_: Any) -> None:
    for output in outputs:
        output.zero_()
        if output.shape == inputs[rank].shape:
            output.copy_(inputs[rank])


def _zeros(size: int, rank: int, outputs: Sequence[torch.Tensor], *_: Any) -> None:
    for output in outputs:
        output.zero_()


def _gather(size: int, rank: int, outputs: Any, inputs: Any, *_: Any) -> None:
    for targets, own in zip(outputs or [], inputs, strict=False):
        for target in targets:
            target.copy_(own)


def _nothing(size: int, rank: int, *_: Any) -> None:
    """A broadcast, a barrier, a send: the rank's own value is the answer."""


ANSWERS: dict[str, Callable[..., None]] = {
    "allreduce": _reduce,
    "allreduce_coalesced": _reduce,
    "reduce": _reduce,
    "broadcast": _nothing,
    "barrier": _nothing,
    "send": _nothing,
    "allgather": _lists_gather,
    "allgather_coalesced": _many_gather,
    "gather": _gather,
    "all_gather_single": _single_gather,
    "_allgather_base": _single_gather,
    "all_gather_single_coalesced": _many_gather,
    "allgather_into_tensor_coalesced": _many_gather,
    "reduce_scatter": _lists_scatter,
    "reduce_scatter_single": _single_scatter,
    "_reduce_scatter_base": _single_scatter,
    "reduce_scatter_single_coalesced": _many_scatter,
    "reduce_scatter_tensor_coalesced": _many_scatter,
    "scatter": _zeros,
    "all_to_all_single": _exchange_single,
    "alltoall_base": _exchange_single,
    "alltoall": _exchange_lists,
    "recv": _zeros,
    "recv_anysource": _zeros,
}


def answer(name: str, size: int, rank: int, arguments: Sequence[Any]) -> None:
    """Write into the outputs of collective `name` what clones of this rank would have sent."""
    with torch.no_grad():
        ANSWERS[name](size, rank, *arguments)

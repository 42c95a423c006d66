"""Packed values back into objects: a table of what each tag becomes. It trusts no number that it reads."""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from keepstep.trainer.values_format import COMPLEX, DOUBLE, DTYPES, FACTORIES, NUMPY_DTYPE, RANDOM_VERSION


class Reader:
    """Rebuilds values from the text's tree, the raw bytes and the tensors."""

    def __init__(self, blobs: memoryview, tensors: Sequence[torch.Tensor]) -> None:
        self.blobs = blobs
        self.tensors = tensors

    def read(self, tree: Any) -> Any:
        kind = type(tree)
        if kind is list:
            return _DECODERS[tree[0]](self, tree)
        if kind is dict:
            read = self.read
            return {key: read(item) for key, item in tree.items()}
        return tree

    def blob(self, offset: int, length: int) -> memoryview:
        if not (0 <= offset <= offset + length <= len(self.blobs)):
            raise ValueError("raw bytes out of range")
        return self.blobs[offset : offset + length]

    def items(self, tree: list[Any], first: int = 1) -> list[Any]:
        return [self.read(item) for item in tree[first:]]

    def pairs(self, tree: list[Any], first: int = 1) -> list[tuple[Any, Any]]:
        items = self.items(tree, first)
        return list(zip(items[::2], items[1::2], strict=True))


def _decode_random(reader: Reader, tree: list[Any]) -> Any:
    words = array("I")
    words.frombytes(reader.blob(tree[2], tree[3]))
    return (RANDOM_VERSION, tuple(words), reader.read(tree[1]))


def _decode_counter(reader: Reader, tree: list[Any]) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    for key, count in reader.pairs(tree):
        counter[key] = count
    return counter


def _decode_tensor(reader: Reader, tree: list[Any]) -> torch.Tensor:
    tag = tree[0]
    if len(tree) == 2:
        if tree[1] < 0:
            raise ValueError("a tensor's index is negative")
        tensor: torch.Tensor = reader.tensors[tree[1]]
        if tag == "P" and type(tensor) is not torch.nn.Parameter:
            return torch.nn.Parameter(tensor, requires_grad=tensor.requires_grad)
        return tensor
    _, name, shape, requires_grad, offset, length = tree
    dtype, raw = DTYPES[name], reader.blob(offset, length)
    if length == 0:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            raise ValueError("a tensor's bytes are missing")
    else:
        # a copy: writable, and aligned, which the packed bytes are not
        tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)
    if tag == "P":
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    tensor.requires_grad_(requires_grad)
    return tensor


def _numpy_dtype(name: str) -> Any:
    import numpy  # what was packed from numpy needs numpy here as well

    if not NUMPY_DTYPE.fullmatch(name):  # numpy's own grammar for dtypes is far wider, and evaluates text
        raise ValueError(f"{name!r:.40} is no plain dtype")
    return numpy.dtype(name)


def _decode_array(reader: Reader, tree: list[Any]) -> Any:
    import numpy

    _, name, shape, order, offset, length = tree
    dtype = _numpy_dtype(name)
    if math.prod(shape) * dtype.itemsize != length:
        raise ValueError("an array's bytes do not fill its shape")
    out = numpy.empty(shape, dtype=dtype, order=order)
    if length:
        out.reshape(-1, order=order)[...] = numpy.frombuffer(reader.blob(offset, length), dtype=dtype)
    return out


def _decode_scalar(reader: Reader, tree: list[Any]) -> Any:
    import numpy

    dtype = _numpy_dtype(tree[1])
    if dtype.itemsize == 0:
        return dtype.type()
    return numpy.frombuffer(reader.blob(tree[2], tree[3]), dtype=dtype, count=1)[0]


_DECODERS: dict[str, Callable[[Reader, list[Any]], Any]] = {
    "i": lambda _, tree: int(tree[1], 16),
    "f": lambda _, tree: DOUBLE.unpack(bytes.fromhex(tree[1]))[0],
    "c": lambda _, tree: complex(*COMPLEX.unpack(bytes.fromhex(tree[1]))),
    "s": lambda reader, tree: bytes(reader.blob(tree[1], tree[2])).decode("utf-8", "surrogatepass"),
    "b": lambda reader, tree: bytes(reader.blob(tree[1], tree[2])),
    "ba": lambda reader, tree: bytearray(reader.blob(tree[1], tree[2])),
    "l": lambda reader, tree: reader.items(tree),
    "t": lambda reader, tree: tuple(reader.items(tree)),
    "e": lambda reader, tree: set(reader.items(tree)),
    "fe": lambda reader, tree: frozenset(reader.items(tree)),
    "d": lambda reader, tree: dict(reader.pairs(tree)),
    "o": lambda reader, tree: OrderedDict(reader.pairs(tree)),
    "dd": lambda reader, tree: defaultdict(FACTORIES[tree[1]], reader.pairs(tree, 2)),
    "C": _decode_counter,
    "q": lambda reader, tree: deque(reader.items(tree, 2), maxlen=tree[1]),
    "R": _decode_random,
    "S": lambda _, tree: torch.Size(tree[1:]),
    "D": lambda _, tree: DTYPES[tree[1]],
    "V": lambda _, tree: torch.device(tree[1]),
    "T": _decode_tensor,
    "P": _decode_tensor,
    "na": _decode_array,
    "ns": _decode_scalar,
}

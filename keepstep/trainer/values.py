"""The state of a user's objects as bytes and tensors, and back, exactly and without pickle.

Data only: what a value does (functions, generators, objects with code) is refused by its path, never
guessed. The bytes' layout stands in `values_format`.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from keepstep.errors import UsageError, WireError
from keepstep.trainer.values_format import (
    COMPLEX,
    DOUBLE,
    FACTORY_NAMES,
    HEAD,
    MAGIC,
    NUMPY_DTYPE,
    RANDOM_VERSION,
    RANDOM_WORDS,
)
from keepstep.trainer.values_reading import Reader

_MAX_DEPTH = 200
_JSON_INT = 1 << 63  # larger ints go as hexadecimal: decimal text is slow, and of limited length in Python

_text_of = json.JSONEncoder(check_circular=False, allow_nan=False, separators=(",", ":")).encode


class UnpackableError(UsageError):
    """A value that is no data. `path` says where it stands ("scheduler.lr_lambdas[0]"), `type_name` what it is."""

    def __init__(self, path: str, type_name: str) -> None:
        super().__init__(f"{path or 'value'}: {type_name}")
        self.path = path
        self.type_name = type_name


def pack(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The value as bytes that refer to the listed tensors by index; the tensors are not copied.

    Equal objects that were one object become several; tensors stay one. Raises UnpackableError.
    """
    return _pack(value, inline=False)


def unpack(data: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """What `pack` was given, around these very tensors. Raises WireError when the bytes are malformed."""
    try:
        magic, length = HEAD.unpack_from(data)
        if magic != MAGIC or HEAD.size + length > len(data):
            raise ValueError("not packed values")
        text = data[HEAD.size : HEAD.size + length]
        return Reader(memoryview(data)[HEAD.size + length :], tensors).read(json.loads(text))
    except (
        ValueError,
        TypeError,
        LookupError,
        RecursionError,
        OverflowError,
        RuntimeError,
        struct.error,
    ) as error:
        raise WireError(f"packed values are malformed: {type(error).__name__}: {error}") from None


def to_bytes(value: Any) -> bytes:
    """The value as self-contained bytes, tensors included (copied from any device). Raises UnpackableError."""
    return _pack(value, inline=True)[0]


def from_bytes(data: bytes) -> Any:
    """What `to_bytes` was given; tensors come back contiguous, on the CPU. Raises WireError."""
    return unpack(data, ())


# ---- packing ------------------------------------------------------------------------------------------


class _RefusedError(Exception):
    """This value is no data. Where it stands is found out afterwards, by `_blame`."""


class _Writer:
    """Collects raw bytes and tensors while the tree for the text is built."""

    def __init__(self, inline: bool) -> None:
        self.inline = inline
        self.blobs: list[bytes] = []
        self.offset = 0
        self.tensors: list[torch.Tensor] = []
        self.indices: dict[int, int] = {}
        self.depth = 0

    def write(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        encode = _ENCODERS.get(kind)
        if encode is None:
            return _encode_numpy(self, value)
        return encode(self, value)

    def blob(self, data: bytes) -> tuple[int, int]:
        offset, length = self.offset, len(data)
        self.blobs.append(data)
        self.offset = offset + length
        return offset, length

    def sequence(self, tag: str, values: Iterable[Any]) -> list[Any]:
        self.deeper()
        write = self.write
        out = [tag, *[write(value) for value in values]]
        self.depth -= 1
        return out

    def pairs(self, head: list[Any], values: Mapping[Any, Any]) -> list[Any]:
        self.deeper()
        for key, value in values.items():
            head.append(self.write(key))
            head.append(self.write(value))
        self.depth -= 1
        return head

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _RefusedError


def _pack(value: Any, inline: bool) -> tuple[bytes, list[torch.Tensor]]:
    writer = _Writer(inline)
    try:
        text = _text_of(writer.write(value)).encode()
    except _RefusedError:
        raise _blame(value, "") from None
    return b"".join((HEAD.pack(MAGIC, len(text)), text, *writer.blobs)), writer.tensors


def _encode_int(writer: _Writer, value: int) -> Any:
    return value if -_JSON_INT <= value < _JSON_INT else ["i", hex(value)]


def _encode_float(writer: _Writer, value: float) -> Any:
    # repr, JSON's way, is exact for finite numbers; a NaN also has bits to keep
    return value if value - value == 0.0 else ["f", DOUBLE.pack(value).hex()]


def _encode_str(writer: _Writer, value: str) -> Any:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates (file names): JSON would join two of them into one character
        return ["s", *writer.blob(value.encode("utf-8", "surrogatepass"))]
    return value


def _encode_tuple(writer: _Writer, value: tuple[Any, ...]) -> Any:
    if len(value) == 3 and type(value[1]) is tuple and len(value[1]) == RANDOM_WORDS:
        words = value[1]
        if value[0] == RANDOM_VERSION and set(map(type, words)) == {int}:
            try:
                packed = array("I", words).tobytes()
            except OverflowError:
                pass
            else:
                return ["R", writer.write(value[2]), *writer.blob(packed)]
    return writer.sequence("t", value)


def _encode_dict(writer: _Writer, value: dict[Any, Any]) -> Any:
    for key in value:
        if type(key) is not str or not key.isascii():
            return writer.pairs(["d"], value)
    writer.deeper()
    write = writer.write
    out = {key: write(item) for key, item in value.items()}
    writer.depth -= 1
    return out


def _encode_defaultdict(writer: _Writer, value: defaultdict[Any, Any]) -> Any:
    try:
        name = FACTORY_NAMES[value.default_factory]
    except (KeyError, TypeError):
        raise _RefusedError from None
    return writer.pairs(["dd", name], value)


def _encode_deque(writer: _Writer, value: deque[Any]) -> Any:
    out = writer.sequence("q", value)
    out.insert(1, value.maxlen)
    return out


def _encode_tensor(writer: _Writer, value: torch.Tensor) -> Any:
    if value.layout is not torch.strided or value.is_quantized or not value.is_leaf:
        raise _RefusedError
    tag = "P" if type(value) is torch.nn.Parameter else "T"
    if not writer.inline:
        index = writer.indices.setdefault(id(value), len(writer.tensors))
        if index == len(writer.tensors):
            writer.tensors.append(value)
        return [tag, index]
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    raw = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""
    return [tag, str(value.dtype)[6:], list(value.shape), value.requires_grad, *writer.blob(raw)]


def _encode_numpy(writer: _Writer, value: Any) -> Any:
    numpy = sys.modules.get("numpy")  # a numpy value exists only where numpy is loaded
    if numpy is None or not isinstance(value, (numpy.ndarray, numpy.generic)):
        raise _RefusedError
    if not NUMPY_DTYPE.fullmatch(value.dtype.str):
        raise _RefusedError
    if type(value) is numpy.ndarray:
        order = "F" if value.flags.fnc else "C"
        return ["na", value.dtype.str, list(value.shape), order, *writer.blob(value.tobytes(order))]
    if isinstance(value, numpy.generic) and type(value) is value.dtype.type:
        return ["ns", value.dtype.str, *writer.blob(value.tobytes())]
    raise _RefusedError


_ENCODERS: dict[type, Callable[[_Writer, Any], Any]] = {
    int: _encode_int,
    float: _encode_float,
    complex: lambda _, value: ["c", COMPLEX.pack(value.real, value.imag).hex()],
    str: _encode_str,
    bytes: lambda writer, value: ["b", *writer.blob(value)],
    bytearray: lambda writer, value: ["ba", *writer.blob(bytes(value))],
    list: lambda writer, value: writer.sequence("l", value),
    tuple: _encode_tuple,
    set: lambda writer, value: writer.sequence("e", value),
    frozenset: lambda writer, value: writer.sequence("fe", value),
    dict: _encode_dict,
    OrderedDict: lambda writer, value: writer.pairs(["o"], value),
    defaultdict: _encode_defaultdict,
    Counter: lambda writer, value: writer.pairs(["C"], value),
    deque: _encode_deque,
    torch.Size: lambda writer, value: ["S", *value],
    torch.dtype: lambda _, value: ["D", str(value)[6:]],
    torch.device: lambda _, value: ["V", str(value)],
    torch.Tensor: _encode_tensor,
    torch.nn.Parameter: _encode_tensor,
}


def _blame(value: Any, path: str, depth: int = 0) -> UnpackableError:
    """The error for a refused value: walks down to the part that cannot be packed."""
    kind = type(value)
    if depth >= _MAX_DEPTH:
        return UnpackableError(
            path[:60] + "...", f"{kind.__qualname__} nested deeper than {_MAX_DEPTH}, or in itself"
        )
    parts: Iterable[tuple[str, Any]] = ()
    if kind in (dict, OrderedDict, defaultdict, Counter):
        steps = [(_step(key), key, item) for key, item in value.items()]
        parts = [pair for step, key, item in steps for pair in ((f"{step} (the key)", key), (step, item))]
    elif kind in (list, tuple, deque):
        parts = ((f"[{index}]", item) for index, item in enumerate(value))
    elif kind in (set, frozenset):
        parts = (("{}", item) for item in value)
    for step, part in parts:
        writer = _Writer(inline=False)
        writer.depth = depth + 1
        try:
            writer.write(part)
        except _RefusedError:
            return _blame(part, path + (step if path else step.removeprefix(".")), depth + 1)
    name = kind.__qualname__
    if kind is defaultdict:
        name = f"defaultdict of {getattr(value.default_factory, '__qualname__', value.default_factory)!r}"
    elif kind is torch.Tensor or kind is torch.nn.Parameter:
        name = f"{name} ({'with a graph: detach it' if not value.is_leaf else value.layout})"
    elif hasattr(value, "dtype"):
        name = f"{name} of {value.dtype}"
    return UnpackableError(path, name)


def _step(key: Any) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r:.60}]"

"""Messages to bytes and back: one JSON object, "type" naming the class. Strict in both directions.

The annotations of the dataclasses are the schema; nothing else describes a message. A peer's bytes
are never trusted: whatever is wrong with them ends as one WireError. It does not know sockets,
lengths or who is speaking.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from keepstep.core import actions, events, health_events, move_events
from keepstep.core import types as nouns
from keepstep.errors import WireError
from keepstep.wire import messages

Convert = Callable[[Any], Any]

_MAX_SHOWN = 80
_MAX_DEPTH = 64


def _known_types() -> dict[str, type]:
    """Every dataclass of the protocol, by name. A name used twice would make messages ambiguous."""
    known: dict[str, type] = {}
    for module in (nouns, events, move_events, health_events, actions, messages):
        for name, thing in vars(module).items():
            if (
                isinstance(thing, type)
                and dataclasses.is_dataclass(thing)
                and thing.__module__ == module.__name__
            ):
                if name in known:
                    raise TypeError(f"two messages are called {name}")
                known[name] = thing
    return known


MESSAGE_TYPES: Mapping[str, type] = types.MappingProxyType(_known_types())


def encode(message: object) -> bytes:
    """The message as UTF-8 JSON. Raises WireError when it is no message or a field does not fit its type."""
    cls: type = type(message)
    if MESSAGE_TYPES.get(cls.__name__) is not cls:
        raise WireError(f"{cls.__name__} is no message of the protocol")
    body = _schema(cls).encode(message)
    return _ENCODER.encode({"type": cls.__name__, **body}).encode()


def decode(data: bytes) -> Any:
    """The message in `data`. Raises WireError with one line, whatever the bytes are."""
    try:
        raw = _DECODER.decode(data.decode("utf-8"))
    except RecursionError:
        raise WireError("message is nested too deeply") from None
    except (UnicodeDecodeError, ValueError) as error:
        raise WireError(f"message is not valid JSON: {_short(str(error))}") from None
    if not isinstance(raw, dict):
        raise WireError(f"message is not a JSON object but {_kind(raw)}")
    name = raw.pop("type", None)
    cls = MESSAGE_TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise WireError(f"unknown message type {_short(repr(name))}")
    return _schema(cls).decode(raw)


def as_json(message: object) -> dict[str, Any]:
    """The message as plain JSON values, for a file that keeps it among others."""
    value: dict[str, Any] = json.loads(encode(message))
    return value


def from_json(value: Any) -> Any:
    """The message that `as_json` described. Raises WireError."""
    try:
        return decode(json.dumps(value).encode())
    except (TypeError, ValueError) as error:
        raise WireError(f"message is no JSON value: {_short(str(error))}") from None


# ---- one dataclass --------------------------------------------------------------------------------


class _Schema:
    """How the fields of one dataclass are written and read."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._name = cls.__name__
        hints = typing.get_type_hints(cls)
        names = [f.name for f in dataclasses.fields(cls)]
        self._fields = {name: _converters(hints[name]) for name in names}

    def encode(self, value: Any) -> dict[str, Any]:
        if type(value) is not self._cls:
            raise WireError(f"expected {self._name}, got {_kind(value)}")
        body: dict[str, Any] = {}
        for name, (write, _) in self._fields.items():
            try:
                body[name] = write(getattr(value, name))
            except WireError as error:
                raise WireError(f"{self._name}.{name}: {error}") from None
        return body

    def decode(self, raw: Any) -> Any:
        if not isinstance(raw, dict):
            raise WireError(f"expected the fields of {self._name}, got {_kind(raw)}")
        if raw.keys() != self._fields.keys():
            missing = sorted(self._fields.keys() - raw.keys())
            unknown = sorted(raw.keys() - self._fields.keys())
            wrong = (
                f"lacks {', '.join(missing)}" if missing else f"has unknown field {_short(repr(unknown[0]))}"
            )
            raise WireError(f"{self._name} {wrong}")
        values: dict[str, Any] = {}
        for name, (_, read) in self._fields.items():
            try:
                values[name] = read(raw[name])
            except WireError as error:
                raise WireError(f"{self._name}.{name}: {error}") from None
        try:
            return self._cls(**values)
        except (ValueError, TypeError) as error:
            raise WireError(f"{self._name}: {_short(str(error))}") from None


@functools.cache
def _schema(cls: type) -> _Schema:
    return _Schema(cls)


# ---- one annotation -------------------------------------------------------------------------------


@functools.cache
def _converters(hint: Any) -> tuple[Convert, Convert]:
    """(write, read) for one annotation. Raises TypeError for an annotation that has no JSON form."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _plain, _plain
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin in (Union, types.UnionType):
        return _optional(hint, args)
    if origin is Literal:
        return _literal(args)
    if origin is tuple:
        return _sequence(args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(*args)
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return _enumeration(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        schema = _schema(hint)
        return schema.encode, schema.decode
    raise TypeError(f"no JSON form for {hint}")


def _int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    raise _unfit("a whole number", value)


def _float(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            raise WireError("number is too large") from None
        if math.isfinite(number):
            return number
        raise WireError(f"number is not finite: {number}")
    raise _unfit("a number", value)


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise _unfit("true or false", value)


def _read_str(value: Any) -> str:
    if not isinstance(value, str):
        raise _unfit("text", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise WireError("text is not valid Unicode") from None
    return value


def _write_str(value: Any) -> str:
    """Text from the machine (paths, tracebacks) may hold stray surrogates: they are sent escaped."""
    if not isinstance(value, str):
        raise _unfit("text", value)
    return value.encode("utf-8", "backslashreplace").decode()


def _write_bytes(value: Any) -> str:
    if not isinstance(value, bytes):
        raise _unfit("bytes", value)
    return base64.b64encode(value).decode("ascii")


def _read_bytes(value: Any) -> bytes:
    if not isinstance(value, str):
        raise _unfit("base64 text", value)
    try:
        return base64.b64decode(value.encode(), validate=True)
    except (binascii.Error, ValueError):
        raise WireError("text is not base64") from None


def _none(value: Any) -> None:
    if value is not None:
        raise _unfit("null", value)


_SCALARS: dict[Any, tuple[Convert, Convert]] = {
    int: (_int, _int),
    float: (_float, _float),
    bool: (_bool, _bool),
    str: (_write_str, _read_str),
    bytes: (_write_bytes, _read_bytes),
    type(None): (_none, _none),
}


def _plain(value: Any, depth: int = 0) -> Any:
    """A free JSON value (evidence, ledger bodies): checked all the way down, tuples become lists."""
    if depth > _MAX_DEPTH:
        raise WireError("value is nested too deeply")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _write_str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise WireError("keys of a free value must be text")
        return {_write_str(key): _plain(item, depth + 1) for key, item in value.items()}
    raise _unfit("a JSON value", value)


def _optional(hint: Any, args: tuple[Any, ...]) -> tuple[Convert, Convert]:
    inner = [arg for arg in args if arg is not type(None)]
    if len(inner) != 1 or len(args) != 2:
        raise TypeError(f"no JSON form for {hint}: only `T | None` can be told apart")
    write, read = _converters(inner[0])
    return (
        lambda value: None if value is None else write(value),
        lambda value: None if value is None else read(value),
    )


def _literal(choices: tuple[Any, ...]) -> tuple[Convert, Convert]:
    def check(value: Any) -> Any:
        if isinstance(value, str) and value in choices:
            return value
        raise WireError(f"expected one of {', '.join(choices)}, got {_short(repr(value))}")

    return check, check


def _enumeration(cls: type[enum.StrEnum]) -> tuple[Convert, Convert]:
    def read(value: Any) -> enum.StrEnum:
        try:
            if isinstance(value, str):
                return cls(value)
        except ValueError:
            pass
        raise WireError(f"expected one of {', '.join(cls)}, got {_short(repr(value))}")

    return (lambda value: read(value).value), read


def _sequence(args: tuple[Any, ...]) -> tuple[Convert, Convert]:
    if len(args) != 2 or args[1] is not Ellipsis:
        raise TypeError("only tuple[T, ...] has a JSON form")
    write_item, read_item = _converters(args[0])

    def write(value: Any) -> list[Any]:
        if not isinstance(value, (tuple, list)):
            raise _unfit("a tuple", value)
        return [write_item(item) for item in value]

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _unfit("a list", value)
        return tuple(read_item(item) for item in value)

    return write, read


def _mapping(key_hint: Any, value_hint: Any) -> tuple[Convert, Convert]:
    """JSON's keys are text; whole numbers are written in decimal, in the one usual way."""
    if key_hint not in (int, str):
        raise TypeError("keys of a mapping must be int or str")
    write_value, read_value = _converters(value_hint)
    write_key: Convert = _write_int_key if key_hint is int else _write_str
    read_key: Convert = _read_int_key if key_hint is int else _read_str

    def write(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _unfit("a mapping", value)
        return {write_key(key): write_value(item) for key, item in value.items()}

    def read(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise _unfit("an object", value)
        return {read_key(key): read_value(item) for key, item in value.items()}

    return write, read


def _write_int_key(key: Any) -> str:
    return str(_int(key))


def _read_int_key(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or str(number) != text:
        raise WireError(f"expected a whole number as key, got {_short(repr(text))}")
    return number


# ---- small helpers --------------------------------------------------------------------------------


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _unfit(expected: str, value: Any) -> WireError:
    return WireError(f"expected {expected}, got {_kind(value)}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "true or false"}
    return names.get(type(value), type(value).__name__)


def _short(text: str) -> str:
    """One line, bounded: a stranger's bytes must not flood or garble a log."""
    line = text.encode("ascii", "backslashreplace").decode().replace("\n", " ").replace("\r", " ")
    return line if len(line) <= _MAX_SHOWN else line[: _MAX_SHOWN - 3] + "..."


# Made once: `json.loads` with arguments would build a new one for every message.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)

"""The codec's promises: what it takes comes back exactly; what it does not take is refused by its path."""

from __future__ import annotations

import collections
import math
import os
import random
import struct
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.errors import WireError
from keepstep.trainer.values import UnpackableError, from_bytes, pack, to_bytes, unpack


def exactly(left: Any, right: Any) -> bool:
    """Same types all the way down, same bits, same order."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return exactly(left.real, right.real) and exactly(left.imag, right.imag)
    if isinstance(left, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape
        same = same and left.requires_grad == right.requires_grad
        return same and raw(left) == raw(right)
    if isinstance(left, np.ndarray):
        same = left.dtype == right.dtype and left.shape == right.shape and left.flags.fnc == right.flags.fnc
        return same and left.tobytes() == right.tobytes()
    if isinstance(left, np.generic):
        return left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        if isinstance(left, collections.defaultdict) and left.default_factory is not right.default_factory:
            return False
        return exactly(list(left.items()), list(right.items()))
    if isinstance(left, (set, frozenset)):
        return left == right and {(type(item), item) for item in left} == {
            (type(item), item) for item in right
        }
    if isinstance(left, collections.deque) and left.maxlen != right.maxlen:
        return False
    if isinstance(left, (list, tuple, collections.deque)):
        return len(left) == len(right) and all(map(exactly, left, right))
    return bool(left == right)


def raw(tensor: torch.Tensor) -> list[int]:
    plain = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return plain.view(torch.uint8).tolist() if plain.numel() else []


NAN_WITH_BITS = struct.unpack("<d", bytes.fromhex("efbeadde0000f87f"))[0]

EXAMPLES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    2**63,
    -(2**63),
    -(2**63) - 1,
    7**9000,
    0.0,
    -0.0,
    5e-324,
    1.7976931348623157e308,
    0.1,
    math.nan,
    -math.nan,
    NAN_WITH_BITS,
    math.inf,
    -math.inf,
    complex(-0.0, math.nan),
    "",
    "plain",
    'quote " backslash \\ \x00 \x7f \n',
    "\u00fc\U0001f600\u2028",
    "\ud83d\ude00",  # two lone surrogates, not the one character that JSON would make of them
    b"",
    bytes(range(256)),
    bytearray(b"x"),
    [],
    [1, [2.0, [None, [True]]]],
    (),
    (1, (2, [3])),
    ("l", ["t", 1], {"l": ["l"]}),
    set(),
    {1, "a", (2, 3), b"x", None, frozenset({1})},
    frozenset({1, 2}),
    {},
    {"b": 1, "a": 2},
    {1: "int", "1": "str", True and "t": 0, (1, 2): [3], None: 4, 1.5: 5, b"k": 6, frozenset({1}): 7},
    {"ü": 1, "\ud800": 2},
    collections.OrderedDict([("z", 1), ("a", {2: 3})]),
    collections.defaultdict(list, {"a": [1]}),
    collections.defaultdict(int, {3: 1}),
    collections.defaultdict(float),
    collections.defaultdict(dict, {"x": {}}),
    collections.defaultdict(None, {"x": 1}),
    collections.Counter("abracadabra"),
    collections.Counter({"a": -2, "b": 0.5}),
    collections.deque([1, 2, 3], maxlen=5),
    collections.deque([[1]], maxlen=None),
    collections.deque(maxlen=0),
    torch.Size([2, 0, 3]),
    torch.Size([]),
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.device("cuda", 3),
    torch.device("cpu"),
    random.Random(1).getstate(),
    (3, (1,) * 625, None),
    (3, (True,) * 625, None),
    (3, (-1,) * 625, None),
    (3, (2**40,) * 625, None),
    (2, (1,) * 625, None),
    np.random.RandomState(3).get_state(),
    np.random.default_rng(3).bit_generator.state,
    np.float64(-0.0),
    np.float32(math.nan),
    np.float16(1.5),
    np.int8(-3),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 + 2j),
    np.str_("text"),
    np.str_(""),
    np.datetime64("2026-11-30"),
    np.zeros((0, 3)),
    np.array(5, dtype=">i4"),
    np.arange(12.0).reshape(3, 4)[:, ::2],
    np.asfortranarray(np.arange(12, dtype=np.int16).reshape(3, 4)),
    np.array(["a", "bcd"]),
    np.array([True, False]),
]

TENSORS = [
    torch.tensor(1.5),
    torch.tensor([]),
    torch.empty(3, 0, 2, dtype=torch.int64),
    torch.tensor(True),
    torch.randn(4, 6).t(),
    torch.arange(20).reshape(4, 5)[1:, ::2],
    torch.randn(3).expand(2, 3),
    torch.randn(5).to(torch.bfloat16),
    torch.randn(5).to(torch.float16),
    torch.randn(5).to(torch.float8_e5m2),
    torch.tensor([math.nan, math.inf, -0.0]),
    torch.tensor([1 + 2j, -3j]).conj(),
    torch.tensor([1, 2, 255], dtype=torch.uint8),
    torch.randn(2, requires_grad=True),
    torch.nn.Parameter(torch.randn(2, 2)),
    torch.nn.Parameter(torch.randn(2), requires_grad=False),
    torch.get_rng_state(),
]


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_exactly(value: Any) -> None:
    for wrapped in (value, [value], {"k": (value,)}):
        assert exactly(from_bytes(to_bytes(wrapped)), wrapped)
        data, tensors = pack(wrapped)
        assert tensors == []
        assert exactly(unpack(data, []), wrapped)


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda value: f"{type(value).__name__}-{value.dtype}")
def test_a_tensor_comes_back_exactly(tensor: torch.Tensor) -> None:
    assert exactly(from_bytes(to_bytes({"a": [tensor]})), {"a": [tensor]})
    data, tensors = pack({"a": tensor, "again": (tensor,)})
    assert len(tensors) == 1 and tensors[0] is tensor
    back = unpack(data, tensors)
    assert back["a"] is tensor and back["again"][0] is tensor


def test_unpacked_tensors_are_the_callers_own_and_writable() -> None:
    mine = torch.zeros(3)
    data, _ = pack({"w": mine, "n": 1})
    received = torch.ones(3)
    assert unpack(data, [received])["w"] is received
    copy = from_bytes(to_bytes(mine))
    copy += 1
    assert mine.sum() == 0 and copy.sum() == 3


def test_an_optimizer_and_a_scheduler_come_back_and_continue_bit_for_bit() -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        for _ in range(3):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    first = make()
    train(*first)
    second = make()
    state = [part.state_dict() for part in first]
    for part, kept in zip(second, from_bytes(to_bytes(state)), strict=True):
        part.load_state_dict(kept)
    train(*first)
    train(*second)
    assert exactly([part.state_dict() for part in first], [part.state_dict() for part in second])


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters())
    | st.binary()
)
keys = st.recursive(
    scalars,
    lambda inner: st.tuples(inner, inner) | st.frozensets(st.integers() | st.text(), max_size=3),
    max_leaves=4,
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4).map(collections.OrderedDict)
        | st.lists(inner, max_size=4).map(collections.deque)
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(values)
def test_any_nest_of_values_comes_back_exactly(value: Any) -> None:
    assert exactly(from_bytes(to_bytes(value)), value)


class Dict(dict[str, int]):
    """A subclass may carry more than its items."""


def itself() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"scheduler": {"lr_lambdas": [lambda step: 1.0]}}, "scheduler.lr_lambdas[0]: function"),
        (len, "value: builtin_function_or_method"),
        ([1, {"a b": (0, object())}], "[1]['a b'][1]: object"),
        ({3: {"x": iter([])}}, "[3].x: list_iterator"),
        ({"d": Dict(a=1)}, "d: Dict"),
        ({"s": {(1, len)}}, "s{}[1]: builtin_function_or_method"),
        ({"k": {len: 1}}, "k[<built-in function len>] (the key): builtin_function_or_method"),
        ({"f": collections.defaultdict(lambda: 0)}, "f: defaultdict of '<lambda>'"),
        (collections.deque([torch.Generator()]), "[0]: Generator"),
        ({"w": torch.ones(2, requires_grad=True) * 2}, "w: Tensor (with a graph: detach it)"),
        ({"w": torch.eye(2).to_sparse()}, "w: Tensor (torch.sparse_coo)"),
        ({"o": np.array([None])}, "o: ndarray of object"),
        ({"v": np.zeros(1, [("a", "i4")])}, "v: ndarray of [('a', '<i4')]"),
        (itself(), "list nested deeper than 200, or in itself"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_data_is_refused_by_its_path(value: Any, message: str) -> None:
    for refuse in (pack, to_bytes):
        with pytest.raises(UnpackableError) as caught:
            refuse(value)
        assert str(caught.value).endswith(message)


def test_malformed_bytes_are_refused_and_nothing_else_happens() -> None:
    rng = random.Random(0)
    good = to_bytes({"t": torch.arange(5), "r": random.getstate(), "n": np.arange(3), "x": [1, (2.5, "s")]})
    for bad in (b"", b"KSV1", good[:-1], b"XXXX" + good[4:], good[:8] + b"[" * 5000):
        with pytest.raises(WireError):
            from_bytes(bad)
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            bad[rng.randrange(min(len(bad), 400))] = rng.randrange(256)
        try:
            from_bytes(bytes(bad))
        except WireError:
            pass


def test_costs_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    record = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cursor": {"epoch": 1, "batch": 17, "seed": 3, "done": False, "lr": 1e-3, "name": os.sep},
    }
    data = to_bytes(record)
    for name, action in (("to_bytes", lambda: to_bytes(record)), ("from_bytes", lambda: from_bytes(data))):
        best = float("inf")
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(200):
                action()
            best = min(best, (time.perf_counter() - begin) / 200)
        with capsys.disabled():
            print(f"\n  values: {name} of a typical record ({len(data)} bytes) {best * 1e6:.1f} us", end="")
        assert best < 600e-6  # ten times the promise: this machine is shared

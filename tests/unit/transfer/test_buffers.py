"""Views share the tensor's memory; staging is for the others; a checksum misses nothing that it promises."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from keepstep.errors import WireError
from keepstep.transfer.buffers import view
from keepstep.transfer.checksum import BLOCK_BYTES, checksum
from keepstep.transfer.manifest import Manifest, TensorSpec
from keepstep.transfer.staging import Landing, outgoing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_a_view_is_the_tensors_own_memory(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 5).to(dtype)
    memory = view(tensor)
    assert memory.nbytes == tensor.nbytes and memory.format == "B" and not memory.readonly
    memory[:] = bytes(tensor.nbytes)
    assert not tensor.to(torch.complex64).any()


def test_a_view_keeps_the_memory_alive() -> None:
    memory = view(torch.full((1 << 16,), 7, dtype=torch.uint8))
    gc.collect()
    others = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(20)]
    assert bytes(memory) == b"\x07" * (1 << 16) and len(others) == 20


def test_a_view_of_a_slice_starts_where_the_slice_does() -> None:
    tensor = torch.arange(10, dtype=torch.uint8)
    assert bytes(view(tensor[3:6])) == bytes([3, 4, 5])
    assert view(torch.empty(0, 4)).nbytes == 0
    assert view(torch.tensor(1.5)).nbytes == 4


def test_what_has_no_plain_memory_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"fc\.weight: not contiguous"):
        view(torch.zeros(3, 4).t(), "fc.weight")
    with pytest.raises(ValueError, match="emb: no plain CPU memory"):
        view(torch.eye(2).to_sparse(), "emb")
    with pytest.raises(ValueError, match="w: no plain CPU memory"):
        view(torch.empty(2, device="meta"), "w")


def test_staging_serves_only_what_needs_it() -> None:
    plain, turned = torch.zeros(4), torch.zeros(3, 4).t()
    landing = Landing([plain, turned, torch.zeros(2, requires_grad=True)])
    assert landing.staged_bytes == turned.nbytes
    source = torch.arange(12.0).reshape(3, 4).t()
    landing.views[0][:] = outgoing(torch.ones(4))
    landing.views[1][:] = outgoing(source)
    assert not turned.any()
    landing.land()
    assert torch.equal(turned, source) and torch.equal(plain, torch.ones(4)) and landing.staged_bytes == 0


LENGTHS = [
    1,
    7,
    8,
    1023,
    1024,
    16383,
    16384,
    16385,
    20000,
    BLOCK_BYTES - 1,
    BLOCK_BYTES,
    3 * BLOCK_BYTES + 5001,
]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_flipped_bit_or_two_anywhere_change_the_checksum(length: int) -> None:
    rng = random.Random(length)
    data = bytearray(rng.randbytes(length))
    right = checksum(memoryview(data))
    places = {0, length - 1, *(rng.randrange(length) for _ in range(200))}
    for place in places:
        data[place] ^= 1 << (bit := rng.randrange(8))
        assert checksum(memoryview(data)) != right
        other = rng.choice([max(place - 8, 0), max(place - 1024, 0), rng.randrange(length)])
        if other != place:
            data[other] ^= 1 << bit
            assert checksum(memoryview(data)) != right
            data[other] ^= 1 << bit
        data[place] ^= 1 << bit
    assert checksum(memoryview(bytearray(data))) == right


@pytest.mark.parametrize("length", LENGTHS)
def test_a_checksum_does_not_depend_on_the_number_of_threads(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = memoryview(bytearray(random.Random(length).randbytes(length)))
    found = set()
    for threads in (1, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.add(checksum(data))
    assert len(found) == 1


def test_moved_data_changes_the_checksum() -> None:
    data = bytearray(random.Random(0).randbytes(2 * BLOCK_BYTES))
    right = checksum(memoryview(data))
    for step in (8, 1024, BLOCK_BYTES):  # neighbouring words, rows, blocks change places
        moved = data[step : 2 * step] + data[:step] + data[2 * step :]
        assert checksum(memoryview(moved)) != right
    # a bit up in one word, the same bit down in another of the same row: the plain sum is the same
    data[7] |= 0x80
    data[15] &= 0x7F
    before = checksum(memoryview(data))
    data[7] &= 0x7F
    data[15] |= 0x80
    assert checksum(memoryview(data)) != before


def manifest() -> Manifest:
    specs = (TensorSpec("w", "float32", (2, 3), 24), TensorSpec("é", "bfloat16", (), 2))
    return Manifest(tensors=specs, values=b"\x00values", step=3, lineage="ab" * 16)


def test_a_manifest_survives_the_wire() -> None:
    again = Manifest.from_json(manifest().to_json())
    assert again == manifest() and again.identity() == manifest().identity()
    assert again.state_bytes == 26


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 100_000,
        manifest().to_json().replace(b'"step":3', b'"step":"3"'),
        manifest().to_json().replace(b'"step":3', b'"step":3,"more":1'),
        manifest().to_json().replace(b"24]", b"-24]"),
        manifest().to_json().replace(b"24]", b"24.5]"),
        manifest().to_json().replace(b"24]", b"24,1]"),
        manifest().to_json().replace(b'"float32"', b"7"),
        manifest().to_json().replace(b'"values":"', b'"values":"!'),
    ],
)
def test_a_malformed_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(WireError, match="manifest is malformed"):
        Manifest.from_json(text)

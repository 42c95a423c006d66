"""A record on its way to the agent that keeps it, as binary frames: only what changed, and the acknowledgement.

A record follows the one before it on the same connection: parts that both have, aligned at their ends (what
grows or shrinks in a record is its description, at the front), are not sent again. It does not know sockets,
and what a record means it does not know either.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.errors import WireError
from keepstep.wire.framing import MAX_FRAME_BYTES

MAX_RECORD_BYTES = MAX_FRAME_BYTES // 2
KINDS = ("start", "gate")

# sequence, rank, generation, kind, has a lineage, step, lineage, whole length, CRC-32 of it, number of ranges
_HEAD = struct.Struct(">QIIBBQ16sIII")
_RANGE = struct.Struct(">II")  # begin and end within the record
_ACK = struct.Struct(">QB")
ACK_BYTES = _ACK.size
_LEAST_BLOCK_BYTES, _MOST_BLOCKS = 512, 512

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSent:
    """One record as it arrived. `sequence` counts within the connection; `generation` is the sender's."""

    sequence: int
    rank: int
    generation: int
    kind: str
    step: int
    lineage: str
    payload: bytes


def changed_ranges(old: bytes, new: bytes) -> list[tuple[int, int]]:
    """The ranges of `new` that are not in `old` at the same distance from the end; block by block."""
    size = len(new)
    block = max(_LEAST_BLOCK_BYTES, -(-size // _MOST_BLOCKS))
    shift = len(old) - size
    found: list[tuple[int, int]] = []
    before, after = memoryview(old), memoryview(new)
    end = size
    while end > 0:
        begin = max(0, end - block)
        if begin + shift < 0 or after[begin:end] != before[begin + shift : end + shift]:
            if found and found[-1][0] == end:
                found[-1] = (begin, found[-1][1])
            else:
                found.append((begin, end))
        end = begin
    found.reverse()
    return found


def pack_record(record: RecordSent, before: bytes) -> bytes:
    """The frame's payload; `before`: the record sent just before it on this connection, b"" for the first."""
    payload = record.payload
    ranges = changed_ranges(before, payload) if before else [(0, len(payload))]
    head = _HEAD.pack(
        record.sequence,
        record.rank,
        record.generation,
        KINDS.index(record.kind),
        bool(record.lineage),
        record.step,
        bytes.fromhex(record.lineage),
        len(payload),
        zlib.crc32(payload),
        len(ranges),
    )
    spans = [_RANGE.pack(begin, end) for begin, end in ranges]
    return b"".join((head, *spans, *[payload[begin:end] for begin, end in ranges]))


def unpack_record(data: bytes, before: bytes) -> RecordSent:
    """The reverse of `pack_record`. Raises WireError, whatever the bytes are."""
    try:
        sequence, rank, generation, kind, has_lineage, step, lineage, size, crc, count = _HEAD.unpack_from(
            data
        )
        if size > MAX_RECORD_BYTES:
            raise WireError(f"a record of {size} bytes is larger than the limit of {MAX_RECORD_BYTES}")
        at = _HEAD.size + count * _RANGE.size
        if at > len(data) or kind >= len(KINDS):
            raise WireError("a record's frame is malformed")
        ranges = [_RANGE.unpack_from(data, _HEAD.size + n * _RANGE.size) for n in range(count)]
        payload = _patched(before, size, ranges, memoryview(data)[at:])
    except struct.error:
        raise WireError("a record's frame is cut short") from None
    if zlib.crc32(payload) != crc:
        raise WireError(f"a record of rank {rank} does not have the checksum that its frame names")
    return RecordSent(
        sequence=sequence,
        rank=rank,
        generation=generation,
        kind=KINDS[kind],
        step=step,
        lineage=lineage.hex() if has_lineage else "",
        payload=payload,
    )


def _patched(before: bytes, size: int, ranges: Ranges, literal: memoryview) -> bytes:
    """`before`, aligned at the end, with the ranges filled from `literal`."""
    shift, at, taken = len(before) - size, 0, 0
    parts: list[bytes | memoryview] = []
    for begin, end in [*ranges, (size, size)]:
        if not at <= begin <= end <= size or (begin > at and at + shift < 0):
            raise WireError("a record's frame names ranges that do not follow each other")
        if begin > at:
            parts.append(memoryview(before)[at + shift : begin + shift])
        parts.append(literal[taken : taken + end - begin])
        taken += end - begin
        at = end
    if taken != len(literal):
        raise WireError("a record's frame does not have the length that its ranges name")
    return b"".join(parts)


def pack_ack(sequence: int, kept: bool) -> bytes:
    """The keeper has dealt with a record; not `kept`: it has no room for it."""
    return _ACK.pack(sequence, kept)


def unpack_ack(data: bytes) -> tuple[int, bool]:
    """(sequence, kept). Raises WireError."""
    if len(data) != ACK_BYTES:
        raise WireError(f"an acknowledgement has {ACK_BYTES} bytes, not {len(data)}")
    sequence, kept = _ACK.unpack(data)
    return sequence, bool(kept)

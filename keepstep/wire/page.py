"""One worker's shared-memory page: counters and records that outlive the worker's process.

The worker writes, its agent reads; neither ever waits for the other. The file lies in shared memory, so
SIGKILL and SIGSTOP leave every finished write readable. What the numbers mean is decided elsewhere.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import sys
import time
import zlib
from dataclasses import dataclass
from types import TracebackType

from keepstep.errors import WireError

DEFAULT_RECORD_BYTES = 4 << 20

# start(T), gate(T), start(T+1) and gate(T+1) can all still be wanted; the fifth slot is the one being
# written, so that a death in the middle of a write costs none of the four.
KEPT_RECORDS = 4
_SLOTS = KEPT_RECORDS + 1

_MAGIC = 0x3267_6170_7065_656B  # "keeppag2": the layout's version is its last letter
_ALIGN = mmap.PAGESIZE
_SLOTS_AT = _ALIGN  # the file's first page holds the head and the counters
_GROWTH_BYTES = 64 << 10

# 8-byte words of the head. Every counter is one word, written by one aligned store: never seen half-way.
_WORD_MAGIC, _WORD_WORKER, _WORD_RECORD_BYTES = 0, 1, 2
_WORD_STEP, _WORD_PUBLISHED, _WORD_GENERATION, _WORD_COLLECTIVES, _WORD_PHASE, _WORD_SINCE = range(8, 14)
_WORD_EXIT, _WORD_FINISHED = 14, 15
_NO_EXIT = 0xFFFF_FFFF_FFFF_FFFF
# The low half of its word: what a C library's `putw` writes at a process's very end fits in there.
EXIT_STATUS_AT = 8 * _WORD_EXIT + (0 if sys.byteorder == "little" else 4)
# Two words that the ranks of one node pass their gate with (keepstep.trainer.node_gate).
GATE_WORDS = (16, 17)
# Sums for people to look at: steps and their ns, gates and their ns, bytes of the last record.
_WORD_STEPS_TIMED, _WORD_STEPS_NS, _WORD_GATES, _WORD_GATES_NS, _WORD_RECORD_SIZE = range(24, 29)

# A slot: one word (the sequence number, 0 while invalid), this head, the CRC of payload and head, the payload.
_SLOT_HEAD = struct.Struct("<QQBB16sI")  # sequence again, step, kind, has a lineage, lineage, payload length
_SLOT_CRC = struct.Struct("<I")
_HEAD_AT = 8
_CRC_AT = _HEAD_AT + _SLOT_HEAD.size
_PAYLOAD_AT = 64
assert _CRC_AT + _SLOT_CRC.size <= _PAYLOAD_AT

_KINDS = ("start", "gate")


class Phase(enum.IntEnum):
    """Where the worker's main thread is."""

    SETUP = 0
    STEP = 1
    GATE = 2
    UPDATE = 3
    BLOCK_END = 4
    BETWEEN = 5
    ASIDE = 6
    WAITING = 7
    PARKED = 8
    DONE = 9


@dataclass(frozen=True, slots=True)
class Record:
    """One whole record. `sequence` grows with every write; `lineage` is 32 hex digits or empty."""

    kind: str
    step: int
    lineage: str
    payload: bytes
    sequence: int


@dataclass(frozen=True, slots=True)
class Sums:
    """What a worker has spent so far, for people to look at."""

    steps: int
    steps_s: float
    gates: int
    gates_s: float
    record_bytes: int


class Page:
    """The mapped file. One process writes; any number reads. Not for two writing threads at once."""

    def __init__(self, path: str, descriptor: int, size: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, size)
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("Q")  # a word's store is one instruction; struct's is not
        self.worker = self._words[_WORD_WORKER]
        self.record_bytes = self._words[_WORD_RECORD_BYTES]
        self._slots = _slot_offsets(self.record_bytes)
        self._reserved = [0] * _SLOTS
        self._payloads: list[bytes | None] = [None] * _SLOTS  # those that stand in the slots, written by us
        self._summed: tuple[bytes, int] = (b"", 0)  # a payload and its CRC
        self._kept: dict[tuple[str, int, str], int] | None = None  # key -> slot, oldest first
        self._sequence = 0

    @classmethod
    def create(cls, path: str, worker: int, record_bytes: int = DEFAULT_RECORD_BYTES) -> Page:
        """Make the file, readable by its owner only; memory is taken as it is used.

        Raises FileExistsError, and ValueError when `record_bytes` is not positive.
        """
        if record_bytes <= 0:
            raise ValueError(f"record_bytes must be positive, not {record_bytes}")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            size = _file_bytes(record_bytes)
            os.ftruncate(descriptor, size)
            os.posix_fallocate(descriptor, 0, _SLOTS_AT)  # a full file system: an error here, no SIGBUS later
            head = struct.pack("=QQ", worker, record_bytes)
            os.pwrite(descriptor, head, 8 * _WORD_WORKER)
            os.pwrite(descriptor, struct.pack("=Q", _NO_EXIT), 8 * _WORD_EXIT)
            os.pwrite(descriptor, struct.pack("=Q", _MAGIC), 8 * _WORD_MAGIC)  # last: now it is a page
            return cls(path, descriptor, size)
        except BaseException:
            os.close(descriptor)
            os.unlink(path)
            raise

    @classmethod
    def open(cls, path: str) -> Page:
        """Map an existing page. Raises OSError, and WireError when the file is no page of this version."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            head = os.pread(descriptor, 24, 0)
            if len(head) < 24:
                raise WireError(f"{path}: {size} bytes are too few for a page")
            magic, _, record_bytes = struct.unpack("=QQQ", head)
            if magic != _MAGIC:
                raise WireError(f"{path}: not a page of this version of Keepstep")
            if size != _file_bytes(record_bytes):
                raise WireError(f"{path}: {size} bytes, but records of {record_bytes} bytes were announced")
            return cls(path, descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Unmap. The file stays; whoever made it removes it."""
        if self._descriptor < 0:
            return
        self._words.release()
        self._bytes.release()
        self._map.close()
        os.close(self._descriptor)
        self._descriptor = -1

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- counters -----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Committed steps."""
        return self._words[_WORD_STEP]

    @step.setter
    def step(self, value: int) -> None:
        self._words[_WORD_STEP] = value

    @property
    def published(self) -> int:
        """The newest step that all ranks are known to hold."""
        return self._words[_WORD_PUBLISHED]

    @published.setter
    def published(self, value: int) -> None:
        self._words[_WORD_PUBLISHED] = value

    @property
    def generation(self) -> int:
        """The generation that the worker lives in."""
        return self._words[_WORD_GENERATION]

    @generation.setter
    def generation(self, value: int) -> None:
        self._words[_WORD_GENERATION] = value

    @property
    def collectives(self) -> int:
        """Collectives entered so far."""
        return self._words[_WORD_COLLECTIVES]

    @collectives.setter
    def collectives(self, value: int) -> None:
        self._words[_WORD_COLLECTIVES] = value

    @property
    def phase(self) -> Phase:
        """Where the worker's main thread is."""
        return Phase(self._words[_WORD_PHASE])

    @phase.setter
    def phase(self, value: Phase) -> None:
        self._words[_WORD_PHASE] = value

    @property
    def phase_since_ns(self) -> int:
        """When the phase began, on CLOCK_MONOTONIC (one clock for all processes of a machine)."""
        return self._words[_WORD_SINCE]

    @phase_since_ns.setter
    def phase_since_ns(self, value: int) -> None:
        self._words[_WORD_SINCE] = value

    def enter(self, phase: Phase) -> None:
        """Set the phase and its beginning, now."""
        words = self._words
        words[_WORD_SINCE] = (
            time.monotonic_ns()
        )  # first: a reader then never sees a new phase with an old time
        words[_WORD_PHASE] = phase

    def count_step(self, spent_ns: int) -> None:
        """One more step ended, `spent_ns` after the one before."""
        words = self._words
        words[_WORD_STEPS_NS] += spent_ns
        words[_WORD_STEPS_TIMED] += 1

    def count_gate(self, spent_ns: int) -> None:
        """One more gate was passed without a failure; `spent_ns`: its record and its waiting."""
        words = self._words
        words[_WORD_GATES_NS] += spent_ns
        words[_WORD_GATES] += 1

    def count_record(self, size_bytes: int) -> None:
        """So large was the newest record."""
        self._words[_WORD_RECORD_SIZE] = size_bytes

    def sums(self) -> Sums:
        """What was counted so far."""
        words = self._words
        return Sums(
            steps=words[_WORD_STEPS_TIMED],
            steps_s=words[_WORD_STEPS_NS] / 1e9,
            gates=words[_WORD_GATES],
            gates_s=words[_WORD_GATES_NS] / 1e9,
            record_bytes=words[_WORD_RECORD_SIZE],
        )

    # ---- the end ------------------------------------------------------------------------------------

    @property
    def exit_status(self) -> int | None:
        """The status with which the process ended by itself; None when nothing was written (a signal)."""
        word = self._words[_WORD_EXIT]
        return None if word == _NO_EXIT else word & 0xFF

    @exit_status.setter
    def exit_status(self, status: int) -> None:
        self._words[_WORD_EXIT] = status & 0xFF

    @property
    def finished_step(self) -> int | None:
        """How many steps there were, once the worker has passed the last gate."""
        return self._words[_WORD_FINISHED] - 1 if self._words[_WORD_FINISHED] else None

    @finished_step.setter
    def finished_step(self, step: int) -> None:
        self._words[_WORD_FINISHED] = step + 1

    # ---- records ------------------------------------------------------------------------------------

    def write_record(self, kind: str, step: int, lineage: str, payload: bytes) -> None:
        """Keep one record. It replaces its namesake (same kind, step and lineage), else the oldest of four.

        A payload that is the same object as one written before costs neither a copy nor a sum. Raises ValueError
        (unknown kind, malformed lineage, payload too large) and OSError (no memory left).
        """
        kind_number = _KINDS.index(kind) if kind in _KINDS else -1
        if kind_number < 0:
            raise ValueError(f"a record is of kind 'start' or 'gate', not {kind!r}")
        if len(lineage) not in (0, 32):
            raise ValueError(f"a lineage has 32 hex digits or none, not {lineage!r}")
        length = len(payload)
        if length > self.record_bytes:
            raise ValueError(
                f"a record of {length} bytes does not fit: the page takes {self.record_bytes} bytes"
            )
        kept = self._kept
        if kept is None:
            kept = self._kept = self._survey()

        taken, slot = kept.values(), 0
        while slot in taken:
            slot += 1
        base = self._slots[slot]
        if length > self._reserved[slot]:
            self._reserve(slot, length)
        sequence = self._sequence + 1
        head = _SLOT_HEAD.pack(sequence, step, kind_number, bool(lineage), bytes.fromhex(lineage), length)

        view = self._bytes
        self._words[base >> 3] = 0  # invalid from here ...
        if self._payloads[slot] is not payload:
            self._payloads[slot] = None
            view[base + _PAYLOAD_AT : base + _PAYLOAD_AT + length] = payload
            self._payloads[slot] = payload
        if self._summed[0] is not payload:
            self._summed = (payload, zlib.crc32(payload))
        view[base + _HEAD_AT : base + _CRC_AT] = head
        crc = _SLOT_CRC.pack(zlib.crc32(head, self._summed[1]))
        view[base + _CRC_AT : base + _CRC_AT + _SLOT_CRC.size] = crc
        self._words[base >> 3] = sequence  # ... to here; the CRC also covers a CPU that reorders stores
        self._sequence = sequence

        key = (kind, step, lineage)
        retired = kept.pop(key, None)
        if retired is None and len(kept) == KEPT_RECORDS:
            retired = kept.pop(next(iter(kept)))
        if retired is not None:
            self._words[self._slots[retired] >> 3] = 0
        kept[key] = slot

    def records(self) -> list[Record]:
        """The whole records, newest first: at most four, one per (kind, step, lineage)."""
        return [record for _, record in self._valid()]

    def find(self, lineage: str, step: int) -> Record | None:
        """The record of this lineage and step; the one of kind "start" where both kinds are kept."""
        fitting = [record for record in self.records() if record.lineage == lineage and record.step == step]
        return min(fitting, key=lambda record: _KINDS.index(record.kind), default=None)

    def _survey(self) -> dict[tuple[str, int, str], int]:
        # The first write of this process: another one may have written before (the worker before a restart).
        valid = self._valid()
        self._sequence = max(self._words[base >> 3] for base in self._slots)
        return {(record.kind, record.step, record.lineage): slot for slot, record in reversed(valid)}

    def _valid(self) -> list[tuple[int, Record]]:
        found = [(slot, record) for slot in range(_SLOTS) if (record := self._read(slot)) is not None]
        found.sort(key=lambda entry: entry[1].sequence, reverse=True)
        newest: dict[tuple[str, int, str], tuple[int, Record]] = {}
        for slot, record in found:
            newest.setdefault((record.kind, record.step, record.lineage), (slot, record))
        return list(newest.values())[:KEPT_RECORDS]

    def _read(self, slot: int) -> Record | None:
        base, view = self._slots[slot], self._bytes
        sequence = self._words[base >> 3]
        if sequence == 0:
            return None
        head = bytes(view[base + _HEAD_AT : base + _CRC_AT])
        written, step, kind, has_lineage, lineage, length = _SLOT_HEAD.unpack(head)
        if written != sequence or length > self.record_bytes or kind >= len(_KINDS):
            return None
        payload = bytes(view[base + _PAYLOAD_AT : base + _PAYLOAD_AT + length])
        (crc,) = _SLOT_CRC.unpack_from(view, base + _CRC_AT)
        if zlib.crc32(head, zlib.crc32(payload)) != crc or self._words[base >> 3] != sequence:
            return None
        return Record(_KINDS[kind], step, lineage.hex() if has_lineage else "", payload, sequence)

    def _reserve(self, slot: int, length: int) -> None:
        # Writing into a hole of a full tmpfs is a SIGBUS; asking first is an OSError.
        wanted = min(-(-length // _GROWTH_BYTES) * _GROWTH_BYTES, self.record_bytes)
        os.posix_fallocate(self._descriptor, self._slots[slot], _PAYLOAD_AT + wanted)
        self._reserved[slot] = wanted


def _slot_bytes(record_bytes: int) -> int:
    return -(-(_PAYLOAD_AT + record_bytes) // _ALIGN) * _ALIGN


def _slot_offsets(record_bytes: int) -> tuple[int, ...]:
    return tuple(_SLOTS_AT + slot * _slot_bytes(record_bytes) for slot in range(_SLOTS))


def _file_bytes(record_bytes: int) -> int:
    return _SLOTS_AT + _SLOTS * _slot_bytes(record_bytes)

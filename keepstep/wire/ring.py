"""The last collectives of every group of one worker, in a shared-memory file beside its page.

The worker stores one entry as it enters a collective and one word when it learns that it has ended; the
agent reads whenever it likes, also after SIGKILL or SIGSTOP. Neither waits for the other. An entry that is
not marked as done may be done all the same: that is noted when somebody waits for it, not before.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.errors import WireError

KEPT_CALLS = 100
MAX_GROUPS = 256
LABEL_BYTES = 192
_LISTED_RANKS = 32

# What a group can be asked for, by code; the last ones are between two ranks and have no common number.
OPERATIONS = (
    "other",
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "broadcast",
    "barrier",
    "allgather",
    "allgather_coalesced",
    "gather",
    "all_gather_single",
    "_allgather_base",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "all_to_all_single",
    "alltoall_base",
    "alltoall",
    "send",
    "recv",
    "recv_anysource",
)
CODES = {name: code for code, name in enumerate(OPERATIONS)}
FIRST_PAIRED = CODES["send"]

_MAGIC = 0x3167_6E69_7270_656B  # "keprng1": the layout's version is its last letter
_WORD_MAGIC, _WORD_WORKER, _WORD_GROUPS = 0, 1, 2

_SLOTS = 128  # a power of two above KEPT_CALLS: an entry's place is one AND
_MASK = _SLOTS - 1
# An entry: generation and code, bytes, entered, ended (0: not known), number, and last its place in time.
_ENTRY = struct.Struct("6Q")  # native: each word is one aligned store
_ENTRY_WORDS = 6
_ENDED_AT = 3
_PLACE_AT = 5
_FAILED = 1 << 63

_SECTION_HEAD = struct.Struct("=16sQQQ")  # identity, size, rank in the group, label's length
_SECTION_HEAD_BYTES = 256
assert _SECTION_HEAD.size + LABEL_BYTES <= _SECTION_HEAD_BYTES
_SECTION_BYTES = _SECTION_HEAD_BYTES + _SLOTS * _ENTRY.size


@dataclass(frozen=True, slots=True)
class Call:
    """One collective. `sequence` counts those of the group since its generation connected, from 1.

    `ended_ns` is 0 while nobody has seen its end. `peer`: the other rank (of the group) of a send or
    receive, whose `sequence` is that of the collective before it; None for a collective.
    """

    sequence: int
    operation: str
    bytes: int
    generation: int
    entered_ns: int
    ended_ns: int
    failed: bool = False
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class GroupLog:
    """What one worker knows of one group: `identity` is the same at every member; oldest call first."""

    identity: str
    label: str
    size: int
    group_rank: int
    calls: tuple[Call, ...]

    def entered(self, generation: int) -> int:
        """How many collectives it has entered in that generation, or in a later one."""
        counts = [call.sequence for call in self.calls if call.generation == generation]
        return max(counts, default=0)


def ring_path(page_path: str) -> str:
    """Where the ring of a worker lies whose page is at `page_path`."""
    return os.path.splitext(page_path)[0] + ".ring"


def group_label(ranks: Sequence[int], ordinal: int) -> str:
    """A group for people: "0-1-2-3", a long one shortened, the second of the same ranks with "#1"."""
    text = "-".join(map(str, ranks[:_LISTED_RANKS]))
    if len(ranks) > _LISTED_RANKS:
        text = f"{ranks[0]}-{ranks[1]}-...-{ranks[-1]} ({len(ranks)} ranks)"
    return f"{text}#{ordinal}" if ordinal else text


# ---- the worker's side ----------------------------------------------------------------------------


class GroupRing:
    """The ring of one group. `enter` and the marks take well under a microsecond; nothing is checked."""

    __slots__ = ("_buffer", "_entries_at", "_generation", "_place", "_section_at", "_sequence", "_words")

    def __init__(self, buffer: memoryview, words: memoryview, section_at: int) -> None:
        self._buffer = buffer
        self._words = words
        self._section_at = section_at
        self._entries_at = section_at + _SECTION_HEAD_BYTES
        self._place = 0
        self._sequence = 0
        self._generation = 0

    def begin(self, generation: int, key: str, label: str, size: int, group_rank: int) -> None:
        """The group is connected for a generation: numbers start again, older entries stay."""
        text = label.encode("utf-8", "replace")[:LABEL_BYTES]
        identity = hashlib.blake2b(key.encode(), digest_size=16).digest()
        head = _SECTION_HEAD.pack(identity, size, group_rank, len(text))
        at = self._section_at
        self._buffer[at : at + len(head)] = head
        self._buffer[at + len(head) : at + len(head) + len(text)] = text
        self._sequence = 0
        self._generation = generation << 32

    def enter(self, code: int, byte_count: int, peer: int = 0) -> int:
        """A collective begins. Returns the place of its entry, for `ended` and `failed`."""
        self._place = place = self._place + 1
        if code < FIRST_PAIRED:
            self._sequence += 1
        else:
            code |= (peer + 1) << 8
        at = self._entries_at + (place & _MASK) * _ENTRY.size
        _ENTRY.pack_into(
            self._buffer,
            at,
            self._generation | code,
            byte_count,
            time.monotonic_ns(),
            0,
            self._sequence,
            place,
        )
        return place

    def ended(self, place: int) -> None:
        """It has ended well."""
        at = (self._entries_at >> 3) + (place & _MASK) * _ENTRY_WORDS
        if self._words[at + _PLACE_AT] == place:
            self._words[at + _ENDED_AT] = time.monotonic_ns()

    def failed(self, place: int) -> None:
        """It has ended in an error: a peer or its connection is gone."""
        at = (self._entries_at >> 3) + (place & _MASK) * _ENTRY_WORDS
        if self._words[at + _PLACE_AT] == place:
            self._words[at + _ENDED_AT] = time.monotonic_ns() | _FAILED


class Ring:
    """The file. `create` is the worker's, `open` the agent's."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, size)
        self._bytes = memoryview(self._map)
        self._words = self._bytes.cast("Q")

    @classmethod
    def create(cls, path: str, worker: int) -> Ring:
        """Make the file anew, readable by its owner only. Raises OSError."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            size = mmap.PAGESIZE + MAX_GROUPS * _SECTION_BYTES
            os.ftruncate(descriptor, size)
            os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)  # a full file system: an error, no SIGBUS later
            ring = cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        ring._words[_WORD_WORKER] = worker
        ring._words[_WORD_MAGIC] = _MAGIC
        return ring

    @classmethod
    def open(cls, path: str) -> Ring:
        """Map an existing ring. Raises OSError, and WireError when the file is none of this version."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            magic = os.pread(descriptor, 8, 0)
            if size != mmap.PAGESIZE + MAX_GROUPS * _SECTION_BYTES or magic != struct.pack("=Q", _MAGIC):
                raise WireError(f"{path}: not a ring of this version of Keepstep")
            return cls(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    def add_group(self) -> GroupRing | None:
        """Room for one group more; None when there is none left (it then goes unrecorded)."""
        number = self._words[_WORD_GROUPS]
        if number >= MAX_GROUPS:
            return None
        at = mmap.PAGESIZE + number * _SECTION_BYTES
        try:
            os.posix_fallocate(self._descriptor, at, _SECTION_BYTES)
        except OSError:
            return None
        self._words[_WORD_GROUPS] = number + 1
        return GroupRing(self._bytes, self._words, at)

    def copy(self) -> bytes:
        """Everything as it stands now: one copy of memory. `read` makes sense of it, later."""
        groups = min(self._words[_WORD_GROUPS], MAX_GROUPS)
        return bytes(self._bytes[: mmap.PAGESIZE + groups * _SECTION_BYTES])

    def close(self) -> None:
        """Unmap. Rings of groups that still write keep the memory until they are gone."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        try:
            self._words.release()
            self._bytes.release()
            self._map.close()
        except BufferError:
            pass


# ---- the reader's side ----------------------------------------------------------------------------


def read(copied: bytes) -> list[GroupLog]:
    """The groups in a copy of a ring, with their last KEPT_CALLS calls. Rubbish gives fewer, never an error."""
    sections = (len(copied) - mmap.PAGESIZE) // _SECTION_BYTES
    logs = [_read_section(copied, mmap.PAGESIZE + n * _SECTION_BYTES) for n in range(max(0, sections))]
    return [log for log in logs if log.size]  # without a size: made, and never connected


def waited_ns(copied: bytes, now_ns: int) -> int:
    """How long the newest call of any group has lasted: until now, if its end is not known, or until it failed.

    0 when it has ended well, or when there was none.
    """
    newest, ended = 0, 0
    for at in range(mmap.PAGESIZE + _SECTION_HEAD_BYTES, len(copied), _SECTION_BYTES):
        for _, _, entered, end, _, place in _ENTRY.iter_unpack(copied[at : at + _SLOTS * _ENTRY.size]):
            if place and entered > newest:
                newest, ended = entered, end
    if ended & _FAILED:
        return (ended & ~_FAILED) - newest
    return now_ns - newest if newest and not ended else 0


def _read_section(copied: bytes, at: int) -> GroupLog:
    identity, size, group_rank, length = _SECTION_HEAD.unpack_from(copied, at)
    label_at = at + _SECTION_HEAD.size
    label = copied[label_at : label_at + min(length, LABEL_BYTES)].decode("utf-8", "replace")
    entries_at = at + _SECTION_HEAD_BYTES
    entries = sorted(
        (
            entry
            for entry in _ENTRY.iter_unpack(copied[entries_at : entries_at + _SLOTS * _ENTRY.size])
            if entry[_PLACE_AT]
        ),
        key=lambda entry: entry[_PLACE_AT],
    )
    return GroupLog(identity.hex(), label, size, group_rank, tuple(map(_call, entries[-KEPT_CALLS:])))


def _call(entry: tuple[int, ...]) -> Call:
    packed, byte_count, entered_ns, ended_ns, sequence, _ = entry
    code = packed & 0xFF
    peer = (packed >> 8 & 0xFFFFFF) - 1
    return Call(
        sequence=sequence,
        operation=OPERATIONS[code] if code < len(OPERATIONS) else "other",
        bytes=byte_count,
        generation=packed >> 32,
        entered_ns=entered_ns,
        ended_ns=ended_ns & ~_FAILED,
        failed=bool(ended_ns & _FAILED),
        peer=peer if code >= FIRST_PAIRED else None,
    )

"""The checksum of one chunk: row and column sums of its words, and a CRC over the sums.

A CRC over the data itself would be the textbook's choice, but it is slower than loopback TCP and would be
the bottleneck of every copy (GB/s, one core, measured by `benchmarks/transfer.py`): zlib.crc32 3-4, sha256
1.8, blake2b 0.9, this one 15-20, where a bare TCP stream does 4.

Words of 8 bytes stand in blocks of 128 columns. A change of one, two or three words always changes a row's
or a column's sum (a plain sum would miss a bit that flips up in one word and down in another; so does moved
data); four changed words can hide only as a rectangle whose changes cancel exactly. What changes a sum is
missed by the CRC once in 2**32 times. It guards against faulty machines, not against forgers: those lack
the token.
"""

from __future__ import annotations

import zlib

import torch

_SMALL_BYTES = 16 << 10  # below, a CRC over the data itself is the faster one
_COLUMNS = 128
_ROW_BYTES = 8 * _COLUMNS
# Fewer words than torch's grain (32768): a sum of one block never wakes torch's thread pool, which would make
# one more pool for every connection and take the cores from the training beside it. Without a pool (Keepstep
# starts workers with OMP_NUM_THREADS=1) all blocks are summed by one call.
BLOCK_ROWS = 224
BLOCK_BYTES = BLOCK_ROWS * _ROW_BYTES


def checksum(data: memoryview) -> int:
    """32 bits over bytes of any length; both ends must have the same byte order."""
    if len(data) < _SMALL_BYTES:
        return zlib.crc32(data)
    whole = len(data) // _ROW_BYTES
    crc = zlib.crc32(data[whole * _ROW_BYTES :])
    blocks = -(-whole // BLOCK_ROWS)
    sums = bytearray(8 * (whole + blocks * _COLUMNS))  # of all rows, then of each block's columns
    words = torch.frombuffer(data, dtype=torch.int64, count=whole * _COLUMNS).view(whole, _COLUMNS)
    out = torch.frombuffer(sums, dtype=torch.int64)
    of_rows, of_columns = out[:whole], out[whole:].view(blocks, _COLUMNS)
    first = 0
    if torch.get_num_threads() == 1 and (full := whole // BLOCK_ROWS):
        first = full * BLOCK_ROWS
        torch.sum(words[:first], 1, out=of_rows[:first])
        torch.sum(words[:first].view(full, BLOCK_ROWS, _COLUMNS), 1, out=of_columns[:full])
    for row in range(first, whole, BLOCK_ROWS):
        block = words[row : row + BLOCK_ROWS]
        torch.sum(block, 1, out=of_rows[row : row + BLOCK_ROWS])
        torch.sum(block, 0, out=of_columns[row // BLOCK_ROWS])
    return zlib.crc32(sums, crc)

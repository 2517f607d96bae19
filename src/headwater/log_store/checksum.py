"""A checksum of many bytes, for a tenth of what a CRC of all of them costs. Pure.

The bytes are a table of 64-bit little-endian words, 509 in a row; what is left over at the end is no row. The checksum
is the CRC-32 of the sum of each column (modulo 2⁶⁴, u64 each) and of the bytes left over. A word that changed changes
its column's sum; as 509 is a prime, pages that were lost, exchanged or moved have their words in other columns.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

_WORDS = 509
_ROW = 8 * _WORDS


def checksum(data: Any) -> int:
    """The checksum of a buffer."""
    size = len(data) // _ROW * _ROW
    found = 0
    if size:
        found = zlib.crc32(np.add.reduce(np.frombuffer(data, "<u8", size // 8).reshape(-1, _WORDS), axis=0))
    return zlib.crc32(memoryview(data)[size:], found)

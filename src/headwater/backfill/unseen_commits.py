"""Commits that the log has and no snapshot has shown yet, by one position each. Pure.

The first eight bytes of a position are the number of its commit; within a commit any position will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.sources.snapshots import SnapshotMark


def still_unseen(known: Sequence[str], fresh: pa.ChunkedArray | None, mark: SnapshotMark | None) -> list[str]:
    """Those of *known* and of the commits of *fresh* positions that *mark* does not show; without one: all of them."""
    found = [bytes.fromhex(text) for text in known]
    if fresh is not None and len(fresh):
        found += _one_per_commit(fresh)
    if mark is not None and found:
        asked = pa.array(found, pa.binary(len(found[0])))
        found = [position for position, is_unseen in zip(found, mark.unseen(asked), strict=True) if is_unseen]
    return [position.hex() for position in found]


def greatest(positions: pa.ChunkedArray) -> str:
    """The newest of *positions*, as text."""
    found: bytes = max(_last(chunk) for chunk in positions.chunks if len(chunk))
    return found.hex()


def _words(chunk: pa.FixedSizeBinaryArray) -> np.ndarray[Any, np.dtype[Any]]:
    width = chunk.type.byte_width
    return np.frombuffer(chunk.buffers()[1], f"V{width}", len(chunk), chunk.offset * width)


def _numbers(chunk: pa.FixedSizeBinaryArray) -> np.ndarray[Any, np.dtype[Any]]:
    numbers: np.ndarray[Any, np.dtype[Any]] = _words(chunk).view(">u8").reshape(len(chunk), -1)[:, 0]
    return numbers


def _last(chunk: pa.FixedSizeBinaryArray) -> bytes:
    return bytes(_words(chunk)[int(np.argmax(_numbers(chunk)))])


def _one_per_commit(positions: pa.ChunkedArray) -> list[bytes]:
    found: list[bytes] = []
    for chunk in positions.chunks:
        if len(chunk):
            _, places = np.unique(_numbers(chunk), return_index=True)
            words = _words(chunk)
            found += [bytes(words[place]) for place in places]
    return found

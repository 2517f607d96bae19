"""Which rows of a change log a downstream takes, for all rows of a chunk at once. Pure.

A downstream may have a part of the keys only, and an owner has its own vnodes. A change whose key lies outside is left
out; an update of which one half is left out is a delete or an insert of the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.backfill.cdc.mark import without_broken_pairs
from headwater.stream import Chunk, VnodeBitmap


@dataclass(frozen=True, slots=True)
class KeySpan:
    """The keys in ``[start, stop)`` as memcomparable bytes; ``None`` is open."""

    start: bytes | None = None
    stop: bytes | None = None

    def contains(self, keys: pa.BinaryArray) -> NDArray[np.bool_]:
        """For each of *keys*: whether it lies inside."""
        keep = np.ones(len(keys), np.bool_)
        if self.start is not None:
            keep &= pc.greater_equal(keys, pa.scalar(self.start, keys.type)).to_numpy(zero_copy_only=False)
        if self.stop is not None:
            keep &= pc.less(keys, pa.scalar(self.stop, keys.type)).to_numpy(zero_copy_only=False)
        return keep


ALL_KEYS = KeySpan()


def mark_chunk(
    chunk: Chunk, keys: pa.BinaryArray, span: KeySpan = ALL_KEYS, vnodes: VnodeBitmap | None = None
) -> NDArray[np.bool_]:
    """For each row of *chunk*, whose keys are *keys*: whether it is taken."""
    keep = span.contains(keys)
    if vnodes is not None and not vnodes.is_full:
        keep &= vnodes.mask_of(chunk.vnodes)
    return keep


def apply_mark(chunk: Chunk, keep: NDArray[np.bool_]) -> Chunk:
    """The rows of *chunk* that are taken; half an update is a delete or an insert."""
    if keep.all():
        return chunk
    ops = without_broken_pairs(chunk.ops.to_numpy(), keep)
    chosen = pa.array(keep)
    return Chunk(chunk.rows.filter(chosen), pa.array(ops, pa.int8()).filter(chosen), chunk.vnodes.filter(chosen))

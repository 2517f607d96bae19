"""Vnode index: where each vnode's rows are in a chunk that is sorted by vnode.

Sparse: only vnodes that have rows are listed, so the index of a small chunk is small whatever the vnode count.
Rows of ``vnodes[i]`` are ``starts[i]`` up to ``starts[i + 1]``. Rows of neighbouring vnodes touch, so a contiguous
range of vnodes is one slice of the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headwater.stream.bitmap import VnodeBitmap
from headwater.stream.errors import ChunkError


@dataclass(frozen=True, slots=True, eq=False)
class VnodeIndex:
    """The offsets of a sorted chunk.

    :ivar vnodes: the vnodes that have rows, increasing.
    :ivar starts: the first row of each, and the number of rows as the last element.
    :raises ChunkError: the arrays are not such an index.
    """

    vnodes: NDArray[np.uint16]
    starts: NDArray[np.int32]

    def __post_init__(self) -> None:
        vnodes, starts = self.vnodes, self.starts
        if (
            vnodes.dtype != np.uint16
            or starts.dtype != np.int32
            or starts.size != vnodes.size + 1
            or starts[0] != 0
            or not (vnodes[1:] > vnodes[:-1]).all()
            or not (starts[1:] > starts[:-1]).all()
        ):
            raise ChunkError(
                "Received a vnode index whose vnodes or starts do not increase or do not fit together.",
                next_step="Make the index with Chunk.sort_by_vnode().",
            )

    @classmethod
    def of(cls, vnodes: NDArray[np.uint16]) -> VnodeIndex:
        """The index of rows with these vnodes.

        :raises ChunkError: the vnodes are not sorted.
        """
        firsts = np.flatnonzero(vnodes[1:] != vnodes[:-1]) + 1
        starts = np.concatenate([[0] if vnodes.size else [], firsts, [vnodes.size]]).astype(np.int32)
        return cls(vnodes[starts[:-1]], starts)

    @property
    def num_rows(self) -> int:
        """The number of rows of the chunk."""
        return int(self.starts[-1])

    def rows_of(self, vnodes: range) -> range:
        """The rows of a contiguous range of vnodes; an empty range if none of them has rows.

        :raises ChunkError: the range has a step.
        """
        if vnodes.step != 1:
            raise ChunkError("Received a range with a step.", next_step="Use rows_in() with a bitmap.")
        first, last = np.searchsorted(self.vnodes, [vnodes.start, max(vnodes.start, vnodes.stop)]).tolist()
        return range(int(self.starts[first]), int(self.starts[last]))

    def rows_in(self, bitmap: VnodeBitmap) -> tuple[range, ...]:
        """The rows of a set of vnodes as runs that do not touch.

        :raises VnodeRangeError: a vnode of the index is not below the bitmap's count.
        """
        owned = bitmap.mask_of(self.vnodes)
        edges = np.flatnonzero(np.diff(owned.view(np.int8), prepend=0, append=0))
        bounds = self.starts[edges].tolist()
        return tuple(range(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VnodeIndex):
            return NotImplemented
        return np.array_equal(self.vnodes, other.vnodes) and np.array_equal(self.starts, other.starts)

    __hash__ = None  # type: ignore[assignment]

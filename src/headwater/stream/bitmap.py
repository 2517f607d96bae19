"""Vnode bitmap: the set of vnodes that one reader or writer owns.

A bitmap is an immutable set of vnodes below a vnode count. Bitmaps of one count combine with ``|``, ``&``, ``-`` and
``~``; the bitmaps of all owners of a table are disjoint and together full. Ownership is mostly contiguous, so a
bitmap reads and writes itself as ranges.

Two forms: :meth:`VnodeBitmap.to_hex`, one bit per vnode, vnode 0 the lowest bit of the first byte; and
:meth:`VnodeBitmap.to_json`, ``{"count": 256, "ranges": [[0, 128]]}`` with half-open ranges, or, for more than
:data:`MAX_JSON_RANGES` ranges, ``{"count": 256, "hex": "…"}``. Equal bitmaps have equal texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headwater.errors import InputError
from headwater.stream.errors import BitmapError, ChunkError, FormatError, VnodeRangeError
from headwater.stream.vnode import DEFAULT_VNODE_COUNT, check_vnode_count

MAX_JSON_RANGES: Final = 8


@dataclass(frozen=True, slots=True, repr=False)
class VnodeBitmap:
    """A set of vnodes.

    Make one with :meth:`full`, :meth:`empty`, :meth:`of` or :meth:`from_ranges`.

    :ivar count: the vnode count; vnodes are below it.
    :ivar bits: bit *v* is set if vnode *v* is in the set.
    :raises VnodeCountError: a bad count.
    :raises VnodeRangeError: a bit at or above the count.
    """

    count: int
    bits: int

    def __post_init__(self) -> None:
        check_vnode_count(self.count)
        if self.bits < 0:
            raise BitmapError("Received negative bits.", next_step="Make bitmaps with VnodeBitmap.of().")
        if self.bits >> self.count:
            raise VnodeRangeError(self.bits.bit_length() - 1, self.count)

    @classmethod
    def full(cls, count: int = DEFAULT_VNODE_COUNT) -> VnodeBitmap:
        """All vnodes."""
        return cls(count, (1 << check_vnode_count(count)) - 1)

    @classmethod
    def empty(cls, count: int = DEFAULT_VNODE_COUNT) -> VnodeBitmap:
        """No vnode."""
        return cls(count, 0)

    @classmethod
    def of(cls, vnodes: Iterable[int], count: int = DEFAULT_VNODE_COUNT) -> VnodeBitmap:
        """The given vnodes; repeats do not matter.

        :raises VnodeRangeError: a vnode that is negative or not below *count*.
        """
        return cls.from_ranges((range(int(vnode), int(vnode) + 1) for vnode in vnodes), count)

    @classmethod
    def from_ranges(cls, ranges: Iterable[range], count: int = DEFAULT_VNODE_COUNT) -> VnodeBitmap:
        """The vnodes of half-open ranges, which may touch, overlap or be empty.

        :raises VnodeRangeError: a range that reaches outside 0…*count*.
        :raises BitmapError: a range with a step.
        """
        check_vnode_count(count)
        bits = 0
        for part in ranges:
            if part.step != 1:
                raise BitmapError(
                    f"Received a range with step {part.step}; valid is 1.",
                    next_step="Use VnodeBitmap.of() for vnodes that are not contiguous.",
                )
            if len(part) == 0:
                continue
            if part.start < 0 or part.stop > count:
                raise VnodeRangeError(part.start if part.start < 0 else part.stop - 1, count)
            bits |= ((1 << len(part)) - 1) << part.start
        return cls(count, bits)

    @classmethod
    def from_mask(cls, mask: NDArray[np.bool_]) -> VnodeBitmap:
        """The vnodes whose place in *mask* is true; the count is its length."""
        packed = np.packbits(np.asarray(mask, dtype=np.bool_), bitorder="little")
        return cls(len(mask), int.from_bytes(packed.tobytes(), "little"))

    def __contains__(self, vnode: object) -> bool:
        return isinstance(vnode, int | np.integer) and int(vnode) >= 0 and bool(self.bits >> int(vnode) & 1)

    def __len__(self) -> int:
        return self.bits.bit_count()

    def __bool__(self) -> bool:
        return self.bits != 0

    def __iter__(self) -> Iterator[int]:
        for part in self.ranges():
            yield from part

    def __or__(self, other: VnodeBitmap) -> VnodeBitmap:
        return VnodeBitmap(self._same_count(other), self.bits | other.bits)

    def __and__(self, other: VnodeBitmap) -> VnodeBitmap:
        return VnodeBitmap(self._same_count(other), self.bits & other.bits)

    def __sub__(self, other: VnodeBitmap) -> VnodeBitmap:
        return VnodeBitmap(self._same_count(other), self.bits & ~other.bits)

    def __xor__(self, other: VnodeBitmap) -> VnodeBitmap:
        return VnodeBitmap(self._same_count(other), self.bits ^ other.bits)

    def __invert__(self) -> VnodeBitmap:
        return VnodeBitmap(self.count, self.bits ^ ((1 << self.count) - 1))

    def __le__(self, other: VnodeBitmap) -> bool:
        """Whether every vnode of this one is in *other*."""
        self._same_count(other)
        return self.bits & ~other.bits == 0

    def isdisjoint(self, other: VnodeBitmap) -> bool:
        """Whether no vnode is in both.

        :raises BitmapError: the counts differ.
        """
        self._same_count(other)
        return self.bits & other.bits == 0

    @property
    def is_full(self) -> bool:
        """Whether every vnode below the count is in the set."""
        return len(self) == self.count

    def ranges(self) -> tuple[range, ...]:
        """The runs of contiguous vnodes, half-open, in order; none touch."""
        edges = np.flatnonzero(np.diff(self.mask().view(np.int8), prepend=0, append=0)).tolist()
        return tuple(range(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True))

    def mask(self) -> NDArray[np.bool_]:
        """One bool per vnode below the count."""
        packed = np.frombuffer(self.to_bytes(), dtype=np.uint8)
        return np.unpackbits(packed, count=self.count, bitorder="little").view(np.bool_)

    def mask_of(self, vnodes: Any) -> NDArray[np.bool_]:
        """For each of *vnodes* (an Arrow or numpy uint16 array), whether it is in the set.

        :raises VnodeRangeError: a vnode at or above the count.
        :raises BitmapError: a null.
        """
        if getattr(vnodes, "null_count", 0):
            raise BitmapError("Received vnodes with nulls.", next_step="Every row has a vnode: vnodes_of().")
        places = np.asarray(vnodes)
        if places.size and int(places.max()) >= self.count:
            raise VnodeRangeError(int(places.max()), self.count)
        owned: NDArray[np.bool_] = self.mask()[places]
        return owned

    def split(self, parts: int) -> tuple[VnodeBitmap, ...]:
        """*parts* disjoint bitmaps that together are this one, each contiguous within it.

        Their sizes differ by at most one, the larger ones first; with more parts than vnodes the last are empty.

        :raises BitmapError: *parts* is not positive.
        """
        if parts < 1:
            raise BitmapError(f"Received {parts} parts.", next_step="Split into 1 part or more.")
        owned = np.flatnonzero(self.mask())
        masks = []
        for piece in np.array_split(owned, parts):
            mask = np.zeros(self.count, dtype=np.bool_)
            mask[piece] = True
            masks.append(VnodeBitmap.from_mask(mask))
        return tuple(masks)

    def to_bytes(self) -> bytes:
        """One bit per vnode, vnode 0 the lowest bit of the first byte."""
        return self.bits.to_bytes((self.count + 7) // 8, "little")

    def to_hex(self) -> str:
        """:meth:`to_bytes` in hexadecimal."""
        return self.to_bytes().hex()

    @classmethod
    def from_hex(cls, text: str, count: int = DEFAULT_VNODE_COUNT) -> VnodeBitmap:
        """The inverse of :meth:`to_hex`.

        :raises BitmapError: not hexadecimal, or not the length of *count* vnodes.
        :raises VnodeRangeError: a bit at or above *count*.
        """
        wanted = 2 * ((check_vnode_count(count) + 7) // 8)
        try:
            # fromhex skips blanks: their length would not be noticed.
            packed = bytes.fromhex(text) if len(text) == wanted else b""
        except ValueError:
            packed = b""
        if 2 * len(packed) != wanted:
            raise BitmapError(
                f"Received {len(text)} characters for {count} vnodes; valid are {wanted} hexadecimal digits.",
                next_step="Use the count that the bitmap was written with.",
            )
        return cls(count, int.from_bytes(packed, "little"))

    def to_json(self) -> dict[str, Any]:
        """A value for :func:`json.dumps`, small for contiguous sets."""
        ranges = self.ranges()
        if len(ranges) > MAX_JSON_RANGES:
            return {"count": self.count, "hex": self.to_hex()}
        return {"count": self.count, "ranges": [[part.start, part.stop] for part in ranges]}

    @classmethod
    def from_json(cls, value: Any) -> VnodeBitmap:
        """The inverse of :meth:`to_json`.

        :raises FormatError: another shape.
        :raises VnodeCountError, VnodeRangeError, BitmapError: as the other constructors.
        """
        try:
            count = value["count"]
            if "hex" in value:
                return cls.from_hex(value["hex"], count)
            return cls.from_ranges((range(start, stop) for start, stop in value["ranges"]), count)
        except (KeyError, TypeError) as error:
            raise FormatError("VnodeBitmap", f"{type(error).__name__} in its fields") from None
        except InputError:
            raise
        except ValueError:
            raise FormatError("VnodeBitmap", "its fields are of another shape") from None

    def __repr__(self) -> str:
        ranges = ", ".join(f"{r.start}" if len(r) == 1 else f"{r.start}–{r.stop - 1}" for r in self.ranges())
        return f"VnodeBitmap({ranges or 'empty'} of {self.count})"

    def _same_count(self, other: VnodeBitmap) -> int:
        if self.count != other.count:
            raise BitmapError(
                f"Received bitmaps of {self.count} and of {other.count} vnodes.",
                next_step="Combine bitmaps of one table only.",
            )
        return self.count


@dataclass(frozen=True, slots=True, eq=False)
class VnodeIndex:
    """Where each vnode's rows are in a chunk that is sorted by vnode.

    Sparse: only vnodes that have rows are listed, so the index of a small chunk is small whatever the vnode count.
    Rows of ``vnodes[i]`` are ``starts[i]`` up to ``starts[i + 1]``. Rows of neighbouring vnodes touch, so a contiguous
    range of vnodes is one slice of the chunk.

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

"""Digests: what two tables are compared by. One record per key: how many rows it has, and the sum of their hashes.

Both sides are brought to the same types first, so that equal rows have equal digests whatever holds them. Digests are
kept in files by ranges of the key's hash: a table of any size is compared in the memory of one such range.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from headwater.stream.vnode import hash_keys

ROW: Final = np.dtype([("key", "<u8"), ("row", "<u8"), ("split", "<u4")])
KEY: Final = np.dtype([("key", "<u8"), ("rows", "<u4"), ("sum", "<u8"), ("split", "<u4")])
PAIR: Final = np.dtype(
    [("key", "<u8"), ("split", "<u4"), ("rows", "<u4"), ("sum", "<u8"), ("rows_there", "<u4"), ("sum_there", "<u8")]
)
ROWS_PER_PART: Final = 4_000_000

Digests: TypeAlias = NDArray[np.void]
"""Records of :data:`ROW`, one per row; of :data:`KEY`, one per key; or of :data:`PAIR`, one per key of two sides."""
Hashes: TypeAlias = NDArray[np.uint64]


def digests_of(rows: pa.RecordBatch, key_columns: tuple[str, ...], split: int = 0) -> Digests:
    """The digest of each row."""
    hashable = pa.RecordBatch.from_arrays([_hashable(column) for column in rows.columns], names=rows.schema.names)
    made = np.empty(rows.num_rows, ROW)
    made["key"] = hash_keys(hashable, key_columns)
    made["row"] = hash_keys(hashable, rows.schema.names)
    made["split"] = split
    return made


def _hashable(column: Any) -> Any:
    """*column*, or a number for each of its values where they are made of others."""
    if pt.is_list(column.type) or pt.is_large_list(column.type):
        return _of_lists(column)
    if pt.is_struct(column.type):
        fields = [_hashable(field) for field in column.flatten()]
        names = [str(place) for place in range(len(fields))]
        return _with_nulls(hash_keys(pa.RecordBatch.from_arrays(fields, names=names), names), column)
    return column


def _of_lists(column: Any) -> Any:
    offsets = column.offsets.to_numpy().astype(np.int64)
    first = int(offsets[0]) if len(offsets) else 0
    values = _hashable(column.values.slice(first, int(offsets[-1]) - first if len(offsets) else 0))
    offsets = offsets - first
    lengths = np.diff(offsets)
    places = np.arange(len(values), dtype=np.int64) - np.repeat(offsets[:-1], lengths)
    elements = hash_keys(
        pa.RecordBatch.from_arrays([values, pa.array(places)], names=["value", "place"]), ["value", "place"]
    )
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(elements, dtype=np.uint64)])
    return _with_nulls(sums[offsets[1:]] - sums[offsets[:-1]] + lengths.astype(np.uint64), column)


def _with_nulls(hashes: Hashes, column: Any) -> Any:
    return pa.array(hashes, mask=column.is_null().to_numpy(zero_copy_only=False))


class DigestFiles:
    """Digests of the rows of one side, in *parts* files by the hash of their key."""

    def __init__(self, folder: Path, parts: int) -> None:
        self.rows = 0
        folder.mkdir()
        self._paths = [folder / str(part) for part in range(parts)]
        self._open = ExitStack()
        self._files = [self._open.enter_context(path.open("wb")) for path in self._paths]

    def add(self, digests: Digests) -> None:
        """Keep more of them."""
        self.rows += len(digests)
        if len(self._files) == 1:
            self._files[0].write(digests.tobytes())
            return
        parts = ((digests["key"] >> np.uint64(32)) * np.uint64(len(self._files))) >> np.uint64(32)
        order = np.argsort(parts, kind="stable")
        ends = np.searchsorted(parts[order], np.arange(len(self._files) + 1))
        ordered = digests[order]
        for file, start, end in zip(self._files, ends[:-1], ends[1:], strict=True):
            file.write(ordered[start:end].tobytes())

    def close(self) -> None:
        """No more are added."""
        self._open.close()

    def part(self, number: int) -> Digests:
        """Those of one file, by key."""
        return by_key(np.fromfile(self._paths[number], ROW))


def by_key(rows: Digests) -> Digests:
    """One record per key, in the order of their hashes."""
    ordered = rows[np.argsort(rows["key"], kind="stable")]
    if not len(ordered):
        return np.empty(0, KEY)
    starts = np.flatnonzero(np.concatenate([[True], ordered["key"][1:] != ordered["key"][:-1]]))
    made = np.empty(len(starts), KEY)
    made["key"] = ordered["key"][starts]
    made["split"] = ordered["split"][starts]
    made["rows"] = np.diff(np.concatenate([starts, [len(ordered)]]))
    made["sum"] = np.add.reduceat(ordered["row"], starts)
    return made


def pairs(here: Digests, there: Digests) -> Digests:
    """Every key of both sides, each a record per key, with what both have of it."""
    keys = np.union1d(here["key"], there["key"])
    made = np.zeros(len(keys), PAIR)
    made["key"] = keys
    places = np.searchsorted(keys, here["key"])
    made["split"][places], made["rows"][places], made["sum"][places] = here["split"], here["rows"], here["sum"]
    places = np.searchsorted(keys, there["key"])
    made["rows_there"][places], made["sum_there"][places] = there["rows"], there["sum"]
    return made


def differing(here: Digests, there: Digests) -> Digests:
    """The pairs of those keys of which the sides do not have the same."""
    keys, others = here["key"].copy(), there["key"].copy()
    places = np.minimum(np.searchsorted(others, keys), max(len(others) - 1, 0))
    same = np.zeros(len(keys), np.bool_)
    if len(others):
        twins = there[places]
        same = (others[places] == keys) & (twins["rows"] == here["rows"]) & (twins["sum"] == here["sum"])
    left = np.ones(len(others), np.bool_)
    left[places[same]] = False
    return pairs(here[~same], there[left])

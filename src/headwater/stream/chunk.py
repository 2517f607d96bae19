"""Chunk: rows of one epoch with what happened to each of them.

A chunk is an Arrow RecordBatch, one :class:`~headwater.stream.op.Op` per row and one vnode per row. It never spans
epochs, and whatever is done to it, an update pair stays together: both halves in one chunk, next to each other,
in the same vnode. An update that changes the key is not a pair but a delete and an insert. An ``UPDATE_DELETE`` never
stands alone. An ``UPDATE_INSERT`` does where the source told the new row only, as a Postgres table does that logs no
old rows.

Nothing here runs Python per row, and slices share the memory of their chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.stream.errors import ChunkError
from headwater.stream.key_column import plain
from headwater.stream.op import Op
from headwater.stream.vnode import (
    DEFAULT_VNODE_COUNT,
    MAX_VNODE_COUNT,
    key_columns_of,
    vnodes_of,
)

# Members of an enum are looked up slowly, and a chunk may have one row only.
_UPDATE_INSERT = int(Op.UPDATE_INSERT)
_UPDATE_DELETE = int(Op.UPDATE_DELETE)


def _first(mask: NDArray[np.bool_]) -> int | None:
    place = int(mask.argmax()) if mask.size else 0
    return place if mask.size and mask[place] else None


def check_ops(codes: NDArray[np.int8]) -> None:
    """Check the codes and that every ``UPDATE_DELETE`` has its ``UPDATE_INSERT`` next to it.

    An ``UPDATE_INSERT`` stands alone where the source sent the new row only, as a Postgres table does that logs no old
    rows.

    :raises ChunkError: ``row`` is the index of the first row that is wrong.
    """
    row = _first((codes < 1) | (codes > _UPDATE_DELETE))
    if row is not None:
        raise ChunkError(
            f"Row {row} has op code {codes[row]}; valid values are "
            + ", ".join(f"{op.value} ({op.name.lower()})" for op in Op)
            + ".",
            row=row,
            next_step="Map the source's operation to an Op.",
        )
    if codes.max(initial=0) < _UPDATE_INSERT:
        return
    opens = codes == _UPDATE_DELETE
    row = _first(opens & ~np.append(codes[1:] == _UPDATE_INSERT, False))
    if row is not None:
        raise ChunkError(
            f"Row {row} is an update_delete that no update_insert follows.",
            row=row,
            next_step="Keep both halves of an update together, or send delete and insert instead.",
        )


def check_vnodes_of_pairs(codes: NDArray[np.int8], vnodes: NDArray[np.uint16]) -> None:
    """Check that both halves of each pair have one vnode.

    :raises ChunkError: ``row`` is the index of the first half.
    """
    apart = (codes[:-1] == _UPDATE_DELETE) & (vnodes[:-1] != vnodes[1:])
    row = _first(apart)
    if row is not None:
        raise ChunkError(
            f"Rows {row} and {row + 1} are an update pair with the vnodes {vnodes[row]} and {vnodes[row + 1]}.",
            row=row,
            next_step="Build the chunk with Chunk.build(), which makes it a delete and an insert.",
        )


def without_key_changes(codes: NDArray[np.int8], key: Mapping[str, Any]) -> NDArray[np.int8]:
    """*codes* with each update pair whose halves have different keys turned into a delete and an insert.

    Keys are different if the values are: a change below the microsecond that the hash does not see is one.
    """
    firsts = np.flatnonzero(codes == _UPDATE_DELETE)
    if not firsts.size:
        return codes
    changed = np.zeros(firsts.size, dtype=np.bool_)
    for column in key.values():
        changed |= ~_same(column, firsts)
    if not changed.any():
        return codes
    codes = codes.copy()
    codes[firsts[changed]] = Op.DELETE
    codes[firsts[changed] + 1] = Op.INSERT
    return codes


def _same(column: Any, firsts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """For each pair, whether both halves have the same value; null is the same as null and NaN as NaN."""
    column = plain(column)
    if pa.types.is_null(column.type):
        return np.ones(firsts.size, dtype=np.bool_)
    if pa.types.is_float16(column.type):
        # Arrow compares no half floats.
        column = column.cast(pa.float32())
    old, new = column.take(pa.array(firsts)), column.take(pa.array(firsts + 1))
    same = pc.equal(old, new)
    if same.null_count:
        same = pc.or_(pc.fill_null(same, False), pc.and_(old.is_null(), new.is_null()))
    if pa.types.is_floating(column.type):
        nan = pc.fill_null(pc.and_(pc.is_nan(old), pc.is_nan(new)), False)
        same = pc.or_(same, nan)
    result: NDArray[np.bool_] = same.to_numpy(zero_copy_only=False)
    return result


OP_COLUMN: Final = "_op"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Chunk:
    """One chunk. :meth:`build` computes the vnodes; this constructor checks those that are given.

    :ivar rows: the columns of the table.
    :ivar ops: int8, one :class:`Op` code per row, no nulls.
    :ivar vnodes: uint16, one vnode per row, no nulls.
    :raises ChunkError: types or lengths do not fit, an op is unknown, an update_delete has no update_insert after it or
        one of another vnode; ``row`` is the index of the first such row.
    """

    rows: pa.RecordBatch
    ops: pa.Int8Array
    vnodes: pa.UInt16Array

    def __post_init__(self) -> None:
        if not isinstance(self.rows, pa.RecordBatch):
            raise ChunkError(
                f"Received rows of type {type(self.rows).__name__}; valid is a pyarrow RecordBatch.",
                next_step="Call to_batches() on a Table.",
            )
        for name, array, kind in (("ops", self.ops, pa.int8()), ("vnodes", self.vnodes, pa.uint16())):
            if not isinstance(array, pa.Array) or array.type != kind:
                received = array.type if isinstance(array, pa.Array | pa.ChunkedArray) else type(array).__name__
                raise ChunkError(
                    f"Received {name} of type {received}; valid is an Arrow array of {kind}.",
                    next_step="Use Chunk.build().",
                )
            if len(array) != self.rows.num_rows:
                raise ChunkError(
                    f"Received {len(array)} {name} for {self.rows.num_rows} rows.",
                    next_step=f"Give one of the {name} for each row.",
                )
            if array.null_count:
                row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
                raise ChunkError(f"Row {row} is null in {name}.", row=row, next_step="Give every row one.")
        codes, vnodes = self.ops.to_numpy(), self.vnodes.to_numpy()
        check_ops(codes)
        beyond = np.flatnonzero(vnodes >= MAX_VNODE_COUNT)
        if beyond.size:
            row = int(beyond[0])
            raise ChunkError(
                f"Row {row} has vnode {vnodes[row]}; valid values are 0 to {MAX_VNODE_COUNT - 1}.",
                row=row,
                next_step="Compute vnodes with vnodes_of().",
            )
        check_vnodes_of_pairs(codes, vnodes)

    @classmethod
    def build(
        cls,
        rows: pa.RecordBatch,
        ops: Any,
        key_columns: Sequence[str],
        vnode_count: int = DEFAULT_VNODE_COUNT,
    ) -> Chunk:
        """A chunk of *rows* with computed vnodes.

        An update pair whose halves have different keys becomes a delete and an insert, also where both keys happen to
        fall into one vnode: a pair always means "same key".

        :param ops: an int8 Arrow array, or a sequence of :class:`Op`.
        :raises ChunkError: as the constructor.
        :raises KeyColumnError: as :func:`~headwater.stream.vnode.vnodes_of`.
        :raises VnodeCountError: a bad count.
        """
        if not isinstance(ops, pa.Array):
            ops = pa.array(np.asarray(ops, dtype=np.int8), pa.int8())
        vnodes = vnodes_of(rows, key_columns, vnode_count)
        is_batch = isinstance(rows, pa.RecordBatch)
        if not is_batch or ops.type != pa.int8() or ops.null_count or len(ops) != rows.num_rows:
            return cls(rows, ops, vnodes)  # which says what is wrong
        codes = ops.to_numpy()
        check_ops(codes)
        kept = without_key_changes(codes, key_columns_of(rows, key_columns))
        return _trusted(rows, ops if kept is codes else pa.array(kept, pa.int8()), vnodes)

    @classmethod
    def inserts(cls, rows: pa.RecordBatch, key_columns: Sequence[str], vnode_count: int = DEFAULT_VNODE_COUNT) -> Chunk:
        """A chunk in which every row is an insert, as snapshots give them.

        :raises KeyColumnError: as :meth:`build`.
        """
        ops = np.full(rows.num_rows, Op.INSERT, dtype=np.int8)
        return cls(rows, pa.array(ops), vnodes_of(rows, key_columns, vnode_count))

    @classmethod
    def empty(cls, schema: pa.Schema) -> Chunk:
        """A chunk without rows."""
        rows = pa.RecordBatch.from_arrays([pa.nulls(0, kind) for kind in schema.types], schema=schema)
        return cls(rows, pa.nulls(0, pa.int8()), pa.nulls(0, pa.uint16()))

    @property
    def num_rows(self) -> int:
        """The number of rows; an update pair counts as two."""
        return int(self.rows.num_rows)

    @property
    def nbytes(self) -> int:
        """The bytes that the rows, ops and vnodes take in memory, without what a slice hides."""
        return int(self.rows.nbytes + self.ops.nbytes + self.vnodes.nbytes)

    @property
    def schema(self) -> pa.Schema:
        """The schema of the rows."""
        return self.rows.schema

    def slice(self, offset: int, length: int | None = None) -> Chunk:
        """The rows from *offset* on, at most *length* of them, over the same memory.

        :raises ChunkError: outside the chunk, or a border falls into an update pair.
        """
        stop = self.num_rows if length is None else min(offset + length, self.num_rows)
        if not 0 <= offset <= stop:
            raise ChunkError(
                f"Received a slice from {offset} to {stop} of {self.num_rows} rows.",
                next_step="Slice inside the chunk.",
            )
        codes = self.ops.to_numpy()
        for border in (offset, stop):
            if 0 < border < self.num_rows and offset < stop and codes[border - 1] == Op.UPDATE_DELETE:
                raise ChunkError(
                    f"Received a slice from {offset} to {stop}, which parts the update pair at row {border - 1}.",
                    row=border - 1,
                    next_step="Use Chunk.split(), which keeps pairs together.",
                )
        return self._slice(offset, stop)

    def split(self, max_rows: int | None = None, max_bytes: int | None = None) -> list[Chunk]:
        """Slices in order, of at most *max_rows* rows and about *max_bytes* bytes each.

        A slice has at least one row, and it has one row more than the limits allow where they would part an update
        pair. Bytes are those of the values; a nested column counts with its average.

        :raises ChunkError: a limit below 1.
        """
        for name, limit in (("max_rows", max_rows), ("max_bytes", max_bytes)):
            if limit is not None and limit < 1:
                raise ChunkError(f"Received {name}={limit}.", next_step="Use 1 or more, or None for no limit.")
        codes = self.ops.to_numpy()
        ends = None if max_bytes is None else np.cumsum(_row_bytes(self.rows))
        pieces = []
        start = 0
        while start < self.num_rows:
            stop = self.num_rows if max_rows is None else min(start + max_rows, self.num_rows)
            if ends is not None and max_bytes is not None:
                used = int(ends[start - 1]) if start else 0
                stop = min(stop, int(np.searchsorted(ends, used + max_bytes, side="right")))
            stop = max(stop, start + 1)
            if stop < self.num_rows and codes[stop - 1] == Op.UPDATE_DELETE:
                stop += 1
            pieces.append(self._slice(start, stop))
            start = stop
        return pieces or [self]

    def __eq__(self, other: object) -> bool:
        """Same schema, rows, ops and vnodes in the same order. As in Arrow, NaN differs from NaN."""
        if not isinstance(other, Chunk):
            return NotImplemented
        return bool(
            self.schema.equals(other.schema)
            and self.ops.equals(other.ops)
            and self.vnodes.equals(other.vnodes)
            and self.rows.equals(other.rows)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Chunk({self.num_rows} rows, {len(self.schema.names)} columns)"

    def _slice(self, start: int, stop: int) -> Chunk:
        return _trusted(
            self.rows.slice(start, stop - start),
            self.ops.slice(start, stop - start),
            self.vnodes.slice(start, stop - start),
        )


def _trusted(rows: pa.RecordBatch, ops: pa.Int8Array, vnodes: pa.UInt16Array) -> Chunk:
    """A chunk of parts that are already known to fit: the checks would only repeat."""
    chunk = object.__new__(Chunk)
    for name, value in (("rows", rows), ("ops", ops), ("vnodes", vnodes)):
        object.__setattr__(chunk, name, value)
    return chunk


def _row_bytes(rows: pa.RecordBatch) -> NDArray[np.int64]:
    """About how many bytes each row takes in a chunk."""
    count = rows.num_rows
    bits = np.full(count, 24, dtype=np.int64)
    for column in rows.columns:
        kind = column.type
        types = pa.types
        if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
            lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
            wide = types.is_large_string(kind) or types.is_large_binary(kind)
            bits += (lengths.astype(np.int64) + (8 if wide else 4)) * 8
        elif count:
            bits += -(-column.nbytes * 8 // count)
    return (bits + 7) // 8

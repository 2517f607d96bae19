"""Update pairs in arrays of ops: checks and cuts, for all rows at once.

An update pair is an ``UPDATE_DELETE`` immediately followed by an ``UPDATE_INSERT`` of the same key, hence of the same
vnode. An ``UPDATE_DELETE`` never stands alone. An ``UPDATE_INSERT`` does where the source told the new row only, as a
Postgres table does that logs no old rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.stream.errors import ChunkError
from headwater.stream.key_column import plain
from headwater.stream.op import Op

# Members of an enum are looked up slowly, and a chunk may have one row only.
_UPDATE_INSERT = int(Op.UPDATE_INSERT)
_UPDATE_DELETE = int(Op.UPDATE_DELETE)


def _first(mask: NDArray[np.bool_]) -> int | None:
    place = int(mask.argmax()) if mask.size else 0
    return place if mask.size and mask[place] else None


def check_ops(codes: NDArray[np.int8]) -> None:
    """Check the codes and that every ``UPDATE_DELETE`` has its ``UPDATE_INSERT`` next to it.

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

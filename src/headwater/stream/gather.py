"""Rows in another order: text and bytes by compiled code where it was built, all else by Arrow. Both give the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater import compiled

Gather = Callable[..., tuple[bytes, bytes, bytes | None, int]]


def compiled_gather() -> Gather | None:
    """The compiled code, where it was built and is wanted."""
    if not compiled.is_wanted():
        return None
    try:
        from headwater.stream._gather import gather
    except ImportError:
        return None
    return gather


_gather = compiled_gather()

# Arrow has no take for these.
_VIEWS = ((pa.string_view(), pa.large_string()), (pa.binary_view(), pa.large_binary()))


def take_columns(rows: pa.RecordBatch, order: NDArray[np.int64]) -> list[Any]:
    """The columns of *rows* at the places *order*."""
    indices = pa.array(order)
    return [take_column(column, order, indices) for column in rows.columns]


def take_column(column: Any, order: NDArray[np.int64], indices: pa.Array) -> Any:
    """The values of *column* at the places *order*, which *indices* holds, too."""
    kind = column.type
    if _gather is not None and (kind == pa.string() or kind == pa.binary()):
        validity, offsets, data = column.buffers()
        if offsets is not None:
            made = _gather(
                offsets,
                b"" if data is None else data,
                validity if column.null_count else None,
                column.offset,
                len(column),
                np.ascontiguousarray(order, np.int64),
            )
            return _column(kind, len(order), *made)
    for view, copied in _VIEWS:
        if kind == view:
            return column.cast(copied).take(indices).cast(view)
    return column.take(indices)


def _column(kind: pa.DataType, rows: int, offsets: bytes, data: bytes, validity: bytes | None, nulls: int) -> Any:
    buffers = [None if validity is None else pa.py_buffer(validity), pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, rows, buffers, nulls)

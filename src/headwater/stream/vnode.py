"""Vnode: the hash bucket of a row's primary key.

A vnode is a number below the *vnode count* of its table (256 by default, 1 to 32768). The same key has the same
vnode in every process, on every platform, in every release and in every Arrow representation of its type
(docs/formats/vnode.md). The vnode is the high half of the key hash scaled to the count,
``(hash >> 32) * count >> 32``: a vnode is a contiguous range of hash space, so vnodes in order are hashes in order,
and a table with twice the count splits each vnode in two (``vnode // 2`` is the old one) and moves nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.stream.errors import KeyColumnError, VnodeCountError
from headwater.stream.hash import BLOCK, SEED, U64
from headwater.stream.key_column import KeyColumn, key_column

DEFAULT_VNODE_COUNT: Final = 256
MAX_VNODE_COUNT: Final = 32768

_HALF: Final = np.uint64(32)


def check_vnode_count(count: int) -> int:
    """*count*, if it is one.

    :raises VnodeCountError: not an integer from 1 to 32768.
    """
    if type(count) is not int or not 1 <= count <= MAX_VNODE_COUNT:
        raise VnodeCountError(count, MAX_VNODE_COUNT)
    return count


def key_columns_of(rows: Any, key_columns: Sequence[str]) -> dict[str, Any]:
    """The columns of a RecordBatch or Table by name, in the order of *key_columns* (one name may stand alone).

    :raises KeyColumnError: no such column, two of that name, or one name given twice.
    """
    names = (key_columns,) if isinstance(key_columns, str) else tuple(key_columns)
    columns = {name: _column(rows, name) for name in names}
    if len(columns) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise KeyColumnError(
            f"Received key column {twice!r} more than once.", column=twice, next_step="Name each column once."
        )
    return columns


def _column(rows: Any, name: str) -> Any:
    places = rows.schema.get_all_field_indices(name)
    if len(places) == 1:
        return rows.column(places[0])
    if places:
        raise KeyColumnError(
            f"Received key column {name!r}, which {len(places)} columns are named.",
            column=name,
            next_step="Give every column its own name.",
        )
    raise KeyColumnError(
        f"Received key column {name!r}; valid values are {', '.join(map(repr, rows.schema.names)) or 'none'}.",
        column=name,
        next_step="Check the primary key of the table.",
    )


def hash_keys(rows: Any, key_columns: Sequence[str]) -> U64:
    """The 64-bit hash of each row's key, in the order of *key_columns*.

    :param rows: a RecordBatch or Table.
    :raises KeyColumnError: no key column, an unknown one, or one of a type that is not hashed.
    """
    hashes = np.empty(rows.num_rows, dtype=np.uint64)

    def keep(states: U64, start: int) -> None:
        hashes[start : start + states.size] = states

    _each_block(key_columns_of(rows, key_columns), keep)
    return hashes


def vnodes_of(rows: Any, key_columns: Sequence[str], count: int = DEFAULT_VNODE_COUNT) -> pa.UInt16Array:
    """The vnode of each row, without nulls.

    With a *count* of 1 everything is in vnode 0 and no key is needed: that is how a table without a key is kept.

    :param rows: a RecordBatch or Table.
    :raises KeyColumnError: no key column, an unknown one, or one of a type that is not hashed.
    :raises VnodeCountError: a bad *count*.
    """
    check_vnode_count(count)
    columns = key_columns_of(rows, key_columns)
    vnodes = np.zeros(rows.num_rows, dtype=np.uint16)
    factor = np.uint64(count)

    def scale(states: U64, start: int) -> None:
        np.right_shift(states, _HALF, out=states)
        np.multiply(states, factor, out=states)
        np.right_shift(states, _HALF, out=states)
        vnodes[start : start + states.size] = states

    if count > 1 or columns:
        _each_block(columns, scale)
    return uint16_array(vnodes)


def uint16_array(values: NDArray[np.uint16]) -> pa.UInt16Array:
    """*values* as an Arrow array over the same memory."""
    return pa.UInt16Array.from_buffers(pa.uint16(), len(values), [None, pa.py_buffer(values)])


def _each_block(columns: Mapping[str, Any], take: Callable[[U64, int], None]) -> None:
    """Hash *columns* block by block and hand each block's hashes, which *take* may overwrite, to it."""
    if not columns:
        raise KeyColumnError(
            "Received no key column.",
            column="",
            next_step="Name the primary key, or all columns, or use vnode count 1 for a table without a key.",
        )
    state = np.empty(BLOCK, dtype=np.uint64)
    scratch = np.empty(BLOCK, dtype=np.uint64)
    for first, length, parts in _contiguous(columns):
        for start in range(0, length, BLOCK):
            size = min(BLOCK, length - start)
            state[:size] = SEED
            for part in parts:
                part.fold_into(state[:size], start, scratch[:size])
            take(state[:size], first + start)


def _contiguous(columns: Mapping[str, Any]) -> Iterator[tuple[int, int, list[KeyColumn]]]:
    """The columns as runs of rows in which none of them changes its chunk: first row, length, parts."""
    chunked = {name: c for name, c in columns.items() if isinstance(c, pa.ChunkedArray)}
    if not chunked:
        parts = [key_column(column, name) for name, column in columns.items()]
        yield 0, len(next(iter(columns.values()))), parts
        return
    rows = len(next(iter(chunked.values())))
    cuts = {0}
    for column in chunked.values():
        cuts.update(np.cumsum([len(chunk) for chunk in column.chunks]).tolist())
    if not rows:
        # No run, but a type that is not hashed is refused all the same.
        for name, column in columns.items():
            key_column(pa.nulls(0, column.type), name)
    for start, stop in pairwise(sorted(cuts)):
        yield start, stop - start, [key_column(_run(c, start, stop), name) for name, c in columns.items()]


def _run(column: Any, start: int, stop: int) -> Any:
    return next(chunk for chunk in column.slice(start, stop - start).chunks if len(chunk))

"""The columns that a log adds to its rows, and the batches that it hands out. Pure.

A stored or read batch is the payload, then ``_op`` (int8), ``_vnode`` (uint16) and ``_seq`` (uint32). What leaves the
log for other processes has ``_epoch`` (uint64) as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from headwater.log_store.errors import ForeignSchema
from headwater.stream import Chunk
from headwater.stream.gather import take_columns

OP, VNODE, SEQ, EPOCH = "_op", "_vnode", "_seq", "_epoch"
RESERVED = (OP, VNODE, SEQ, EPOCH)

_ADDED = (pa.field(OP, pa.int8(), False), pa.field(VNODE, pa.uint16(), False), pa.field(SEQ, pa.uint32(), False))
_EPOCH_FIELD = pa.field(EPOCH, pa.uint64(), False)


def check_payload(schema: pa.Schema) -> None:
    """:raises ForeignSchema: a column twice, with a name that the log uses, or of a layout that it cannot hold."""
    clash = sorted(set(schema.names) & set(RESERVED))
    if clash or len(set(schema.names)) != len(schema.names):
        name = clash[0] if clash else next(name for name in schema.names if schema.names.count(name) > 1)
        raise ForeignSchema(f"A log cannot have a column named {name!r}: it is reserved or there twice.")
    for field in schema:
        if _is_unheld(field.type):
            raise ForeignSchema(
                f"Column {field.name!r} has type {field.type}; a log holds no dictionaries, runs and views.",
                next_step="Cast the column to the plain type of its values.",
            )


def _is_unheld(kind: pa.DataType) -> bool:
    if pt.is_dictionary(kind) or pt.is_run_end_encoded(kind) or pt.is_string_view(kind) or pt.is_binary_view(kind):
        return True
    return any(_is_unheld(kind.field(place).type) for place in range(kind.num_fields))


def stored_schema(payload: pa.Schema) -> pa.Schema:
    """The columns of a stored batch."""
    return pa.schema([*payload, *_ADDED])


def read_schema(payload: pa.Schema) -> pa.Schema:
    """The columns of a batch that a range read gives."""
    return pa.schema([*payload, *_ADDED, _EPOCH_FIELD])


def sorted_batch(chunk: Chunk, first_seq: int) -> tuple[pa.RecordBatch, NDArray[np.uint16]]:
    """The stored batch of *chunk*, rows ordered by vnode and in a vnode by seq; and its vnodes."""
    vnodes = chunk.vnodes.to_numpy()
    columns, ops = chunk.rows.columns, chunk.ops
    if (vnodes[1:] >= vnodes[:-1]).all():
        order = np.arange(len(vnodes))
    else:
        order = np.argsort(vnodes, kind="stable")
        columns, ops, vnodes = take_columns(chunk.rows, order), ops.take(pa.array(order)), vnodes[order]
    seqs = pa.array((order + first_seq).astype(np.uint32))
    arrays: list[Any] = [*columns, ops, pa.array(vnodes), seqs]
    return pa.RecordBatch.from_arrays(arrays, schema=stored_schema(chunk.rows.schema)), vnodes


def with_epoch(batch: pa.RecordBatch, epoch: int) -> pa.RecordBatch:
    """*batch* with its epoch as a column."""
    rows = batch.num_rows
    memory = pa.allocate_buffer(8 * rows)  # of Arrow's pool, which keeps its pages
    np.frombuffer(memory, np.uint64).fill(epoch)
    return batch.append_column(_EPOCH_FIELD, pa.UInt64Array.from_buffers(pa.uint64(), rows, [None, memory]))


def valid_rows(batch: pa.RecordBatch, truncated: tuple[int, int] | None) -> pa.RecordBatch:
    """The rows of *batch* that a truncation, of an epoch and before a seq, left."""
    if truncated is None:
        return batch
    epochs, seqs = batch.column(EPOCH).to_numpy(), batch.column(SEQ).to_numpy()
    left = (epochs > truncated[0]) | ((epochs == truncated[0]) & (seqs >= truncated[1]))
    return batch if left.all() else batch.filter(pa.array(left))

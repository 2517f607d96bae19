"""Rows for Spark, made of the changes of a log or of a table's history. Columns only, never row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as st

from headwater.log_store.columns import OP
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, POSITION_COLUMN, UNAVAILABLE_COLUMN
from headwater.spark.columns import CHANGE_TYPE_COLUMN, COMMIT_VERSION_COLUMN
from headwater.spark.types import Shape
from headwater.stream.op import Op, change_types_of

_COMMIT_BYTES = 8


class Rows:
    """Makes batches of *schema*.

    :param places: for each column of it, its name in the batches that come; ``None``: null, or one that we add.
    """

    def __init__(self, schema: st.StructType, places: Sequence[str | None]) -> None:
        self._shape = Shape(schema)
        self._places = list(zip(schema.names, places, strict=True))

    @property
    def needed(self) -> list[str]:
        """The columns of the table that are needed."""
        return [place for _, place in self._places if place is not None]

    def of_changes(self, batch: pa.RecordBatch, *, preimages: bool) -> pa.RecordBatch:
        """Rows of a log."""
        if not preimages:
            batch = batch.filter(pc.not_equal(batch.column(OP), pa.scalar(Op.UPDATE_DELETE.value, pa.int8())))
        made: dict[str, Callable[[], pa.Array]] = {
            CHANGE_TYPE_COLUMN: lambda: change_types_of(batch.column(OP)).dictionary_decode(),
            COMMIT_VERSION_COLUMN: lambda: commit_versions(batch.column(POSITION_COLUMN)),
            **{name: lambda name=name: batch.column(name) for name in _KEPT},  # type: ignore[misc]
        }
        return self._batch(batch, made)

    def of_history(self, batch: pa.RecordBatch, position: bytes, commit_time_us: int) -> pa.RecordBatch:
        """Rows of a snapshot: inserts, all at one *position*."""
        rows = batch.num_rows
        version = int.from_bytes(position[:_COMMIT_BYTES], "big")
        made: dict[str, Callable[[], pa.Array]] = {
            CHANGE_TYPE_COLUMN: lambda: _repeat(Op.INSERT.change_type, pa.string(), rows),
            COMMIT_VERSION_COLUMN: lambda: _repeat(version, pa.int64(), rows),
            COMMIT_TIMESTAMP_COLUMN: lambda: _repeat(commit_time_us, pa.timestamp("us", tz="UTC"), rows),
            POSITION_COLUMN: lambda: _repeat(position, pa.binary(), rows),
        }
        return self._batch(batch, made)

    def _batch(self, batch: pa.RecordBatch, made: dict[str, Callable[[], pa.Array]]) -> pa.RecordBatch:
        columns = [
            batch.column(place) if place is not None else made[name]() if name in made else None
            for name, place in self._places
        ]
        return self._shape.batch(columns, batch.num_rows)


_KEPT = (COMMIT_TIMESTAMP_COLUMN, UNAVAILABLE_COLUMN, POSITION_COLUMN)


def commit_versions(positions: pa.FixedSizeBinaryArray) -> pa.Int64Array:
    """The number of the commit, from the first bytes of each ``_position``."""
    width, rows = positions.type.byte_width, len(positions)
    if not rows:
        return pa.array([], pa.int64())
    data = np.frombuffer(positions.buffers()[1], np.uint8, rows * width, positions.offset * width)
    numbers = np.ascontiguousarray(data.reshape(rows, width)[:, :_COMMIT_BYTES]).view(">u8").reshape(rows)
    return pa.array(numbers.astype(np.int64))


def _repeat(value: Any, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), rows)

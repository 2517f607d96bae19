"""Mirrors: how the tables of each kind of sink are read again, as they are shown to anybody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from headwater.sources.table import SourceTable


def in_columns(batch: pa.RecordBatch, columns: Sequence[str], table: SourceTable) -> pa.RecordBatch:
    """*batch* with exactly *columns*; null where it does not have one."""
    arrays: list[Any] = []
    for name in columns:
        place = batch.schema.get_field_index(name)
        arrays.append(pa.nulls(batch.num_rows, table.column(name).type) if place < 0 else batch.column(place))
    return pa.RecordBatch.from_arrays(arrays, names=list(columns))

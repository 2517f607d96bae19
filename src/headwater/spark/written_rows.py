"""Rows that Spark writes, made ready for a log: what happened to each, its key, plain columns. Never row by row.

A row is told what it is by ``_change_type``, where the rows have that column; otherwise each is an upsert of its key,
or, without one, a new row. ``_commit_timestamp`` and ``_unavailable`` are kept, ``_commit_version`` and ``_position``
are not: they are places in the log that the rows came from.

An update whose new row did not come (a filter left it out) is a delete of the old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import types as st

from headwater.capture.stream_errors import StreamColumns
from headwater.capture.stream_log import ROW_ID, StreamTable
from headwater.log_store.columns import OP, RESERVED
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, POSITION_COLUMN, UNAVAILABLE_COLUMN, SourceColumn
from headwater.spark.columns import CHANGE_TYPE_COLUMN, COMMIT_VERSION_COLUMN
from headwater.spark.errors import InvalidOption, UnsupportedSchema
from headwater.spark.types import arrow_schema, converted, spark_type
from headwater.spark.write_options import WriteOptions
from headwater.stream.op import Op, ops_of

_KINDS: Final = {
    CHANGE_TYPE_COLUMN: st.StringType,
    COMMIT_TIMESTAMP_COLUMN: st.TimestampType,
    UNAVAILABLE_COLUMN: st.StringType,
}
_LEFT_OUT: Final = frozenset((COMMIT_VERSION_COLUMN, POSITION_COLUMN))
_PREIMAGE, _POSTIMAGE = int(Op.UPDATE_DELETE), int(Op.UPDATE_INSERT)


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """How the rows of one stream become rows of its log. It travels to tasks.

    :ivar table: what they are written to.
    :ivar schema: of the staged rows: the table's columns, ``_op``, and those of ours that came.
    """

    table: StreamTable
    schema: pa.Schema

    @classmethod
    def of(cls, options: WriteOptions, schema: st.StructType, *, replaces: bool = False) -> WrittenRows:
        """*schema* is that of the DataFrame; *replaces*: each of its batches has all rows.

        :raises InvalidOption: no such key column, or none where one is needed.
        :raises UnsupportedSchema: a column that a log cannot have.
        """
        _check(options, schema, replaces)
        arrow = {field.name: field.type for field in arrow_schema(schema)}
        own = [field for field in schema if field.name not in _KINDS and field.name not in _LEFT_OUT]
        columns = tuple(
            SourceColumn(field.name, arrow[field.name], field.dataType.simpleString(), place)
            for place, field in enumerate(own, 1)
        )
        table = StreamTable(options.namespace, options.name, columns, options.key, options.vnodes, replaces)
        table.source_table()  # which says what is wrong
        fields = [pa.field(column.name, column.type) for column in columns]
        kept = [name for name in (COMMIT_TIMESTAMP_COLUMN, UNAVAILABLE_COLUMN) if name in arrow]
        added = [pa.field(OP, pa.int8()), *(pa.field(name, arrow[name]) for name in kept)]
        return cls(table, pa.schema([*fields, *added]))

    def staged(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of *batches*, in order; both halves of an update are in one batch.

        :raises ChunkError: a change type that there is not. :raises StreamColumns: a key that is null.
        """
        held: pa.RecordBatch | None = None
        for batch in batches:
            made = self._plain(batch)
            if held is not None:
                made = pa.concat_batches([held, made])
                held = None
            if made.num_rows and int(made.column(OP)[-1].as_py()) == _PREIMAGE:
                held, made = made.slice(made.num_rows - 1), made.slice(0, made.num_rows - 1)
            if made.num_rows:
                yield self._without_halves(made)
        if held is not None:
            yield self._without_halves(held)

    def _plain(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for name in self.table.key_columns:
            if batch.column(name).null_count:
                raise StreamColumns(
                    f"A row for table {self.table.name} has null in the key column {name!r}.",
                    next_step="Leave such rows out with a filter, or take another key.",
                )
        arrays: list[Any] = [
            self._ops(batch) if field.name == OP else converted(batch.column(field.name), field.type)
            for field in self.schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _ops(self, batch: pa.RecordBatch) -> pa.Int8Array:
        if CHANGE_TYPE_COLUMN in batch.schema.names:
            return ops_of(batch.column(CHANGE_TYPE_COLUMN))
        op = Op.UPDATE_INSERT if self.table.key_columns and not self.table.replaces else Op.INSERT
        return pa.repeat(pa.scalar(int(op), pa.int8()), batch.num_rows)

    def _without_halves(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        place = batch.schema.get_field_index(OP)
        codes = batch.column(place).to_numpy()
        alone = (codes == _PREIMAGE) & ~np.append(codes[1:] == _POSTIMAGE, False)
        if not alone.any():
            return batch
        return batch.set_column(place, batch.schema.field(place), pa.array(np.where(alone, int(Op.DELETE), codes)))


def _check(options: WriteOptions, schema: st.StructType, replaces: bool) -> None:
    names = schema.names
    for name in options.key:
        if name not in names or name in _KINDS or name in _LEFT_OUT:
            raise InvalidOption(f"Received key column {name!r}.", next_step=f"The rows have {', '.join(names)}.")
    if CHANGE_TYPE_COLUMN in names and replaces:
        raise InvalidOption(
            f"The rows have {CHANGE_TYPE_COLUMN!r}; in the output mode 'complete' they are all rows, not changes.",
            next_step="Leave the column out, or use outputMode('append').",
        )
    if CHANGE_TYPE_COLUMN in names and not options.key:
        raise InvalidOption(
            f"The rows have {CHANGE_TYPE_COLUMN!r}, and no key that says which row changed.",
            next_step="Set option 'key', or leave the column out, or give it another name to keep it as it is.",
        )
    if ROW_ID in names and not options.key:
        raise InvalidOption(
            f"The rows have a column {ROW_ID!r}, which a table without a key gets.",
            next_step=f"Set key={ROW_ID}, or leave the column out.",
        )
    for field in schema:
        if field.name in RESERVED:
            raise UnsupportedSchema(f"The column name {field.name!r} is taken.", next_step="Give it another name.")
        wanted = _KINDS.get(field.name)
        if wanted is not None and not isinstance(field.dataType, wanted):
            raise UnsupportedSchema(
                f"Column {field.name!r} is {field.dataType.simpleString()}; it must be {wanted().simpleString()}.",
                next_step="Cast it, or give it another name.",
            )
    for field in schema:
        try:
            spark_type(arrow_schema(st.StructType([field])).field(0).type)  # who reads the log must have a type for it
        except (PySparkException, UnsupportedSchema):
            raise UnsupportedSchema(
                f"Column {field.name!r} has the type {field.dataType.simpleString()}, which a log cannot hold.",
                next_step="Cast it, for example to string, or leave it out.",
            ) from None

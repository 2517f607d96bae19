"""Snapshot text: how pyarrow reads ``COPY … (FORMAT csv)`` into the same values that the stream gives.

Types that pyarrow parses from csv exactly as :mod:`~headwater.sources.postgres.convert` does are parsed in one pass;
all others come as text and are converted after. In csv, NULL is nothing and the empty string is ``""``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import pyarrow as pa
from pyarrow import csv

from headwater.sources.errors import SourceProtocolError
from headwater.sources.postgres.convert import check_key, convert_column
from headwater.sources.table import SourceTable

_MAX_BLOCK: Final = 0x7FFF_FFFF


class CsvOptions(NamedTuple):
    """What ``pyarrow.csv`` is told, and what is to be done with each batch that it gives."""

    parse: csv.ParseOptions
    convert: csv.ConvertOptions
    finish: Callable[[pa.RecordBatch], pa.RecordBatch]


def csv_options(table: SourceTable, *, as_text: bool = False) -> CsvOptions:
    """How to read the csv of all columns of *table*, in order and without a header.

    pyarrow raises ``ArrowInvalid`` at a value that it cannot parse; with *as_text* nothing is parsed before ``finish``,
    which then tells special values apart and says what is wrong without showing it. :func:`read_csv` does both.
    """
    read_types = {column.name: pa.string() if as_text else _read_type(column.type) for column in table.columns}

    def finish(batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = []
        for column, values in zip(table.columns, batch.columns, strict=True):
            if values.type == column.type and not pa.types.is_string(column.type):
                check_key(table, column, values)
                columns.append(values)
            else:
                columns.append(convert_column(table, column, values))
        return pa.RecordBatch.from_arrays(columns, schema=table.schema)

    return CsvOptions(
        csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        csv.ConvertOptions(
            column_types=read_types,
            null_values=[""],
            true_values=["t"],
            false_values=["f"],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
        finish,
    )


def read_csv(table: SourceTable, data: bytes | pa.Buffer) -> list[pa.RecordBatch]:
    """The rows of whole lines of csv.

    :raises SpecialValue: as :func:`~headwater.sources.postgres.convert.convert_column`.
    :raises UndecodableValue: as there.
    :raises SourceProtocolError: the text is no csv of this table.
    """
    if not len(data):
        return []
    rows = _read(table, data, as_text=False)
    if rows is None:
        rows = _read(table, data, as_text=True)
    if rows is None:  # Arrow's own error would show the line
        raise SourceProtocolError(
            f"The snapshot of table {table.full_name} is no csv of its {len(table.columns)} columns.",
            next_step="Look whether the table was changed meanwhile, and take the snapshot again.",
        )
    return rows


def _read(table: SourceTable, data: bytes | pa.Buffer, *, as_text: bool) -> list[pa.RecordBatch] | None:
    options = csv_options(table, as_text=as_text)
    names = [column.name for column in table.columns]
    # One block: a row may be of any size, and none may be cut.
    read = csv.ReadOptions(column_names=names, use_threads=False, block_size=min(len(data) + 1, _MAX_BLOCK))
    try:
        parsed = csv.read_csv(pa.BufferReader(data), read, options.parse, options.convert)
    except pa.ArrowInvalid:
        return None
    return [options.finish(batch) for batch in parsed.to_batches()]


def _read_type(kind: pa.DataType) -> pa.DataType:
    """What pyarrow parses from csv itself. It does not look whether a decimal has more digits than its type."""
    types = pa.types
    is_text = types.is_binary(kind) or types.is_list(kind) or types.is_decimal(kind)
    return pa.string() if is_text else kind

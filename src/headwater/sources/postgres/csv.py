"""Snapshot text: rows of ``COPY … TO STDOUT (FORMAT csv)`` as the same values that the stream gives.

All columns are read as text and converted by :mod:`~headwater.sources.postgres.convert`, as those of the stream are.
(Letting pyarrow parse the types itself saves a fifth of the time for numbers, nothing for the rest, and would be a
second way to read each type.) In csv, NULL is nothing and the empty string is ``""``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from pyarrow import csv

from headwater.sources.errors import SourceProtocolError
from headwater.sources.postgres.convert import convert_column
from headwater.sources.table import SourceColumn, SourceTable

_MAX_BLOCK: Final = 0x7FFF_FFFF
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


def read_csv(
    table: SourceTable, data: bytes | pa.Buffer, columns: Sequence[SourceColumn] | None = None
) -> list[pa.RecordBatch]:
    """The rows of whole lines of csv, which have *columns* of *table*, in their order, or all of them.

    :raises SpecialValue: as :func:`~headwater.sources.postgres.convert.convert_column`.
    :raises UndecodableValue: as there.
    :raises SourceProtocolError: the text is no csv of these columns.
    """
    wanted = table.columns if columns is None else columns
    schema = pa.schema([column.field for column in wanted])
    batches = []
    for texts in read_texts(table.full_name, data, len(wanted)).to_batches():
        typed = [convert_column(table, column, text) for column, text in zip(wanted, texts.columns, strict=True)]
        batches.append(pa.RecordBatch.from_arrays(typed, schema=schema))
    return batches


def read_texts(name: str, data: bytes | pa.Buffer, columns: int) -> pa.Table:
    """The texts of whole lines of csv, nothing converted. *name* is the table's, for errors.

    :raises SourceProtocolError: the text is no csv of that many columns.
    """
    names = [str(place) for place in range(columns)]
    if not len(data):
        return pa.table([pa.array([], pa.string()) for _ in names], names=names)
    if bytes(memoryview(data)[:3]) == _BYTE_ORDER_MARK:  # of a value; pyarrow drops one at the start
        data = _BYTE_ORDER_MARK + bytes(data)
    # One block: a row may be of any size, and none may be cut.
    read = csv.ReadOptions(column_names=names, use_threads=False, block_size=min(len(data) + 1, _MAX_BLOCK))
    try:
        return csv.read_csv(pa.BufferReader(data), read, _PARSE, _options(names))
    except pa.ArrowInvalid:  # its text would show the line
        pass
    raise SourceProtocolError(
        f"The snapshot of table {name} is no csv of its {columns} columns.",
        next_step="Look whether the table was changed meanwhile, and take the snapshot again.",
    )


_PARSE: Final = csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False)


def _options(names: Sequence[str]) -> csv.ConvertOptions:
    return csv.ConvertOptions(
        column_types={name: pa.string() for name in names},
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )

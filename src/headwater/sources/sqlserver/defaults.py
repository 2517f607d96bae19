"""What rows from before have in a column that came. Pure but for the catalog that it is given.

A column that may not be null comes with a default, which the server gives to the rows that are there without telling
them. What they have is known where it is a constant. It is not where the expression has another value in each row, and
where the column may be null, as nobody tells whether it came ``WITH VALUES``: such a column is named without a value,
and whoever keeps the rows reads it once more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from headwater.sources.sqlserver.catalog import CatalogTable
from headwater.sources.table import SourceColumn

_NUMBER: Final = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")
_TEXT: Final = re.compile(r"N?'((?:[^']|'')*)'")


def defaults_of(table: CatalogTable | None, added: Sequence[SourceColumn]) -> pa.RecordBatch | None:
    """One row: what older rows have in those of *added* that have a default, null where it is not known.

    ``None`` where none of them has one.
    """
    found: dict[SourceColumn, pa.Array] = {}
    for column in added:
        now = None if table is None else next((one for one in table.columns if one.number == column.field_id), None)
        if now is None or now.default is None:
            continue
        value = None if now.nullable else constant(now.default, column.type)
        found[column] = pa.nulls(1, column.type) if value is None else value
    if not found:
        return None
    return pa.RecordBatch.from_arrays(list(found.values()), schema=pa.schema([column.field for column in found]))


def constant(definition: str, kind: pa.DataType) -> pa.Array | None:
    """The value of a default as the catalog writes it, such as ``((0))`` or ``(N'new')``; ``None``: no constant."""
    text = definition.strip()
    while text.startswith("(") and text.endswith(")"):
        text = text[1:-1].strip()
    quoted = _TEXT.fullmatch(text)
    if quoted is not None:
        text = quoted[1].replace("''", "'")
    elif not _NUMBER.fullmatch(text):
        return None
    try:
        if pa.types.is_boolean(kind):
            return pa.array([float(text) != 0])
        return pa.array([text]).cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError):
        return None

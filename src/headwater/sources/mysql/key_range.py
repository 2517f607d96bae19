"""How the server reads the keys of a range that a person names (:mod:`headwater.sources.named_range`)."""

from __future__ import annotations

from headwater.sources import named_range
from headwater.sources.mysql.catalog import read_table
from headwater.sources.mysql.connection import Connection, ask
from headwater.sources.mysql.key_columns import FLOATS, INTEGERS, NUMBERED, KeyColumn, read_key
from headwater.sources.mysql.names import TableName
from headwater.sources.mysql.types import ADDRESSES, BINARIES
from headwater.sources.splits import KeyRange
from headwater.sources.table import SourceTable


def printed_range(session: Connection, table: SourceTable, part: KeyRange) -> KeyRange:
    """*part* of *table*, its values as cuts have them; see :func:`~headwater.sources.named_range.printed_range`."""
    key = read_key(read_table(session, TableName(table.namespace, table.name)), table)
    return named_range.printed_range(
        table,
        part,
        key,
        lambda column, value: _text(session, column, value),
        lambda statement: ask(session, statement),
    )


def _text(session: Connection, column: KeyColumn, value: str) -> str | None:
    """The text of a cut; ``None``: it is no value."""
    try:
        if column.kind in INTEGERS or column.kind in ("bit", "year"):
            return str(int(value))
        if column.kind in NUMBERED:
            number = int(value) if value.isdigit() else column.number(value)
            return str(number) if number else None
        if column.kind in ("decimal", "numeric") or column.kind in FLOATS:
            float(value)
            return value.strip().lstrip("+")
        if column.kind in BINARIES:
            return bytes.fromhex(value.removeprefix("0x")).hex().upper()
    except ValueError:
        return None
    if column.charset is not None:
        return value
    kind = column.kind if column.kind in ADDRESSES or column.kind == "date" else "DATETIME(6)"
    found = ask(
        session, f"SELECT CAST(CAST(%s AS {'TIME(6)' if column.kind == 'time' else kind}) AS CHAR) AS v", [value]
    )
    told = found[0]["v"]
    return None if told is None else str(told)

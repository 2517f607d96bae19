"""How the server reads the keys of a range that a person names (:mod:`headwater.sources.named_range`)."""

from __future__ import annotations

from headwater.sources import named_range
from headwater.sources.splits import KeyRange
from headwater.sources.sqlserver.catalog import read_table
from headwater.sources.sqlserver.connection import Session
from headwater.sources.sqlserver.key_columns import KeyColumn, read_key
from headwater.sources.sqlserver.names import TableName, literal
from headwater.sources.sqlserver.types import BINARIES, TEXTS
from headwater.sources.table import SourceTable


def printed_range(session: Session, table: SourceTable, part: KeyRange) -> KeyRange:
    """*part* of *table*, its values as cuts have them; see :func:`~headwater.sources.named_range.printed_range`."""
    key = read_key(read_table(session, TableName(table.namespace, table.name)), table)
    return named_range.printed_range(
        table,
        part,
        key,
        lambda column, value: _text(session, column, value),
        session.ask,
    )


def _text(session: Session, column: KeyColumn, value: str) -> str | None:
    """The text of a cut; ``None``: it is no value."""
    if column.kind.name in TEXTS:
        return value
    if column.kind.name in BINARIES:
        try:
            return bytes.fromhex(value.removeprefix("0x")).hex().upper()
        except ValueError:
            return None
    tried = f"TRY_CONVERT({column.type_text}, {literal(value)})"
    told = session.ask(f"SELECT {column.text_of(tried)} AS v")[0]["v"]
    return None if told is None else str(told)

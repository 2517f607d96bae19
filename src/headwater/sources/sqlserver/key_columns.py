"""Key columns: how the keys of a table are written into statements, and as the texts that cuts are made of.

A cut has the text of each key column; the text of a value is exact, and a statement compares it with the column as the
table's index does:

=============================  ==============================  =====================================================
column                         text in a cut                   compared as
=============================  ==============================  =====================================================
integers, decimals, bit        the number                      a number of the column's type
real, float                    the number, 17 digits           a number of the column's type
char, varchar, nchar, …        the text                        a text in the column's code page and collation
binary, varbinary, rowversion  hexadecimal                     bytes, as the server compares them
dates and times                as the server prints them       a value of the column's type
uniqueidentifier               as the server prints it         the server's own order, which is not that of the text
=============================  ==============================  =====================================================
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from headwater.sources.errors import UnsupportedTable
from headwater.sources.key_conditions import no_value
from headwater.sources.sqlserver.catalog import CatalogTable
from headwater.sources.sqlserver.names import literal, quoted
from headwater.sources.sqlserver.types import BINARIES, TEXTS, TIMES, SqlType
from headwater.sources.table import SourceTable

INTEGERS: Final = frozenset(("tinyint", "smallint", "int", "bigint", "bit"))
DECIMALS: Final = frozenset(("decimal", "numeric", "money", "smallmoney"))
FLOATS: Final = frozenset(("real", "float"))
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_NO_KEYS: Final = frozenset(("sql_variant", "hierarchyid", "sysname"))


@dataclass(frozen=True)
class KeyColumn:
    """One column of a key. :ivar collation: of a text."""

    name: str
    type_text: str
    collation: str | None = None

    @cached_property
    def kind(self) -> SqlType:
        return SqlType.parse(self.type_text)

    def text_of(self, expression: str) -> str:
        """What gives the text of a value."""
        name = self.kind.name
        if name in BINARIES:
            return f"CONVERT(varchar(8000), CONVERT(varbinary(4000), {expression}), 2)"
        if name in FLOATS:
            return f"CONVERT(varchar(40), CONVERT(float, {expression}), 3)"
        if name in ("money", "smallmoney"):
            return f"CONVERT(varchar(40), {expression}, 2)"
        if name in TIMES:
            return f"CONVERT(varchar(40), {expression}, {23 if name == 'date' else 121})"
        if name in TEXTS:
            return f"CONVERT(nvarchar(4000), {expression})"
        if name == "bit":
            return f"CONVERT(varchar(40), CONVERT(int, {expression}))"
        return f"CONVERT(varchar(60), {expression})"

    @property
    def sql(self) -> str:
        """Its name, for a statement."""
        return quoted(self.name)

    @property
    def text_sql(self) -> str:
        """What gives the text of the column's values."""
        return self.text_of(quoted(self.name))

    def literal(self, text: str) -> str:
        """The value whose text is *text*, for a statement. :raises SnapshotExpired: it is none of its type."""
        name = self.kind.name
        if (name in INTEGERS or name in DECIMALS or name in FLOATS) and not _NUMBER.fullmatch(text):
            raise no_value(self.name)
        if name in BINARIES:
            if not re.fullmatch(r"([0-9A-Fa-f]{2})*", text):
                raise no_value(self.name)
            return f"0x{text}"
        if name in INTEGERS:
            return f"CONVERT({name}, {text})"
        return self.typed(literal(text))

    def typed(self, text: str) -> str:
        """An expression of text as a value of the column's type, in its collation."""
        name = self.kind.name
        if name in BINARIES:
            return f"CONVERT(varbinary(4000), {text}, 2)"
        if name in TEXTS:
            collated = f"{text} COLLATE {self.collation}" if self.collation else text
            return f"CONVERT({self.type_text}, {collated})"
        if name in ("datetime", "smalldatetime"):  # which take no text with more digits than they have
            return f"CONVERT({name}, CONVERT(datetime2(3), {text}, 121))"
        if name in TIMES:
            return f"CONVERT({self.type_text}, {text}, {23 if name == 'date' else 121})"
        return f"CONVERT({self.type_text}, {text})"


def read_key(catalog: CatalogTable, table: SourceTable) -> tuple[KeyColumn, ...]:
    """The key columns of *table*, in key order.

    :raises UnsupportedTable: the database has another key now, or one that cannot be cut.
    """
    made = []
    for name in table.key_columns:
        column = catalog.column(name)
        if column is None or name not in catalog.key:
            raise UnsupportedTable(
                table.full_name,
                f"its key was ({', '.join(table.key_columns)}) and is ({', '.join(catalog.key)}) now.",
                next_step="Restore the key, or capture the table anew: headwater resnapshot",
            )
        if column.type.name in _NO_KEYS:
            raise UnsupportedTable(
                table.full_name,
                f"its key column {name!r} is of type {column.type}, which has no text to cut at.",
                next_step="Make a primary key of another type.",
            )
        made.append(KeyColumn(name, str(column.type), column.collation))
    return tuple(made)


def key_list(key: Sequence[KeyColumn]) -> str:
    """The names of the key columns, for an ORDER BY."""
    return ", ".join(column.sql for column in key)


def key_texts(key: Sequence[KeyColumn]) -> str:
    """What gives the texts of a key, each under its place."""
    return ", ".join(f"{column.text_sql} AS [k{place}]" for place, column in enumerate(key))

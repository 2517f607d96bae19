"""Key columns: how the keys of a table are written into statements, and as the texts that cuts are made of.

A cut has the text of each key column; the text of a value is exact, and a statement compares it with the column as the
table's index does:

=============================  ===============================  ======================================================
column                         text in a cut                    compared as
=============================  ===============================  ======================================================
integers, decimals, year       the number                       a number
float, double                  the number, as a double          a number
bit, enum, set                 the number behind the value      a number: their order is that of these numbers
char, varchar, text            the text                         a text in the column's character set and collation
binary, varbinary, blob        hexadecimal                      bytes
dates and times                as the server prints them, UTC   a date or time
uuid, inet4, inet6             as the server prints them        a value of the type
=============================  ===============================  ======================================================
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any, Final

from headwater.sources.errors import UnsupportedTable
from headwater.sources.key_conditions import no_value
from headwater.sources.mysql.catalog import CatalogTable
from headwater.sources.mysql.names import quoted
from headwater.sources.mysql.types import ADDRESSES, BINARIES, MySqlType
from headwater.sources.splits import Cut
from headwater.sources.table import SourceTable

NUMBERED: Final = frozenset(("bit", "enum", "set"))
NUMBERS: Final = frozenset(
    ("tinyint", "smallint", "mediumint", "int", "bigint", "year", "decimal", "numeric", *NUMBERED)
)
INTEGERS: Final = frozenset(("tinyint", "smallint", "mediumint", "int", "bigint"))
FLOATS: Final = frozenset(("float", "double"))
TIMES: Final = frozenset(("date", "time", "datetime", "timestamp"))
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_LABEL: Final = re.compile(r"'((?:[^']|'')*)'")


@dataclass(frozen=True)
class KeyColumn:
    """One column of a key.

    :ivar type_text: the type as the database writes it. :ivar charset: of a text. :ivar collation: of a text.
    """

    name: str
    type_text: str
    charset: str | None = None
    collation: str | None = None

    @cached_property
    def kind(self) -> str:
        """The name of the type."""
        return MySqlType.parse(self.type_text).name

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Those of an enum or set, in their order."""
        if self.kind not in ("enum", "set"):
            return ()
        return tuple(label.replace("''", "'") for label in _LABEL.findall(self.type_text))

    @property
    def sql(self) -> str:
        """Its name, for a statement."""
        return quoted(self.name)

    @property
    def text_sql(self) -> str:
        """What gives the text of its values."""
        name = quoted(self.name)
        if self.kind in NUMBERED:
            return f"CAST({name} + 0 AS CHAR)"
        if self.kind in FLOATS:
            return f"CAST(CAST({name} AS DOUBLE) AS CHAR)"
        if self.kind in BINARIES:
            return f"HEX({name})"
        if self.charset is not None:
            return f"CONVERT({name} USING utf8mb4)"
        return f"CAST({name} AS CHAR)"

    def literal(self, text: str) -> str:
        """The value whose text is *text*, for a statement. :raises SnapshotExpired: it is none of its type."""
        if self.kind in NUMBERS or self.kind in FLOATS:
            if not _NUMBER.fullmatch(text):
                raise no_value(self.name)
            return f"{text}e0" if self.kind in FLOATS and "e" not in text.lower() else text
        if self.kind in BINARIES:
            if not re.fullmatch(r"([0-9A-Fa-f]{2})*", text):
                raise no_value(self.name)
            return f"X'{text}'"
        coded = f"_utf8mb4 X'{text.encode().hex()}'"
        if self.charset is not None:
            return f"(CONVERT({coded} USING {self.charset}) COLLATE {self.collation})"
        if self.kind in ADDRESSES:
            return f"CAST({coded} AS {self.kind})"
        if self.kind == "date":
            return f"CAST({coded} AS DATE)"
        return f"CAST({coded} AS {'TIME' if self.kind == 'time' else 'DATETIME'}(6))"

    def text(self, value: Any) -> str:
        """The text of a value as Arrow gives it to Python."""
        if isinstance(value, bool):
            return str(int(value))
        if isinstance(value, bytes):
            return str(int.from_bytes(value, "big")) if self.kind == "bit" else value.hex().upper()
        if isinstance(value, str) and self.kind in ("enum", "set"):
            return str(self.number(value))
        if isinstance(value, dt.datetime):
            return value.strftime("%4Y-%m-%d %H:%M:%S.%f")
        if isinstance(value, dt.time):
            return value.strftime("%H:%M:%S.%f")
        if isinstance(value, Decimal):
            return f"{value:f}"
        return repr(value) if isinstance(value, float) else str(value)

    def number(self, label: str) -> int:
        """The number behind a value of an enum or set."""
        if self.kind == "enum":
            return self.labels.index(label) + 1 if label in self.labels else 0
        return sum(1 << self.labels.index(one) for one in label.split(",") if one in self.labels)


def read_key(catalog: CatalogTable, table: SourceTable) -> tuple[KeyColumn, ...]:
    """The key columns of *table*, in key order.

    :raises UnsupportedTable: the server has another key now.
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
        made.append(KeyColumn(name, column.type_text, column.charset, column.collation))
    return tuple(made)


def key_list(key: Sequence[KeyColumn], order: str = "ASC") -> str:
    """The names of the key columns, for an ORDER BY."""
    return ", ".join(f"{column.sql} {order}" for column in key)


def key_texts(key: Sequence[KeyColumn]) -> str:
    """What gives the texts of a key."""
    return ", ".join(column.text_sql for column in key)


def cut_after(key: Sequence[KeyColumn], values: Sequence[Any]) -> Cut:
    """The cut after the row that has the key *values*."""
    return Cut(tuple(column.text(value) for column, value in zip(key, values, strict=True)), after=True)

"""TableShape: what decides which values a table's columns hold, as it was when its log was read last.

It is kept with the capture. A statement in the log is judged by it, and it is compared with the catalog: what changed
there and is not in the log (``sql_log_bin = 0``) means that the table must be read again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from headwater.sources.mysql.catalog import CatalogTable
from headwater.sources.mysql.column_clause import ColumnClause, charset_name
from headwater.sources.mysql.types import MySqlType, source_type

_INTEGERS: Final = {"tinyint": 8, "smallint": 16, "mediumint": 24, "int": 32, "bigint": 64}
_DIGITS: Final = {8: 3, 16: 5, 24: 8, 32: 10, 64: 20}
_TEXTS: Final = {"tinytext": 255, "text": 65_535, "mediumtext": 2**24 - 1, "longtext": 2**32 - 1}
_BLOBS: Final = {"tinyblob": 255, "blob": 65_535, "mediumblob": 2**24 - 1, "longblob": 2**32 - 1}
_HELD: Final = {
    "utf8mb4": frozenset(("ascii", "utf8mb3", "latin1")),
    "utf8mb3": frozenset(("ascii", "latin1")),
    "latin1": frozenset(("ascii",)),
}
"""Character sets all of whose characters another one has."""

_SAME_BYTES: Final = frozenset(("ascii", "utf8mb3"))
"""Character sets whose texts have the same bytes in UTF-8."""


@dataclass(frozen=True, slots=True)
class ColumnShape:
    """A column. :ivar charset: of a text. :ivar expression: of a column that is computed from others."""

    type: str
    charset: str = ""
    nullable: bool = True
    expression: str = ""

    def __str__(self) -> str:
        charset = f" character set {self.charset}" if self.charset else ""
        return f"{self.type}{charset}{'' if self.nullable else ' not null'}"

    def keeps_values(self, new: ColumnShape) -> bool:
        """Whether every value is the same, certainly, once the column is *new*."""
        if self.expression or new.expression:
            return self == new
        if self.nullable and not new.nullable:
            return False
        old_type, new_type = MySqlType.parse(self.type), MySqlType.parse(new.type)
        if not _keeps_type(old_type, new_type, self, new):
            return False
        return self.charset == new.charset or self._is_held_by(new, new_type.name)

    def _is_held_by(self, new: ColumnShape, kind: str) -> bool:
        if not self.charset:  # a number that becomes text
            return True
        by_characters = kind in ("char", "varchar", "enum", "set") or self.charset in _SAME_BYTES
        return self.charset in _HELD.get(new.charset, ()) and by_characters


def _keeps_type(old: MySqlType, new: MySqlType, before: ColumnShape, after: ColumnShape) -> bool:
    if old.name in _INTEGERS:
        return _keeps_integers(old, new, before)
    if old.name == "decimal":
        if new.name != "decimal" or (new.unsigned and not old.unsigned):
            return False
        (digits, scale), (new_digits, new_scale) = _decimal(old), _decimal(new)
        return new_scale >= scale and new_digits - new_scale >= digits - scale
    if old.name in ("float", "double"):
        same = new.name == old.name or (new.name == "double" and not old.numbers)
        return same and new.numbers in ((), old.numbers) and (old.unsigned or not new.unsigned)
    if old.name in ("datetime", "timestamp", "time"):
        return new.name == old.name and _size(new, 0) >= _size(old, 0)
    if old.name in ("char", "varchar"):
        if new.name in _TEXTS:
            return _size(old, 1) * 4 <= _TEXTS[new.name]
        return new.name in ("varchar", old.name) and _size(new, 1) >= _size(old, 1)
    if old.name in ("binary", "varbinary"):
        if new.name in _BLOBS:
            return _size(old, 1) <= _BLOBS[new.name]
        if new.name == "varbinary":
            return _size(new, 1) >= _size(old, 1)
        return new.name == old.name and new.numbers == old.numbers
    for kinds in (_TEXTS, _BLOBS):
        if old.name in kinds:
            return new.name in kinds and kinds[new.name] >= kinds[old.name]
    if old.name == "json" and new.name == "longtext":  # which it is in MariaDB
        return True
    if old.name in ("enum", "set") and new.name == old.name:
        return _keeps_labels(labels(before.type), labels(after.type), ordered=old.name == "set")
    return old == new and source_type(before.type) == source_type(after.type)


def _keeps_integers(old: MySqlType, new: MySqlType, before: ColumnShape) -> bool:
    bits = _INTEGERS[old.name]
    if new.name in _INTEGERS:
        wider = _INTEGERS[new.name] > bits
        return (
            wider
            if old.unsigned and not new.unsigned
            else (old.unsigned or not new.unsigned) and (wider or _INTEGERS[new.name] == bits)
        )
    if new.name == "decimal":
        digits, scale = _decimal(new)
        return digits - scale >= _DIGITS[bits] and (old.unsigned or not new.unsigned)
    if "zerofill" in before.type.lower():
        return False
    return new.name in _TEXTS or (new.name == "varchar" and _size(new, 1) > _DIGITS[bits])


def labels(type_text: str) -> list[str]:
    """Of an enum or a set."""
    return [text.replace("''", "'") for text in re.findall(r"'((?:[^']|'')*)'", type_text)]


def _keeps_labels(old: list[str], new: list[str], *, ordered: bool) -> bool:
    left = iter(new)
    return all(label in left for label in old) if ordered else set(old) <= set(new)


def _decimal(kind: MySqlType) -> tuple[int, int]:
    digits, scale = (*kind.numbers, 0, 0)[:2] if kind.numbers else (10, 0)
    return digits, scale


def _size(kind: MySqlType, without: int) -> int:
    return kind.numbers[0] if kind.numbers else without


@dataclass(frozen=True, slots=True)
class TableShape:
    """A table.

    :ivar columns: by name in lower case.
    :ivar charset: of new columns that name none.
    :ivar server: whose *table_id* it is. :ivar table_id: another one means that the table was created again or
        rebuilt; empty after a statement that may have done that.
    """

    columns: Mapping[str, ColumnShape]
    charset: str = ""
    server: str = ""
    table_id: str = ""

    @classmethod
    def of_catalog(cls, table: CatalogTable, server: str, table_id: str) -> TableShape:
        columns = {
            column.name.lower(): ColumnShape(
                source_type(column.type_text),
                charset_name((column.charset or "").lower()),
                column.nullable,
                f"{column.expression} {column.extra}" if column.is_generated else "",
            )
            for column in table.columns
        }
        return cls(columns, table.charset, server, table_id)

    @classmethod
    def parse(cls, text: str) -> TableShape | None:
        """Of :meth:`to_json`; ``None`` where an older version wrote it."""
        told = json.loads(text)
        if "columns" not in told:
            return None
        columns = {name: ColumnShape(*column) for name, column in told["columns"].items()}
        return cls(columns, told["charset"], told["server"], told["table_id"])

    def to_json(self) -> str:
        columns = {
            name: [column.type, column.charset, column.nullable, column.expression]
            for name, column in self.columns.items()
        }
        whole = {"columns": columns, "charset": self.charset, "server": self.server, "table_id": self.table_id}
        return json.dumps(whole)

    @property
    def is_generating(self) -> bool:
        return any(column.expression for column in self.columns.values())

    def of_clause(self, clause: ColumnClause) -> ColumnShape | None:
        """The column that a statement defines in this table; ``None`` where that is not certain."""
        if not clause.type or clause.charset is None or clause.is_computed:
            return None
        kind = MySqlType.parse(clause.type).name
        is_text = "char" in kind or kind in _TEXTS or kind in ("enum", "set")
        return ColumnShape(
            source_type(clause.type), (clause.charset or self.charset) if is_text else "", clause.nullable
        )

    def converted(self, charset: str) -> TableShape | None:
        """After ``CONVERT TO CHARACTER SET``; ``None`` where texts may be others then."""
        columns = {}
        for name, column in self.columns.items():
            if column.charset and column.charset not in (charset, *_HELD.get(charset, ())):
                return None
            columns[name] = replace(column, charset=charset) if column.charset else column
        return replace(self, columns=columns, charset=charset)

    def change_to(self, now: TableShape) -> str | None:
        """Why rows are not what they were, once the table is *now* without a word in the log; ``None``: they are."""
        for name, column in self.columns.items():
            if name not in now.columns:
                return f"column {name!r} was dropped or renamed, and the log does not have the statement."
            if not column.keeps_values(now.columns[name]):
                after = now.columns[name]
                return f"column {name!r} changed from {column} to {after}, and the log does not have the statement."
        for name in now.columns:
            if name not in self.columns:
                return f"column {name!r} was added, and the log does not have the statement."
        same_kind = self.table_id.partition(":")[0] == now.table_id.partition(":")[0]
        if self.server == now.server and same_kind and self.table_id != now.table_id:
            return "it was created again or rebuilt, and the log does not have the statement."
        return None

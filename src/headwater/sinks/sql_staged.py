"""What tasks stage for a sink in a database. Pure.

Rows travel inside the answer of a task, or in a *relation*: a separate table, whose name says of which query, table,
generation and batch it is.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from headwater.sinks.fold import DELETED
from headwater.sinks.sink import Token
from headwater.sinks.sql_table import SqlTable
from headwater.sources.table import UNAVAILABLE_COLUMN
from headwater.sources.unavailable import unavailable_names

_RELATION: Final = re.compile(r"s([0-9a-f]{16})_([0-9a-f]+)_([0-9a-f]+)_([0-9a-f]+)_([0-9a-f]+)_[0-9a-f]{10}")


@dataclass(frozen=True, slots=True)
class SqlPart:
    """Rows that were staged.

    :ivar checksum: of the rows of *relation*, as the target computed it when they were staged.
    :ivar relation: their table; ``None``: they are *inside*, as an Arrow stream. :ivar schema: of them.
    :ivar deletes: some are gone. :ivar adds: some are not. :ivar unavailable: columns that some do not know.
    :ivar null_keys: some have a null in their key. :ivar is_known: they may be in the table already.
    """

    rows: int
    size: int
    schema: pa.Schema
    relation: str | None = None
    checksum: int = 0
    inside: bytes | None = None
    deletes: bool = False
    adds: bool = True
    unavailable: tuple[str, ...] = ()
    null_keys: bool = False
    is_known: bool = False


@dataclass(frozen=True, slots=True)
class StagedRelations:
    """What a task has staged for a table of a database.

    :ivar columns: only these are written, of rows that the table has. :ivar at_us: the time of the first row.
    """

    parts: tuple[SqlPart, ...] = ()
    columns: tuple[str, ...] | None = None
    at_us: int | None = None

    @property
    def pieces(self) -> tuple[SqlPart, ...]:
        return self.parts


def packed(rows: pa.Table) -> bytes:
    """*rows* as an Arrow stream, to be inside a part."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, rows.schema) as writer:
        writer.write_table(rows)
    made: bytes = stream.getvalue().to_pybytes()
    return made


def unpacked(part: SqlPart) -> pa.Table:
    """The rows that are inside."""
    return pa.ipc.open_stream(part.inside).read_all()


class Seen:
    """What the rows that pass here need of the merge."""

    def __init__(self, made: SqlTable) -> None:
        self._made = made
        self._deletes = self._adds = self._null_keys = False
        self._unavailable: set[str] = set()

    def all(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        for rows in tables:
            if DELETED in rows.schema.names:
                gone = pc.sum(rows.column(DELETED)).as_py() or 0
                self._deletes |= gone > 0
                self._adds |= gone < rows.num_rows
                self._unavailable.update(unavailable_names(rows.column(UNAVAILABLE_COLUMN), self._made.own.names))
            else:
                self._adds = True
            self._null_keys |= any(rows.column(name).null_count for name in self._made.key)
            yield rows

    def part(self, rows: int, size: int, schema: pa.Schema, **place: Any) -> SqlPart:
        return SqlPart(
            rows,
            size,
            schema,
            **place,
            deletes=self._deletes,
            adds=self._adds,
            unavailable=tuple(sorted(self._unavailable)),
            null_keys=self._null_keys,
        )


def relation_name(table: SqlTable, token: Token) -> str:
    """A name for a relation, of at most 63 characters."""
    numbers = "_".join(f"{number:x}" for number in (token.generation, token.epoch, token.plan, token.attempt))
    return f"s{_owner(table.name, token.query)}_{numbers}_{uuid.uuid4().hex[:10]}"


def is_left(relation: str, table: SqlTable, query: str, generation: int) -> bool:
    """Whether *query* staged it for *table* before *generation*."""
    found = _RELATION.fullmatch(relation)
    return bool(found and found[1] == _owner(table.name, query) and int(found[2], 16) < generation)


def is_done(relation: str, table: SqlTable, token: Token) -> bool:
    """Whether it is of a batch that is committed when that of *token* is."""
    found = _RELATION.fullmatch(relation)
    mine = found and found[1] == _owner(table.name, token.query)
    return bool(mine and found and int(found[3], 16) <= token.epoch and int(found[4], 16) <= token.plan)


def _owner(table: str, query: str) -> str:
    return blake2b(f"{query}\0{table}".encode(), digest_size=8).hexdigest()

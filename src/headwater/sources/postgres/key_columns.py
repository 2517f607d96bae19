"""Key columns: what a statement needs to compare the keys of a table as its indexes do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from psycopg import sql

from headwater.sources.errors import UnsupportedTable
from headwater.sources.postgres.catalog_table import CatalogTable
from headwater.sources.postgres.catalog_types import CatalogType
from headwater.sources.postgres.connection import Connection, ask
from headwater.sources.splits import Cut, KeyRange, SplitKind

# A type is ordered by its own operators, or by those of a type that it is taken for without a change.
_OPERATORS: Final = """
SELECT t.oid::bigint, pg_catalog.format_type(t.oid, -1) AS type_text, o.namespace
FROM unnest(%s::oid[]) t (oid)
LEFT JOIN LATERAL (
  SELECT s.nspname AS namespace
  FROM pg_catalog.pg_opclass f
  JOIN pg_catalog.pg_am m ON m.oid = f.opcmethod AND m.amname = 'btree'
  JOIN pg_catalog.pg_amop p ON p.amopfamily = f.opcfamily AND p.amopstrategy = 4
       AND p.amoplefttype = f.opcintype AND p.amoprighttype = f.opcintype
  JOIN pg_catalog.pg_operator r ON r.oid = p.amopopr
  JOIN pg_catalog.pg_namespace s ON s.oid = r.oprnamespace
  WHERE f.opcdefault AND (f.opcintype = t.oid OR f.opcintype IN (
    SELECT c.casttarget FROM pg_catalog.pg_cast c
    WHERE c.castsource = t.oid AND c.castmethod = 'b' AND c.castcontext = 'i'))
  ORDER BY f.opcintype <> t.oid LIMIT 1
) o ON true
"""

_COLLATIONS: Final = """
SELECT a.attnum AS number, n.nspname AS namespace, c.collname AS name,
       pg_catalog.getdatabaseencoding() IN ('UTF8', 'LATIN1', 'SQL_ASCII') AND
       CASE WHEN c.collprovider = 'd'
            THEN d.datlocprovider = 'b' OR (d.datlocprovider = 'c' AND d.datcollate IN ('C', 'POSIX'))
            ELSE c.collprovider = 'b' OR (c.collprovider = 'c' AND c.collcollate IN ('C', 'POSIX')) END AS bytewise
FROM pg_catalog.pg_attribute a
JOIN pg_catalog.pg_collation c ON c.oid = a.attcollation
JOIN pg_catalog.pg_namespace n ON n.oid = c.collnamespace
JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database()
WHERE a.attrelid = %s AND a.attnum = ANY(%s::int2[])
"""

_INDEXED: Final = """
SELECT EXISTS (
  SELECT FROM pg_catalog.pg_index i
  JOIN pg_catalog.pg_class x ON x.oid = i.indexrelid
  JOIN pg_catalog.pg_am m ON m.oid = x.relam AND m.amname = 'btree'
  WHERE i.indrelid = %(table)s AND i.indisvalid AND i.indpred IS NULL
    AND (i.indkey::int2[])[0:%(last)s] = %(numbers)s::int2[]
    AND NOT EXISTS (
      SELECT FROM ROWS FROM (unnest((i.indkey::int2[])[0:%(last)s]), unnest((i.indcollation::oid[])[0:%(last)s]),
                             unnest((i.indclass::oid[])[0:%(last)s])) k (number, ordering, class)
      JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
      JOIN pg_catalog.pg_opclass f ON f.oid = k.class
      WHERE k.ordering <> a.attcollation OR NOT f.opcdefault)) AS found
"""

_ANY_KINDS: Final = frozenset("erm")  # enums, ranges and multiranges are ordered by operators of all such types


@dataclass(frozen=True, slots=True)
class KeyColumn:
    """One column of a key.

    :ivar type: beneath all domains. :ivar type_sql: it, for a cast that changes no value.
    :ivar operators: the schema of its comparisons. :ivar collation: for ``COLLATE``, where it has one.
    :ivar bytewise: its texts are ordered as their bytes.
    """

    name: str
    type: int
    type_sql: str
    operators: str
    collation: tuple[str, str] | None = None
    bytewise: bool = False


def read_key(session: Connection, table: CatalogTable, names: Sequence[str]) -> tuple[KeyColumn, ...]:
    """The key columns of *table*, in key order.

    :raises UnsupportedTable: one of them has no order, or may be null.
    """
    columns = [next(column for column in table.columns if column.name == name) for name in names]
    bases = [_base(column.type) for column in columns]
    kinds = {row.oid: row for row in ask(session, _OPERATORS, [sorted({kind.oid for kind in _parts(bases)})])}
    numbers = [column.number for column in columns]
    collations = {row.number: row for row in ask(session, _COLLATIONS, [table.oid, numbers])}
    made = []
    for column, base in zip(columns, bases, strict=True):
        if not column.not_null:
            raise UnsupportedTable(
                str(table.name),
                f"its column {column.name!r} may be null, so keys do not order its rows.",
                next_step=f"Add a key: ALTER TABLE {table.name.sql} ADD PRIMARY KEY (…);",
            )
        if not _is_ordered(base, {oid for oid, row in kinds.items() if row.namespace is not None}):
            raise UnsupportedTable(str(table.name), f"values of {column.type_text} ({column.name!r}) have no order.")
        collation = collations.get(column.number)
        made.append(
            KeyColumn(
                column.name,
                base.oid,
                kinds[base.oid].type_text,
                kinds[base.oid].namespace or "pg_catalog",
                (collation.namespace, collation.name) if collation else None,
                bool(collation and collation.bytewise),
            )
        )
    return tuple(made)


def has_key_index(session: Connection, table: CatalogTable, names: Sequence[str]) -> bool:
    """Whether an index orders the rows of *table* by these columns, as comparisons of them do."""
    numbers = [next(column.number for column in table.columns if column.name == name) for name in names]
    with session.cursor() as cursor:
        row = cursor.execute(
            _INDEXED.encode(), {"table": table.oid, "numbers": numbers, "last": len(numbers) - 1}
        ).fetchone()
    return row == (True,)


def condition(kind: SplitKind, part: KeyRange, key: Sequence[KeyColumn]) -> sql.Composable | None:
    """What the rows of *part* fulfil; ``None`` where all do."""
    compare = _block if kind is SplitKind.HEAP else lambda cut, above: _key(cut, above, key)
    made = []
    if part.start is not None:
        made.append(compare(part.start, True))
    if part.end is not None:
        made.append(compare(part.end, False))
    return sql.SQL(" AND ").join(made) if made else None


def key_list(key: Sequence[KeyColumn]) -> sql.Composed:
    """The names of the key columns."""
    return sql.SQL(", ").join(sql.Identifier(column.name) for column in key)


def _block(cut: Cut, above: bool) -> sql.Composed:
    block = int(cut.values[0]) + cut.after
    return sql.SQL("ctid {} {}::pg_catalog.tid").format(sql.SQL(">=" if above else "<"), sql.Literal(f"({block},0)"))


def _key(cut: Cut, above: bool, key: Sequence[KeyColumn]) -> sql.Composed:
    """``key >= cut`` (*above*) or ``key < cut``; with a cut after its values ``>`` and ``<=``."""
    columns = key[: len(cut.values)]
    values = [
        sql.SQL("{}::{}").format(sql.Literal(value), sql.SQL(column.type_sql))
        for value, column in zip(cut.values, columns, strict=True)
    ]
    operator = (">" if cut.after else ">=") if above else ("<=" if cut.after else "<")
    if len(columns) == 1:
        return _compared(columns[0], operator, values[0])
    if all(column.operators == "pg_catalog" for column in columns):
        return sql.SQL("({}) {} ({})").format(key_list(columns), sql.SQL(operator), sql.SQL(", ").join(values))
    return _unfolded(columns, values, operator)


def _unfolded(columns: Sequence[KeyColumn], values: Sequence[sql.Composable], operator: str) -> sql.Composed:
    """A comparison of rows whose operators are in several schemas; the first part is for the index."""
    strict = operator[0]
    cases = []
    for place, column in enumerate(columns):
        equal = [_compared(columns[before], "=", values[before]) for before in range(place)]
        last = place == len(columns) - 1
        cases.append(sql.SQL(" AND ").join([*equal, _compared(column, operator if last else strict, values[place])]))
    return sql.SQL("({} AND ({}))").format(
        _compared(columns[0], f"{strict}=", values[0]), sql.SQL(" OR ").join(sql.SQL("({})").format(c) for c in cases)
    )


def _compared(column: KeyColumn, operator: str, value: sql.Composable) -> sql.Composed:
    return sql.SQL("{} OPERATOR({}.{}) {}").format(
        sql.Identifier(column.name), sql.Identifier(column.operators), sql.SQL(operator), value
    )


def _base(kind: CatalogType) -> CatalogType:
    while kind.base is not None:
        kind = kind.base
    return kind


def _parts(kinds: Sequence[CatalogType]) -> list[CatalogType]:
    """Types and all that they are made of."""
    found: list[CatalogType] = []
    waiting = list(kinds)
    while waiting:
        kind = _base(waiting.pop())
        found.append(kind)
        waiting += [part for part in (kind.element, *(field[1] for field in kind.fields)) if part is not None]
    return found


def _is_ordered(kind: CatalogType, ordered: set[int]) -> bool:
    kind = _base(kind)
    if kind.oid in ordered or kind.kind.value in _ANY_KINDS:
        return True
    if kind.element is not None:
        return _is_ordered(kind.element, ordered)
    return bool(kind.fields) and all(_is_ordered(field[1], ordered) for field in kind.fields)

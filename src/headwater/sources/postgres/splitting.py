"""Splitting: where to cut a table so that its parts have about the same number of rows.

==========================  ==========================================================================================
by key, small table         every n-th key, exactly, from an ordered scan
by key, large table         quantiles of the keys in a sample of its blocks, which no skew and no gaps can mislead
by heap                     ranges of blocks of the same length
==========================  ==========================================================================================

All questions are asked inside the snapshot that the splits are planned in, the first and the last key too. Before the
first and after the last there is nothing: those two splits are *empty*. Cuts are made of all key columns, so that a
first column with few values does no harm. Blocks that are appended after the snapshot have nothing that it shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from psycopg import sql

from headwater.sources.errors import UnsupportedTable
from headwater.sources.postgres.catalog_table import CatalogTable
from headwater.sources.postgres.connection import Connection, ask
from headwater.sources.postgres.csv import read_texts
from headwater.sources.postgres.key_columns import KeyColumn, condition, has_key_index, key_list, read_key
from headwater.sources.splits import Cut, KeyRange, Split, SplitKind, SplitPlan
from headwater.sources.table import SourceTable

EXACT_ROWS: Final = 500_000
"""Tables with no more rows than this are cut exactly."""
SPREAD: Final = 0.5
"""Below this correlation of the key with the heap, reading by key jumps about."""
BLOCKS_PER_SPLIT: Final = 50
FEWEST_BLOCKS, MOST_BLOCKS = 2_000, 100_000
ROWS_PER_SPLIT: Final = 200
MOST_SAMPLED: Final = 2_000_000

_SIZES: Final = """
SELECT (pg_catalog.pg_relation_size(c.oid)
        / pg_catalog.current_setting('block_size')::bigint)::bigint AS blocks,
       pg_catalog.pg_table_size(c.oid) AS size,
       GREATEST(c.reltuples, 0)::float8 AS rows, c.relpages AS pages, a.amname AS method
FROM unnest(%s::oid[]) w (oid)
JOIN pg_catalog.pg_class c ON c.oid = w.oid
LEFT JOIN pg_catalog.pg_am a ON a.oid = c.relam
"""
_CORRELATION: Final = """
SELECT s.correlation FROM pg_catalog.pg_stats s
WHERE s.schemaname = %s AND s.tablename = %s AND s.attname = %s AND NOT s.inherited
"""


def plan_splits(
    session: Connection, table: SourceTable, catalog: CatalogTable, *, split_rows: int, kind: SplitKind | None
) -> SplitPlan:
    """Splits of about *split_rows* rows of *table*, as the open transaction of *session* sees it.

    :param kind: ``None`` chooses: by key; by heap where the key is spread over the heap, or no index has its order.
    :raises UnsupportedTable: it cannot be split in that way.
    """
    heap = _Heap.read(session, catalog)
    chosen, reason = (kind, "") if kind is not None else _choice(session, table, catalog, heap, split_rows)
    if chosen is SplitKind.HEAP:
        heap.require_blocks(catalog)
        return _by_heap(catalog, heap, split_rows, reason)
    return _by_key(session, table, catalog, heap, split_rows)


def page_end(
    session: Connection, table: SourceTable, catalog: CatalogTable, kind: SplitKind, part: KeyRange, rows: int
) -> Cut | None:
    """The cut after the first *rows* rows of *part*; of the heap: after the block that has the last of them."""
    if kind is SplitKind.HEAP:
        order = sql.SQL(" ORDER BY ctid") if catalog.is_partitioned else sql.SQL("")
        where = condition(kind, part, ())
        found = _texts(
            session,
            sql.SQL("SELECT ctid FROM {}{}{} OFFSET {} LIMIT 1").format(
                sql.SQL(catalog.from_sql), _where(where), order, sql.Literal(rows - 1)
            ),
            1,
        )
        if not found:
            return None
        cut = Cut((str(int(found[0][0][1:].partition(",")[0]) + 1),))
        after = condition(kind, KeyRange(cut, part.end), ())
        more = sql.SQL("SELECT 1 FROM {}{} LIMIT 1").format(sql.SQL(catalog.from_sql), _where(after))
        return cut if _texts(session, more, 1) else None
    key = read_key(session, catalog, table.key_columns)
    found = _texts(
        session,
        sql.SQL("SELECT {} FROM {}{} ORDER BY {} OFFSET {} LIMIT 2").format(
            key_list(key),
            sql.SQL(catalog.from_sql),
            _where(condition(kind, part, key)),
            key_list(key),
            sql.Literal(rows - 1),
        ),
        len(key),
    )
    return Cut(found[0], after=True) if len(found) == 2 else None


@dataclass(frozen=True, slots=True)
class _Heap:
    """How much a table has: about how many rows, bytes on disk, blocks in all and in its largest partition."""

    rows: int
    size: int
    blocks: int
    longest: int
    has_blocks: bool

    @classmethod
    def read(cls, session: Connection, catalog: CatalogTable) -> _Heap:
        oids = [leaf.oid for leaf in catalog.leaves] if catalog.is_partitioned else [catalog.oid]
        parts = ask(session, _SIZES, [oids])
        blocks = sum(part.blocks for part in parts)
        density = sum(part.rows for part in parts) / max(1, sum(part.pages for part in parts if part.rows))
        return cls(
            round(blocks * (density or _measured(session, catalog, blocks))),
            sum(part.size for part in parts),
            blocks,
            max((part.blocks for part in parts), default=0),
            all(part.method == "heap" for part in parts),
        )

    def require_blocks(self, catalog: CatalogTable) -> None:
        if not self.has_blocks:
            raise UnsupportedTable(
                str(catalog.name), "its storage has no blocks to read by.", next_step="Split by key."
            )


def _measured(session: Connection, catalog: CatalogTable, blocks: int) -> float:
    """About how many rows a block has, of a table that was never analyzed."""
    if not blocks:
        return 0.0
    part = min(1.0, FEWEST_BLOCKS / blocks)
    counted = sql.SQL("SELECT pg_catalog.count(*) FROM {} TABLESAMPLE SYSTEM ({})").format(
        sql.SQL(catalog.from_sql), sql.Literal(100.0 * part)
    )
    return int(_texts(session, counted, 1)[0][0]) / (blocks * part)


def _choice(
    session: Connection, table: SourceTable, catalog: CatalogTable, heap: _Heap, split_rows: int
) -> tuple[SplitKind, str]:
    """By key or by heap, and why by heap."""
    if not heap.has_blocks:
        return SplitKind.KEY, ""
    try:
        read_key(session, catalog, table.key_columns)
    except UnsupportedTable:
        return SplitKind.HEAP, "its key has no order"
    if heap.rows <= split_rows:
        return SplitKind.KEY, ""
    if not has_key_index(session, catalog, table.key_columns):
        return SplitKind.HEAP, "no index has the order of its key"
    found = ask(session, _CORRELATION, [table.namespace, table.name, table.key_columns[0]])
    if found and found[0].correlation is not None and abs(found[0].correlation) < SPREAD:
        return SplitKind.HEAP, f"its key is spread over the heap (correlation {found[0].correlation:.2f})"
    return SplitKind.KEY, ""


# -- by heap ---------------------------------------------------------------------------------------------------------


def _by_heap(catalog: CatalogTable, heap: _Heap, split_rows: int, reason: str) -> SplitPlan:
    count = max(1, min(heap.longest, round(heap.rows / split_rows)))
    places = sorted({heap.longest * number // count for number in range(1, count)} - {0})
    cuts: list[Cut | None] = [None, *(Cut((str(place),)) for place in places), None]
    rows = heap.rows // (len(cuts) - 1)
    splits = tuple(
        Split(number, KeyRange(start, end), rows, empty=heap.blocks == 0)
        for number, (start, end) in enumerate(pairwise(cuts))
    )
    why = f"{len(splits)} ranges of blocks of the heap" + (f", as {reason}." if reason else ".")
    return SplitPlan(SplitKind.HEAP, splits, heap.rows, heap.size, why)


# -- by key ----------------------------------------------------------------------------------------------------------


def _by_key(session: Connection, table: SourceTable, catalog: CatalogTable, heap: _Heap, split_rows: int) -> SplitPlan:
    key = read_key(session, catalog, table.key_columns)
    if heap.rows <= EXACT_ROWS:
        keys, rows = _every(session, catalog, key, split_rows)
        why = f"every {split_rows:,}th key, from a scan of all keys."
    else:
        keys, rows = _sampled(session, catalog, key, heap, split_rows), heap.rows
        why = "quantiles of the keys in a sample of its blocks."
    first, last = (_end(session, catalog, key, order) for order in ("ASC", "DESC"))
    if first is None or last is None:
        return SplitPlan(SplitKind.KEY, (Split(0, KeyRange(), 0, empty=True),), 0, heap.size, "It has no rows.")
    inner = [values for values in dict.fromkeys(keys) if values != first]
    cuts = [None, Cut(first), *(Cut(values) for values in inner), Cut(last, after=True), None]
    filled = len(cuts) - 3
    each = max(1, rows // filled)
    splits = tuple(
        Split(number, KeyRange(start, end), 0 if empty else each, empty)
        for number, (start, end) in enumerate(pairwise(cuts))
        for empty in (number in (0, filled + 1),)
    )
    return SplitPlan(SplitKind.KEY, splits, rows, heap.size, f"{filled} ranges of keys: {why}")


def _every(
    session: Connection, catalog: CatalogTable, key: Sequence[KeyColumn], split_rows: int
) -> tuple[list[tuple[str, ...]], int]:
    """Every *split_rows*-th key from the first on, and how many rows there are."""
    found = _texts(
        session,
        sql.SQL(
            "SELECT {keys}, n FROM (SELECT {names}, pg_catalog.row_number() OVER w, pg_catalog.lead(1) OVER w"
            " FROM {table} WINDOW w AS (ORDER BY {names})) s ({keys}, n, more)"
            " WHERE (n - 1) % {step} = 0 OR more IS NULL ORDER BY n"
        ).format(
            keys=_aliases(key),
            names=key_list(key),
            table=sql.SQL(catalog.from_sql),
            step=sql.Literal(split_rows),
        ),
        len(key) + 1,
    )
    if not found:
        return [], 0
    return [row[:-1] for row in found if (int(row[-1]) - 1) % split_rows == 0], int(found[-1][-1])


def _sampled(
    session: Connection, catalog: CatalogTable, key: Sequence[KeyColumn], heap: _Heap, split_rows: int
) -> list[tuple[str, ...]]:
    """Keys that part the rows of a sample of blocks into as many splits as the table is to have."""
    count = max(1, round(heap.rows / split_rows))
    blocks = min(max(BLOCKS_PER_SPLIT * count, FEWEST_BLOCKS), MOST_BLOCKS, heap.blocks)
    sampled = blocks * heap.rows / heap.blocks
    kept = min(1.0, max(ROWS_PER_SPLIT * count, FEWEST_BLOCKS) / sampled, MOST_SAMPLED / sampled)
    return _texts(
        session,
        sql.SQL(
            "SELECT {keys} FROM (SELECT {keys}, bucket, pg_catalog.lag(bucket) OVER (ORDER BY {keys}) AS before"
            " FROM (SELECT {names}, pg_catalog.ntile({count}) OVER (ORDER BY {names})"
            " FROM {table} TABLESAMPLE SYSTEM ({percent}) WHERE pg_catalog.random() < {kept}) s ({keys}, bucket)) b"
            " WHERE bucket <> before ORDER BY {keys}"
        ).format(
            keys=_aliases(key),
            names=key_list(key),
            table=sql.SQL(catalog.from_sql),
            count=sql.Literal(count),
            percent=sql.Literal(min(100.0, 100.0 * blocks / heap.blocks)),
            kept=sql.Literal(kept),
        ),
        len(key),
    )


def _end(session: Connection, catalog: CatalogTable, key: Sequence[KeyColumn], order: str) -> tuple[str, ...] | None:
    by = sql.SQL(", ").join(sql.SQL("{} {}").format(sql.Identifier(column.name), sql.SQL(order)) for column in key)
    found = _texts(
        session,
        sql.SQL("SELECT {} FROM {} ORDER BY {} LIMIT 1").format(key_list(key), sql.SQL(catalog.from_sql), by),
        len(key),
    )
    return found[0] if found else None


def _aliases(key: Sequence[KeyColumn]) -> sql.Composed:
    """Names of ours for key columns: theirs may be those that a statement gives to what it counts."""
    return sql.SQL(", ").join(sql.Identifier(f"key{place}") for place in range(len(key)))


def _where(given: sql.Composable | None) -> sql.Composable:
    return sql.SQL("") if given is None else sql.SQL(" WHERE {}").format(given)


def _texts(session: Connection, query: sql.Composable, columns: int) -> list[tuple[str, ...]]:
    """The rows of a query, each value as the server prints it in a column of a snapshot."""
    statement = sql.SQL("COPY ({}) TO STDOUT (FORMAT csv)").format(query)
    with session.cursor() as cursor, cursor.copy(statement) as copy:
        data = b"".join(bytes(block) for block in copy)
    table = read_texts("", data, columns)
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))

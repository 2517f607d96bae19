"""Splitting: where to cut a table so that its parts have about the same number of rows.

==================================  ==================================================================================
large table, whole number first     the range of the first key column is halved wherever the index says that a half has
                                    too many rows: gaps and skew end in more halves where the rows are. After
                                    :data:`MOST_HALVED` of them those that are too large are divided evenly
other tables                        every n-th key, exactly, by steps along the index of the key
other tables, very large            one split, of which pages of exactly so many rows are handed out, one by one
==================================  ==================================================================================

The index tells how many rows lie between two keys (``EXPLAIN``), by looking at its pages: no table is read for it. One
value of the first column with too many rows is a split that is handed out in pages. The first split has no start and
the last no end, and both are read: they may have had rows at the place in the log that rows are brought back to.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from headwater.sources.errors import UnsupportedTable
from headwater.sources.key_conditions import condition, where
from headwater.sources.mysql.catalog import CatalogTable
from headwater.sources.mysql.connection import Connection, ask
from headwater.sources.mysql.key_columns import INTEGERS, KeyColumn, key_list, key_texts, read_key
from headwater.sources.mysql.names import quoted
from headwater.sources.splits import Cut, KeyRange, Split, SplitKind, SplitPlan
from headwater.sources.table import SourceTable

HALVED_ROWS: Final = 200_000
"""From here on, by the server's estimate, a table is not scanned for its cuts where its index tells them."""
STEPPED_ROWS: Final = 20_000_000
"""Nor is a larger one for any other key."""
UNKNOWN_ROWS: Final = -1
"""Of a split that is handed out in pages."""
MOST_HALVED: Final = 1_000
"""Each is two questions to the server: planning ends within seconds, however large the table is."""
_SLACK: Final = 1.5


def plan_splits(
    session: Connection, table: SourceTable, catalog: CatalogTable, split_rows: int, kind: SplitKind | None
) -> SplitPlan:
    """Splits of about *split_rows* rows of *table*. :raises UnsupportedTable: by heap."""
    if kind is SplitKind.HEAP:
        raise UnsupportedTable(
            table.full_name,
            "its rows lie in the order of its key, and have no other place.",
            next_step="Set split_kind to key, or leave it out.",
        )
    key = read_key(catalog, table)
    if catalog.rows > HALVED_ROWS and split_rows >= catalog.rows:
        return SplitPlan(
            SplitKind.KEY, (Split(0, KeyRange(), catalog.rows),), catalog.rows, catalog.size, "1 range: all of it."
        )
    if catalog.rows > HALVED_ROWS and key[0].kind in INTEGERS:
        return _by_halves(session, catalog, key, split_rows)
    if catalog.rows <= STEPPED_ROWS:
        return _by_steps(session, catalog, key, split_rows)
    why = "pages of its key, each found when it is handed out."
    return SplitPlan(
        SplitKind.KEY, (Split(0, KeyRange(), UNKNOWN_ROWS),), catalog.rows, catalog.size, f"1 range: {why}"
    )


def page_end(session: Connection, table: SourceTable, catalog: CatalogTable, part: KeyRange, rows: int) -> Cut | None:
    """The cut after the first *rows* rows of *part*; ``None`` when it has no more than that."""
    found = _keys(session, catalog, read_key(catalog, table), part, rows - 1, 2)
    return Cut(found[0], after=True) if len(found) == 2 else None


def from_sql(catalog: CatalogTable) -> str:
    """The table, read along the index of its key."""
    return f"{catalog.name.sql} FORCE INDEX ({quoted(catalog.key_index)})"


def _keys(
    session: Connection, catalog: CatalogTable, key: Sequence[KeyColumn], part: KeyRange, skipped: int, count: int
) -> list[tuple[str, ...]]:
    rows = ask(
        session,
        f"SELECT {', '.join(f'{column.text_sql} AS key{place}' for place, column in enumerate(key))}"
        f" FROM {from_sql(catalog)}{where(part, key)} ORDER BY {key_list(key)} LIMIT {count} OFFSET {skipped}",
    )
    return [tuple(str(row[f"key{place}"]) for place in range(len(key))) for row in rows]


def _by_steps(session: Connection, catalog: CatalogTable, key: Sequence[KeyColumn], split_rows: int) -> SplitPlan:
    cuts: list[Cut | None] = [None]
    while True:
        found = _keys(session, catalog, key, KeyRange(cuts[-1]), split_rows, 1)
        if not found:
            break
        cuts.append(Cut(found[0]))
    rest = KeyRange(cuts[-1])
    last = int(ask(session, f"SELECT COUNT(*) AS n FROM {from_sql(catalog)}{where(rest, key)}")[0]["n"])
    cuts.append(None)
    splits = tuple(
        Split(number, KeyRange(start, end), split_rows if end is not None else last)
        for number, (start, end) in enumerate(pairwise(cuts))
    )
    rows = split_rows * (len(splits) - 1) + last
    why = f"{len(splits)} ranges of keys: every {split_rows:,}th key, by steps along its index."
    return SplitPlan(SplitKind.KEY, splits, rows, catalog.size, why)


def _by_halves(session: Connection, catalog: CatalogTable, key: Sequence[KeyColumn], split_rows: int) -> SplitPlan:
    name = quoted(key[0].name)
    ends = ask(session, f"SELECT MIN({name}) AS low, MAX({name}) AS high FROM {from_sql(catalog)}")[0]
    if ends["low"] is None:
        return SplitPlan(SplitKind.KEY, (Split(0, KeyRange(), 0),), 0, catalog.size, "It has no rows.")
    low, high = int(ends["low"]), int(ends["high"])
    halves = [(-catalog.rows, low, high + 1)]
    for _ in range(MOST_HALVED):
        rows, start, end = halves[0]
        if -rows <= _SLACK * split_rows:
            break
        if end - start == 1:  # one value with too many rows: pages
            heapq.heapreplace(halves, (-UNKNOWN_ROWS, start, end))
            continue
        middle = (start + end) // 2
        left, right = (_estimate(session, catalog, key, a, b) for a, b in ((start, middle), (middle, end)))
        heapq.heapreplace(halves, (-left, start, middle))
        heapq.heappush(halves, (-right, middle, end))
    found = sorted((start, end, -rows) for rows, start, end in halves)
    parts = _merged([part for half in found for part in _divided(*half, split_rows)], split_rows)
    cuts = [None, *(Cut((str(start),)) for start, _ in parts[1:]), None]
    splits = tuple(
        Split(number, KeyRange(start, end), parts[number][1]) for number, (start, end) in enumerate(pairwise(cuts))
    )
    why = f"{len(splits)} ranges of keys: halves of {key[0].name}, as its index tells the rows."
    return SplitPlan(SplitKind.KEY, splits, catalog.rows, catalog.size, why)


def _estimate(session: Connection, catalog: CatalogTable, key: Sequence[KeyColumn], start: int, end: int) -> int:
    part = condition(KeyRange(Cut((str(start),)), Cut((str(end),))), key[:1])
    rows = ask(session, f"EXPLAIN SELECT {key_texts(key[:1])} FROM {from_sql(catalog)} WHERE {part}")
    return int(rows[0]["rows"] or 0)


def _divided(start: int, end: int, rows: int, split_rows: int) -> list[tuple[int, int, int]]:
    """A half in even parts, where it has too many rows still."""
    count = 1 if rows <= _SLACK * split_rows else min(-(-rows // split_rows), end - start)
    cuts = [start + (end - start) * number // count for number in range(count + 1)]
    return [(first, last, rows if count == 1 else rows // count) for first, last in pairwise(cuts)]


def _merged(halves: Sequence[tuple[int, int, int]], split_rows: int) -> list[tuple[int, int]]:
    """Neighbours with few rows as one: the start and the rows of each."""
    made: list[tuple[int, int]] = []
    for start, _, rows in halves:
        before = made[-1][1] if made else UNKNOWN_ROWS
        if UNKNOWN_ROWS not in (before, rows) and before + rows <= _SLACK * split_rows:
            made[-1] = (made[-1][0], before + rows)
        else:
            made.append((start, rows))
    return made

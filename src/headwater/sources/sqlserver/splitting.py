"""Splitting: where to cut a table so that its parts have about the same number of rows.

=====================  ===============================================================================================
tables                 every n-th key, exactly, in one statement along the index of the key
very large tables      one split, of which pages of exactly so many rows are handed out, one by one
=====================  ===============================================================================================

The server orders the keys and prints them; nothing of its order is repeated here. The first split has no start and the
last no end, and both are read: they may have had rows at the place in the log that rows are brought back to.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from headwater.sources.errors import UnsupportedTable
from headwater.sources.key_conditions import where
from headwater.sources.splits import Cut, KeyRange, Split, SplitKind, SplitPlan
from headwater.sources.sqlserver.catalog import CatalogTable, size_of
from headwater.sources.sqlserver.connection import Session
from headwater.sources.sqlserver.key_columns import KeyColumn, key_list, key_texts, read_key
from headwater.sources.sqlserver.values import broken_texts_named
from headwater.sources.table import SourceTable

NUMBERED_ROWS: Final = 20_000_000
"""Above that, by the server's count, a table is not walked for its cuts."""
UNKNOWN_ROWS: Final = -1
"""Of a split that is handed out in pages."""


def plan_splits(
    session: Session, table: SourceTable, catalog: CatalogTable, split_rows: int, kind: SplitKind | None
) -> SplitPlan:
    """Splits of about *split_rows* rows of *table*. :raises UnsupportedTable: by heap."""
    if kind is SplitKind.HEAP:
        raise UnsupportedTable(
            table.full_name,
            "places in its files cannot be asked for.",
            next_step="Set split_kind to key, or leave it out.",
        )
    key = read_key(catalog, table)
    rows, size = size_of(session, catalog)
    if rows <= split_rows:
        return SplitPlan(SplitKind.KEY, (Split(0, KeyRange(), rows),), rows, size, "1 range: all of it.")
    if rows > NUMBERED_ROWS:
        why = "1 range: pages of its key, each found when it is handed out."
        return SplitPlan(SplitKind.KEY, (Split(0, KeyRange(), UNKNOWN_ROWS),), rows, size, why)
    found = _keys(
        session,
        table,
        f"SELECT {key_texts(key)} FROM (SELECT {key_list(key)}, ROW_NUMBER() OVER (ORDER BY {key_list(key)}) AS [n]"
        f" FROM {catalog.name.sql}) AS [numbered] WHERE [n] % {split_rows} = 0 ORDER BY [n]",
        key,
    )
    cuts: list[Cut | None] = [None, *(Cut(texts, after=True) for texts in found), None]
    last = max(0, rows - split_rows * len(found))
    splits = tuple(
        Split(number, KeyRange(start, end), split_rows if end is not None else last)
        for number, (start, end) in enumerate(pairwise(cuts))
    )
    why = f"{len(splits)} ranges of keys: every {split_rows:,}th key, along its index."
    return SplitPlan(SplitKind.KEY, splits, rows, size, why)


def page_end(session: Session, table: SourceTable, catalog: CatalogTable, part: KeyRange, rows: int) -> Cut | None:
    """The cut after the first *rows* rows of *part*; ``None`` when it has no more than that."""
    key = read_key(catalog, table)
    found = _keys(
        session,
        table,
        f"SELECT {key_texts(key)} FROM {catalog.name.sql}{where(part, key)} ORDER BY {key_list(key)}"
        f" OFFSET {rows - 1} ROWS FETCH NEXT 2 ROWS ONLY",
        key,
    )
    return Cut(found[0], after=True) if len(found) == 2 else None


def _keys(session: Session, table: SourceTable, statement: str, key: Sequence[KeyColumn]) -> list[tuple[str, ...]]:
    """The texts of the keys that *statement* gives. :raises BrokenText: one is no Unicode."""
    with broken_texts_named(table, [table.column(column.name) for column in key]):
        found = session.ask(statement)
    return [tuple(str(row[f"k{place}"]) for place in range(len(key))) for row in found]

"""What tasks stage for a sink in a database, and what of it its target is given. Rows are in memory or in relations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.sinks.batch import in_ranges, is_all
from headwater.sinks.fold import DELETED
from headwater.sinks.sink import Mode, Staged
from headwater.sinks.sql_table import SqlPart, SqlTable, unpacked
from headwater.sinks.sql_target import Target
from headwater.sources.table import UNAVAILABLE_COLUMN
from headwater.sources.unavailable import unavailable_names
from headwater.stream.vnode import hash_keys


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


class Apart:
    """Rows that may be in the table already, kept apart from the others where no key tells them."""

    def __init__(self, made: SqlTable, changed: Any) -> None:
        self._keys = made.key
        wanted = changed is not None and made.is_whole and made.mode is Mode.MIRROR
        self._changed = np.sort(np.asarray(changed, np.uint64)) if wanted else np.zeros(0, np.uint64)
        self.taken: list[pa.RecordBatch] = []

    def others(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        for batch in batches:
            if self._changed.size:
                is_known = np.isin(hash_keys(batch, self._keys), self._changed)
                self.taken.append(batch.filter(pa.array(is_known)))
                batch = batch.filter(pa.array(~is_known))
            yield pa.Table.from_batches([batch])


def sources(target: Target, made: SqlTable, staged: Sequence[Staged]) -> Iterator[Any]:
    """What was staged, in order; what came inside from several tasks is one, for it is of different keys."""
    inside: list[SqlPart] = []
    for one in staged:
        parts: tuple[SqlPart, ...] = one.detail.parts
        if len(parts) == 1 and parts[0].inside is not None and (not inside or parts[0].schema == inside[0].schema):
            inside += parts
            continue
        for part in parts:
            yield target.source(made, part)
    if inside:
        joined = replace(
            inside[0],
            deletes=any(part.deletes for part in inside),
            adds=any(part.adds for part in inside),
            unavailable=tuple(sorted({name for part in inside for name in part.unavailable})),
            null_keys=any(part.null_keys for part in inside),
        )
        yield target.rows_source(made, pa.concat_tables([unpacked(part) for part in inside]), joined)


def keys_in(target: Target, made: SqlTable, staged: Staged) -> Iterator[Any]:
    """The keys that the table has in the ranges of *staged*, as sources; ``None`` where that is all of them."""
    if is_all(staged.ranges or ()):
        yield None
        return
    found: list[pa.Table] = []
    for rows in target.read(made, made.key, current=made.mode is Mode.HISTORY):
        keys = [rows.column(name) for name in made.key]
        found.append(rows.filter(pa.array(in_ranges(staged, keys))))
    found = [rows for rows in found if rows.num_rows]
    if found:
        joined = pa.concat_tables(found)
        yield target.rows_source(made, joined, SqlPart(joined.num_rows, joined.nbytes, joined.schema))

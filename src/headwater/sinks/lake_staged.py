"""What sinks of tables of files stage: parts and files of a batch, which keys they replace, when. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from headwater.sinks.data_files import DataFile
from headwater.sinks.fold import DELETED
from headwater.sinks.keys import KeySet
from headwater.sinks.replaced import rows_in_ranges
from headwater.sinks.sink import Staged, Token
from headwater.sinks.staging import Part
from headwater.sources.snapshots import KeyOrder
from headwater.sources.splits import KeyRange
from headwater.sources.table import UNAVAILABLE_COLUMN, SourceTable
from headwater.stream.vnode import hash_keys


class Apart:
    """Rows whose key may be in the table already, kept apart from the others."""

    def __init__(self, table: SourceTable, changed: Any) -> None:
        self._keys = table.key_columns
        self._changed = None if changed is None else np.sort(np.asarray(changed, np.uint64))
        self._taken: list[pa.RecordBatch] = []

    @property
    def taken(self) -> Iterator[pa.RecordBatch]:
        return iter(self._taken)

    def others(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if self._changed is not None and self._changed.size:
                hashes = hash_keys(batch, self._keys)
                places = np.minimum(np.searchsorted(self._changed, hashes), self._changed.size - 1)
                is_known = self._changed[places] == hashes
                if is_known.any():
                    self._taken.append(batch.filter(pa.array(is_known)))
                    batch = batch.filter(pa.array(~is_known))
            yield batch


def staged_of(
    table: SourceTable,
    token: Token,
    is_snapshot: bool,
    *,
    files: Sequence[DataFile] = (),
    parts: Sequence[Part] = (),
    truncated: tuple[int, int] | None = None,
    after: int | None = None,
    ranges: tuple[KeyRange, ...] | None = None,
    order: KeyOrder | None = None,
    only_existing: bool = False,
    since_us: int | None = None,
) -> Staged:
    """:param since_us: the time of the first of its rows."""
    detail = {"files": list(files), "parts": list(parts), "ranges": ranges, "order": order, "truncated": truncated}
    staged: list[DataFile | Part] = [*files, *parts]
    return Staged(
        table,
        token,
        is_snapshot,
        rows=sum(one.rows for one in staged),
        size=sum(one.size for one in staged),
        truncated=truncated is not None,
        detail={
            **detail,
            "only_existing": only_existing,
            "after": token.epoch if after is None else after,
            "since_us": since_us,
        },
    )


def parts_of(staged: Sequence[Staged]) -> list[Part]:
    return [part for one in staged for part in one.detail["parts"]]


def upserts(rows: pa.Table, unavailable: str | None) -> pa.Table:
    """Rows as folded ones."""
    gone = pa.repeat(pa.scalar(False), rows.num_rows)
    texts = pa.repeat(pa.scalar(unavailable, pa.string()), rows.num_rows)
    return rows.append_column(DELETED, gone).append_column(UNAVAILABLE_COLUMN, texts)


def in_ranges(staged: Staged, keys: pa.Table) -> Any:
    """Which rows lie in the ranges of *staged*, given their key columns as the table of files has them."""
    return rows_in_ranges(staged.table, staged.detail["order"], staged.detail["ranges"], keys.columns)


def is_gone(staged: Staged, told: KeySet, keys: pa.Table) -> Any:
    """Which rows lie in the ranges of *staged* and are not among those that were read there."""
    return in_ranges(staged, keys) & (told.find(keys) < 0)

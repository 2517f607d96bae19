"""The parts of a table that the tasks of a batch read, one each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Final

from headwater.sources.errors import UnsupportedTable
from headwater.sources.snapshots import ExportedSnapshot
from headwater.sources.splits import KeyRange, Split, SplitKind, SplitPlan
from headwater.sources.table import SourceTable
from headwater.spark.options import SPLIT_ROWS
from headwater.spark.pushdown import Bounds, narrowed

_PARTS: Final = 8
"""So many parts for each task that runs at a time, where there are rows enough: a part costs a tenth of a second."""
_MOST_ROWS: Final = 1_000_000
"""A part that is read again after a failure should not be larger."""


def planned_parts(
    snapshot: ExportedSnapshot, table: SourceTable, bounds: Bounds | None, split_rows: int | None, parallelism: int
) -> tuple[tuple[KeyRange, ...], SplitKind]:
    """What tasks read, the largest part first: together all rows that the table has now or in a later snapshot.

    :param bounds: of the first key column: splits are made by key, and only within them, where keys order the rows.
    :param split_rows: about how many rows a part has; ``None``: as many as suit.
    """
    plan, rows = None, split_rows or SPLIT_ROWS
    if bounds is not None and bounds != Bounds():
        with suppress(UnsupportedTable):  # keys do not order its rows: all are read, and Spark filters them
            plan = snapshot.plan(table, split_rows=rows, kind=SplitKind.KEY)
    if plan is None:
        bounds, plan = None, _whole(snapshot, table, rows)
    splits = _without_empty(plan.splits)
    if split_rows is None:
        splits = _joined(splits, max(_PARTS * parallelism, plan.rows // _MOST_ROWS))
    ranges = [split.range for split in sorted(splits, key=lambda split: -split.rows)]
    if bounds is not None:
        ranges = [part for part in (narrowed(part, bounds) for part in ranges) if part is not None]
    return tuple(ranges), plan.kind


def _whole(snapshot: ExportedSnapshot, table: SourceTable, split_rows: int) -> SplitPlan:
    """By heap where there is one: all is read in one snapshot, so that nothing but the cost of a scan matters."""
    try:
        return snapshot.plan(table, split_rows=split_rows, kind=SplitKind.HEAP)
    except UnsupportedTable:
        return snapshot.plan(table, split_rows=split_rows)


def _without_empty(splits: Sequence[Split]) -> list[Split]:
    """All that they cover, because there can be rows later; empty ones are joined with a neighbour."""
    found: list[Split] = []
    for split in splits or [Split(0, KeyRange(), 0)]:
        last = found[-1] if found else None
        if last is not None and (last.empty or split.empty):
            covered = KeyRange(last.range.start, split.range.end)
            found[-1] = Split(last.number, covered, last.rows + split.rows, last.empty and split.empty)
        else:
            found.append(split)
    return found


def _joined(splits: Sequence[Split], most: int) -> list[Split]:
    """Neighbours joined until there are at most *most*."""
    count = min(most, len(splits))
    cuts = [len(splits) * number // count for number in range(count + 1)] if count else []
    return [
        Split(
            number, KeyRange(splits[low].range.start, splits[high - 1].range.end), sum(s.rows for s in splits[low:high])
        )
        for number, (low, high) in enumerate(pairwise(cuts))
    ]

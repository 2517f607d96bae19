"""The units of a batch: what was planned, cut into what tasks read. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

from headwater.backfill.cdc.executor import HandedOut
from headwater.backfill.log_ranges import TableChanges
from headwater.backfill.offset import QueryOffset
from headwater.backfill.plans import PlanRecord
from headwater.backfill.query_table import QueryTable
from headwater.backfill.tasks import Slots, tasks_of
from headwater.backfill.units import LogUnit, SplitUnit, covered
from headwater.sources.snapshots import ExportedSnapshot
from headwater.sources.table import SourceTable
from headwater.stream import DEFAULT_VNODE_COUNT

_SHARES: Final = (4, 2, 1)
"""What tasks that run side by side read, one after the other: with the small ones last, they end together."""


def log_units(table: QueryTable, changes: TableChanges, end: QueryOffset, slots: Slots) -> list[LogUnit]:
    """The changes of *table* in a batch up to *end*, by ranges of vnodes."""
    if changes.emptied and table.executor is not None:  # the sink empties its table; history follows
        return [LogUnit(changes.table, end.epoch, end.epoch, 0, 1, end.plan, truncated=changes.truncated)]
    kept = table.filter(end.plan)
    count = table.consumer.vnode_count or DEFAULT_VNODE_COUNT
    parts = min(tasks_of(changes.rows, changes.size, slots), count)
    cuts = [count * part // parts for part in range(parts + 1)]
    return [
        LogUnit(
            changes.table,
            changes.after,
            end.epoch,
            low,
            high,
            end.plan,
            kept,
            changes.truncated,
            changes.rows // parts,
            changes.size // parts,
        )
        for low, high in pairwise(cuts)
    ]


def split_units(
    table: QueryTable,
    newest: SourceTable,
    plan: PlanRecord,
    snapshot: ExportedSnapshot,
    upto: int,
    slots: Slots,
    *,
    by_number: bool,
) -> list[SplitUnit]:
    """The history of *table* that *plan* reads inside *snapshot*.

    :param newest: the table as its log has it after the batch, which ends with the epoch *upto*.
    :param by_number: see :meth:`QueryTable.readable`.
    """
    readable = table.readable(newest, snapshot, by_number=by_number)
    handed = table.handed_out(plan.number)
    rows = sum(part.rows for part in handed)
    tasks = tasks_of(rows, 0, slots) if rows or len(handed) < 2 else slots()
    return [
        SplitUnit(
            table=readable,
            kind=table.kind,
            ranges=tuple(covered([part.range for part in parts])),
            snapshot=snapshot.name,
            plan=plan.number,
            attempt=plan.attempt,
            upto=upto,
            position=bytes.fromhex(plan.positions[table.name]),
            commit_time_us=plan.commit_time_us,
            rows=sum(part.rows for part in parts),
            columns=table.columns,
            changed_since=table.changed_since,
            until=None if table.changed_since is None else snapshot.mark.high,
            replaces=table.replaces,
            rereads=table.rereads,
        )
        for parts in ([handed] if handed and tasks == 1 else groups(handed, tasks))
    ]


def groups(parts: Sequence[HandedOut], parallelism: int) -> list[list[HandedOut]]:
    """Neighbours together, for *parallelism* tasks at a time: first large groups, then ever smaller ones."""
    total = sum(max(part.rows, 1) for part in parts)
    ends = accumulate(share * total / (sum(_SHARES) * parallelism) for share in _SHARES for _ in range(parallelism))
    made: list[list[HandedOut]] = []
    passed, end = 0, 0.0
    for part in parts:
        if not made or passed >= end:
            made.append([])
            end = next(later for later in ends if later > passed)
        made[-1].append(part)
        passed += max(part.rows, 1)
    return made

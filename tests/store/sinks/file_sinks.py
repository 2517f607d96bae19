"""Rows of a log and of history for tests of sinks of files, and a table as it must become."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.log_store.columns import read_schema
from headwater.sinks.sink import HistoryPart, Sink, Staged, Token
from headwater.sources.splits import Cut, KeyRange, SplitKind
from headwater.sources.table import SourceColumn, SourceTable
from headwater.stream.op import Op

POSITION = pa.binary(16)
INSERT, DELETE, UPDATE, OLD = Op.INSERT, Op.DELETE, Op.UPDATE_INSERT, Op.UPDATE_DELETE


def table_of(columns: dict[str, pa.DataType], key: Sequence[str] = ("id",), name: str = "orders") -> SourceTable:
    made = tuple(
        SourceColumn(column, kind, str(kind), place + 1) for place, (column, kind) in enumerate(columns.items())
    )
    return SourceTable("public", name, made, tuple(key))


ORDERS = table_of({"id": pa.int64(), "status": pa.string(), "total": pa.decimal128(10, 2)})


def position(commit: int) -> bytes:
    return commit.to_bytes(8, "big") + bytes(8)


def log_rows(table: SourceTable, changes: Sequence[tuple[Any, ...]], epoch: int = 1, first: int = 0) -> pa.RecordBatch:
    """Rows of the table's log: each change is ``(op, values, names of unavailable columns or nothing)``."""
    columns: dict[str, Any] = {
        column.name: pa.array([change[1].get(column.name) for change in changes], column.type)
        for column in table.columns
    }
    rows = len(changes)
    columns["_position"] = pa.array([position(epoch * 100 + place) for place in range(rows)], POSITION)
    columns["_commit_timestamp"] = pa.array([epoch * 1_000_000] * rows, pa.timestamp("us", tz="UTC"))
    columns["_unavailable"] = pa.array([change[2] if len(change) > 2 else None for change in changes], pa.string())
    columns["_op"] = pa.array([int(change[0]) for change in changes], pa.int8())
    columns["_vnode"] = pa.array([0] * rows, pa.uint16())
    columns["_seq"] = pa.array(range(first, first + rows), pa.uint32())
    columns["_epoch"] = pa.array([epoch] * rows, pa.uint64())
    return pa.RecordBatch.from_pydict(columns, schema=read_schema(table.log_schema(POSITION)))


def own_rows(table: SourceTable, rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=table.schema)


def history_part(ranges: Sequence[tuple[Any, Any]] = ((None, None),), **more: Any) -> HistoryPart:
    """Parts of history between whole keys."""
    made = tuple(KeyRange(*(None if key is None else Cut((str(key),)) for key in pair)) for pair in ranges)
    return HistoryPart(SplitKind.KEY, made, position(7), 1_000_000, **more)


@dataclass(frozen=True)
class IntegerOrder:
    """Keys are integers."""

    def places(self, keys: pa.RecordBatch, cuts: Sequence[Cut]) -> NDArray[np.int64]:
        values = keys.column(0).to_numpy()
        found = [(values >= int(cut.values[0])) if not cut.after else (values > int(cut.values[0])) for cut in cuts]
        return np.asarray(np.sum(np.array(found, np.int64), axis=0), np.int64)


class Feed:
    """Delivers batches of one table to *sink*."""

    def __init__(self, sink: Sink, table: SourceTable = ORDERS, query: str = "q", backfill: str = "b1") -> None:
        self.sink = sink
        self.table = table
        self.query = query
        self.backfill = backfill

    def token(self, epoch: int, plan: int = 0, attempt: int = 0) -> Token:
        return Token(self.query, self.backfill, max(epoch - 1, 0), epoch, plan, attempt)

    def stage_changes(
        self,
        token: Token,
        changes: Sequence[tuple[Any, ...]],
        truncated: tuple[int, int] | None = None,
        table: SourceTable | None = None,
    ) -> Staged:
        table = table or self.table
        return self.sink.stage_changes(table, token, iter([log_rows(table, changes, token.epoch)]), truncated)

    def stage_history(self, token: Token, rows: Sequence[dict[str, Any]], **part: Any) -> Staged:
        table = self.table
        wanted = part.get("columns")
        batch = own_rows(table, rows)
        if wanted is not None:
            batch = batch.select([*table.key_columns, *wanted])
        batches: Iterator[pa.RecordBatch] = iter([batch] if rows else [])
        return self.sink.stage_history(table, token, history_part(**part), batches)

    def changes(self, epoch: int, *changes: tuple[Any, ...], **more: Any) -> bool:
        token = self.token(epoch)
        return self.sink.commit(self.table, token, [self.stage_changes(token, changes, **more)])

    def history(self, plan: int, rows: Sequence[dict[str, Any]], epoch: int = 0, **part: Any) -> bool:
        token = self.token(epoch, plan)
        return self.sink.commit(self.table, token, [self.stage_history(token, rows, **part)])


def order(id: int, status: str | None = "new", total: str | None = "1.00") -> dict[str, Any]:  # noqa: A002
    from decimal import Decimal

    return {"id": id, "status": status, "total": None if total is None else Decimal(total)}

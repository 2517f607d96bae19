"""Rows of a log and of history for tests of sinks of files, and a table as it must become."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
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


def with_columns(table: SourceTable, *columns: SourceColumn) -> SourceTable:
    return replace(table, columns=columns)


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


def many_rows(keys: NDArray[np.int64]) -> pa.RecordBatch:
    """An order for each of *keys*."""
    columns = {
        "id": keys,
        "status": pa.repeat(pa.scalar("new"), keys.size),
        "total": pa.repeat(pa.scalar(Decimal("2.50"), pa.decimal128(10, 2)), keys.size),
    }
    return pa.RecordBatch.from_pydict(columns, schema=ORDERS.schema)


def many_changes(keys: NDArray[np.int64], op: int, epoch: int = 1) -> pa.RecordBatch:
    """A change of each of the orders *keys*, to what :func:`order` makes."""
    pattern = log_rows(ORDERS, [(op, order(0))], epoch)
    filled = {name: pa.repeat(pattern.column(name)[0], keys.size) for name in pattern.schema.names}
    filled["id"] = pa.array(keys)
    filled["_seq"] = pa.array(np.arange(keys.size), pa.uint32())
    return pa.RecordBatch.from_pydict(filled, schema=pattern.schema)


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
    return {"id": id, "status": status, "total": None if total is None else Decimal(total)}


def deliver_any_batches(
    feed: Feed,
    chance: random.Random,
    *,
    epochs: int = 24,
    unavailable: float = 0.4,
    truncates: bool = True,
    after_again: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Orders as history, and then as changes of *epochs*; some batches come again, with other rows that do not count.

    :param unavailable: how many of the changes of a row that is there do not tell its status.
    :return: the rows that a mirror has after that, by key.
    """
    expected = {key: order(key) for key in chance.sample(range(60), 30)}
    feed.history(1, list(expected.values()))
    for epoch in range(1, epochs + 1):
        changes: list[tuple[Any, ...]] = []
        for _ in range(chance.randrange(1, 12)):
            key = chance.randrange(60)
            if chance.random() < 0.3:
                changes.append((DELETE, order(key)))
                expected.pop(key, None)
            elif key in expected and chance.random() < unavailable:
                changes.append((UPDATE, order(key, None, f"{epoch}.00"), "status"))
                expected[key] = order(key, expected[key]["status"], f"{epoch}.00")
            else:
                changes.append((INSERT, order(key, f"s{epoch}")))
                expected[key] = order(key, f"s{epoch}")
        if truncates and chance.random() < 0.1:
            expected = {key: order(key, "left") for key in (1, 2)}
            changes = [*changes, *((INSERT, row) for row in expected.values())]
            feed.changes(epoch, *changes, truncated=(epoch, len(changes) - 2))
        else:
            feed.changes(epoch, *changes)
        if chance.random() < 0.3:
            feed.changes(epoch, (DELETE, order(1)), (INSERT, order(99)))
            after_again()
    return [expected[key] for key in sorted(expected)]

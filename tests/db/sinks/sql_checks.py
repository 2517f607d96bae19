"""Values of every type, and errors, as all databases of sinks have them; each test brings the edges of its own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from tests.servers.proxy import CommitLosingProxy
from tests.store.sinks.file_sinks import DELETE, INSERT, ORDERS, Feed, order, own_rows

from headwater.sinks import sql_sink
from headwater.sinks.errors import SinkInputError, SinkUnreachable, SinkUnwritable
from headwater.sinks.sql_sink import SqlSink
from headwater.sinks.types import conform, sink_schema
from headwater.sources.table import SourceColumn, SourceTable

from .sql_scenarios import rows_of


def typed_table(**columns: Any) -> SourceTable:
    """A table with *columns*: each a type, or with it what the source calls it, and what else its column has."""
    made = [SourceColumn("id", pa.int64(), "bigint", 1)]
    for place, (name, told) in enumerate(columns.items(), 2):
        kind, named, *more = told if isinstance(told, tuple) else (told, str(told))
        made.append(SourceColumn(name, kind, named, place, **(more[0] if more else {})))
    return SourceTable("public", "typed", tuple(made), ("id",))


VALUES: dict[str, Any] = {
    "flag": True,
    "small": -(1 << 15),
    "tiny": 255,
    "huge": (1 << 64) - 1,
    "real": 0.10000000149011612,
    "amount": Decimal("-1234567890123456789012345678.0123456789"),
    "wide": Decimal("1234567890123456789012345678901234567890.00000000000000000001"),
    "number": "9" * 300 + ".000" + "1" * 300,
    "bytes": bytes(range(256)),
    "day": date(1, 1, 1),
    "clock": time(23, 59, 59, 999999),
    "nanos": 1_700_000_000_123_456_789,
    "moment": datetime(9999, 12, 31, 23, 59, 59, 999999, UTC),
    "local": datetime(1, 1, 1, 0, 0, 0, 1),  # noqa: DTZ001
    "free": "-infinity",
    "guid": "6ec0bd7f-11c0-43da-975e-2a8ad9ebae0b",
    "numbers": [1, None, -3],
    "blobs": [b"\x00\xff", b"", None],
    "prices": [Decimal("1.5000"), Decimal("-0.0001")],
    "times": [datetime(2024, 2, 29, 12, 0, 0, 5, UTC)],
    "nested": [[1, 2], [], None, [None]],
    "record": {"a": 1 << 60, "b": Decimal("1.10"), "c": b"\x01"},
    "map": [("k", 0.1), ("n", None)],
}
"""A value of each type that every database can hold; the edges that they have in common."""


def check_types(sink: SqlSink, table: SourceTable, full: dict[str, Any], **some: Any) -> None:
    """Values come back as they were: a row of *full*, one of nulls, and one with *some* values.

    Staged inside and staged in a relation, in each way to the table.
    """
    nothing: dict[str, Any] = dict.fromkeys(full)
    rows = [{"id": 1, **full}, {"id": 2, **nothing}, {"id": 3, **nothing, **some}]
    expected = conform(pa.Table.from_batches([own_rows(table, rows)]), sink_schema(table)).to_pylist()
    feed = Feed(sink, table)
    feed.changes(1, *((INSERT, row) for row in rows))
    assert _text(rows_of(sink, table)) == _text(expected)
    feed.changes(2, *((DELETE, row) for row in rows))
    assert rows_of(sink, table) == []
    limit = sql_sink.INLINE_BYTES
    sql_sink.INLINE_BYTES = 0  # type: ignore[misc]
    try:
        feed.changes(3, *((INSERT, row) for row in rows))
        assert _text(rows_of(sink, table)) == _text(expected)
        feed.history(1, [], epoch=3, replaces=True)
        feed.history(2, rows, epoch=3)
    finally:
        sql_sink.INLINE_BYTES = limit  # type: ignore[misc]
    assert _text(rows_of(sink, table)) == _text(expected)


def check_errors(nowhere: SqlSink, denied: SqlSink, of_other_kind: SqlSink) -> None:
    """A server that is not there, one that refuses the password ``hush-hush``, a connection string of others."""
    with pytest.raises(SinkUnreachable) as unreachable:
        nowhere.check()
    with pytest.raises(SinkUnwritable) as refused:
        denied.check()
    for text in (str(unreachable.value), str(refused.value), repr(denied), denied.name):
        assert "hush" not in text
    with pytest.raises(SinkInputError):
        of_other_kind.check()


def _text(rows: list[dict[str, Any]]) -> list[str]:
    """Equal for NaN, too."""
    return [repr(row) for row in rows]


def check_lost_commits(sink: SqlSink, proxy: CommitLosingProxy, relations: Callable[[], list[str]]) -> None:
    """The answer to ``COMMIT`` is lost: the tokens say whether the batch is there, and it is not written twice.

    :param sink: of changes, through *proxy*, so that a batch that is written twice is seen.
    """
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    for epoch in (2, 3):
        token = feed.token(epoch)
        staged = feed.stage_changes(token, [(INSERT, order(epoch))])
        proxy.losing = True
        with pytest.raises(SinkUnreachable):
            sink.commit(ORDERS, token, [staged])
        assert proxy.lost == epoch - 1
        assert sink.committed(ORDERS, "q", "b1").epoch == epoch
        assert not sink.commit(ORDERS, token, [staged])
        assert relations() == []
    assert feed.changes(4, (INSERT, order(4)))
    assert [row["id"] for row in rows_of(sink)] == [1, 2, 3, 4]

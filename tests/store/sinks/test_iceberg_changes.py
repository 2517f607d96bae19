"""An Iceberg table of changes has every change once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.sinks import iceberg_snapshot
from headwater.sinks.errors import OtherAttempt
from headwater.sinks.iceberg import IcebergSink
from headwater.sinks.sink import Committed, Mode, Token

from .file_sinks import DELETE, INSERT, OLD, ORDERS, UPDATE, Feed, log_rows, order
from .iceberg_tables import files, open_table, scan


@pytest.fixture
def sink(tmp_path: Path) -> IcebergSink:
    return IcebergSink(str(tmp_path), mode=Mode.CHANGES)


def changes_in(sink: IcebergSink) -> list[tuple[Any, ...]]:
    rows = scan(sink).to_pylist()
    return sorted((row["_commit_version"], row["id"], row["_change_type"], row["status"]) for row in rows)


def test_every_change_is_there_once(sink: IcebergSink) -> None:
    feed = Feed(sink)
    feed.history(1, [order(1)])
    feed.changes(1, (OLD, order(1)), (UPDATE, order(1, "paid")))
    assert feed.changes(2, (DELETE, order(1, "paid")))
    assert not feed.changes(2, (DELETE, order(1, "paid")))
    assert changes_in(sink) == [
        (7, 1, "insert", "new"),
        (100, 1, "update_preimage", "new"),
        (101, 1, "update_postimage", "paid"),
        (200, 1, "delete", "paid"),
    ]
    assert sink.committed(ORDERS, "q", "b1") == Committed(2, 1)


def test_a_batch_that_begins_earlier_than_what_is_there_adds_the_rest_only(sink: IcebergSink) -> None:
    feed = Feed(sink)
    feed.changes(5, (INSERT, order(1)))
    token = Token("q", "b1", 0, 8, 0)
    batches = [log_rows(ORDERS, [(INSERT, order(1))], 5), log_rows(ORDERS, [(UPDATE, order(1, "later"))], 8)]
    late = sink.stage_changes(ORDERS, Token("q", "b1", 5, 8, 0), iter(batches), None)
    assert sink.commit(ORDERS, token, [sink.stage_changes(ORDERS, token, iter(batches), None)])
    assert [row[:2] for row in changes_in(sink)] == [(500, 1), (800, 1)]
    assert not sink.commit(ORDERS, token, [late])
    feed.changes(9, (DELETE, order(1)))
    stale = Token("q", "b1", 5, 10, 0)
    staged = Feed(IcebergSink(sink.warehouse + "/other", mode=Mode.CHANGES)).sink.stage_changes(
        ORDERS, stale, iter(batches), None
    )
    with pytest.raises(OtherAttempt):
        sink.commit(ORDERS, stale, [staged])


def test_many_rows_are_files_of_the_table_at_once(sink: IcebergSink) -> None:
    feed = Feed(sink)
    token = feed.token(1)
    staged = feed.stage_changes(token, [(INSERT, order(key, "x" * 200)) for key in range(3000)])
    assert staged.detail.files
    assert not staged.detail.parts
    assert sink.commit(ORDERS, token, [staged])
    assert scan(sink).num_rows == 3000


def test_a_commit_of_many_files_reads_none_and_keeps_few_manifests(
    sink: IcebergSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iceberg_snapshot, "SMALL_MANIFESTS", 3)
    monkeypatch.setattr(iceberg_snapshot, "MANIFEST_ENTRIES", 20)
    feed = Feed(sink)
    for epoch in range(1, 61):
        feed.changes(epoch, (INSERT, order(epoch)))
    assert len(files(sink)) == 60
    with open_table(sink) as table:
        assert len(table.current_snapshot().manifests(table.io)) <= 16
        assert table.current_snapshot().summary["total-records"] == "60"
    assert [row[0] for row in changes_in(sink)] == [epoch * 100 for epoch in range(1, 61)]

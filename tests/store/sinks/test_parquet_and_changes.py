"""Sinks in changes mode have every change once: Parquet files, and a Delta table of changes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from headwater.sinks.errors import OtherAttempt, SinkInputError, SinkUnwritable
from headwater.sinks.manifests import Manifests
from headwater.sinks.open import SinkOptionError, open_sink
from headwater.sinks.parquet import committed_files, read
from headwater.sinks.sink import Committed, Mode, Sink, Token

from .file_sinks import DELETE, INSERT, OLD, ORDERS, UPDATE, Feed, log_rows, order, table_of

Read = Callable[[], pa.Table]


@pytest.fixture(params=["parquet", "delta"])
def sink(request: pytest.FixtureRequest, tmp_path: Path) -> Sink:
    return open_sink(request.param, path=str(tmp_path / "out"), mode="changes")


@pytest.fixture
def rows(sink: Sink, tmp_path: Path) -> Callable[[], list[tuple[Any, ...]]]:
    def found() -> list[tuple[Any, ...]]:
        path = tmp_path / "out" / "public.orders"
        table = read(path) if sink.name.startswith("parquet") else DeltaTable(path).to_pyarrow_table()
        told = [(row["_commit_version"], row["_change_type"], row["id"], row["status"]) for row in table.to_pylist()]
        return sorted(told)

    return found


def test_every_change_is_there_once_and_history_as_inserts(sink: Sink, rows: Any) -> None:
    feed = Feed(sink)
    token = feed.token(1, 1)
    changes = [(INSERT, order(3)), (OLD, order(3)), (UPDATE, order(3, "paid")), (DELETE, order(3))]
    staged = [feed.stage_history(token, [order(1), order(2)]), feed.stage_changes(token, changes)]
    assert sink.commit(ORDERS, token, staged)
    assert not sink.commit(ORDERS, token, staged)
    assert rows() == [
        (7, "insert", 1, "new"),
        (7, "insert", 2, "new"),
        (100, "insert", 3, "new"),
        (101, "update_preimage", 3, "new"),
        (102, "update_postimage", 3, "paid"),
        (103, "delete", 3, "new"),
    ]
    assert sink.committed(ORDERS, "q", "b1") == Committed(1, 1, 0)
    assert sink.committed(ORDERS, "other", "b1") == Committed()


def test_a_batch_that_begins_earlier_than_what_is_there_adds_the_rest_only(sink: Sink, rows: Any) -> None:
    feed = Feed(sink)
    feed.changes(5, (INSERT, order(1)))
    token = Token("q", "b1", 0, 8, 0)
    batches = [log_rows(ORDERS, [(INSERT, order(1))], 5), log_rows(ORDERS, [(INSERT, order(2))], 8)]
    staged = sink.stage_changes(ORDERS, token, iter(batches), None)
    assert staged.rows == 1
    assert sink.commit(ORDERS, token, [staged])
    assert rows() == [(500, "insert", 1, "new"), (800, "insert", 2, "new")]


def test_a_batch_staged_before_another_process_committed_a_part_of_it_is_refused(sink: Sink, rows: Any) -> None:
    feed = Feed(sink)
    feed.changes(3, (INSERT, order(1)))
    token = Token("q", "b1", 3, 8, 0)
    staged = sink.stage_changes(ORDERS, token, iter([log_rows(ORDERS, [(INSERT, order(2))], 5)]), None)
    feed.changes(5, (INSERT, order(2)))
    with pytest.raises(OtherAttempt):
        sink.commit(ORDERS, token, [staged])
    assert rows() == [(300, "insert", 1, "new"), (500, "insert", 2, "new")]


def test_many_rows_go_into_files_and_columns_come(sink: Sink, rows: Any, tmp_path: Path) -> None:
    feed = Feed(sink)
    feed.changes(1, *((INSERT, order(key, "x" * 200)) for key in range(3000)))
    feed.table = table_of({"id": pa.int64(), "status": pa.string(), "total": pa.decimal128(10, 2), "n": pa.int32()})
    feed.changes(2, (INSERT, {**order(9999), "n": 1}))
    found = rows()
    assert len(found) == 3001
    assert (200, "insert", 9999, "new") in found
    assert not list((tmp_path / "out").rglob("*.arrow"))


def test_a_sink_can_be_pickled_and_what_it_stages_too(sink: Sink, rows: Any) -> None:
    again = pickle.loads(pickle.dumps(sink))
    feed = Feed(again)
    token = feed.token(1)
    staged = pickle.loads(pickle.dumps(feed.stage_changes(token, [(INSERT, order(1))])))
    assert again.commit(ORDERS, token, [staged])
    assert rows() == [(100, "insert", 1, "new")]


def test_readers_of_the_directory_see_committed_files_only(tmp_path: Path) -> None:
    sink = open_sink("parquet", path=str(tmp_path))
    feed = Feed(sink)
    feed.changes(1, (INSERT, order(1)))
    feed.stage_changes(feed.token(2), [(INSERT, order(key, "x" * 200)) for key in range(3000)])
    seen = ds.dataset(tmp_path / "public.orders", format="parquet", ignore_prefixes=["_", "."])
    assert seen.to_table().num_rows == 1
    assert [path.parent for path in committed_files(tmp_path / "public.orders")] == [tmp_path / "public.orders"]
    feed.changes(2, (INSERT, order(2)))
    assert not [path for path in (tmp_path / "public.orders" / "_staging").rglob("*") if path.is_file()]


def test_of_two_commits_of_one_batch_one_is_refused(tmp_path: Path) -> None:
    sink = open_sink("parquet", path=str(tmp_path))
    Feed(sink).changes(1, (INSERT, order(1)))
    manifests = Manifests(tmp_path / "public.orders")
    newest = manifests.newest()
    assert newest.number == 1
    assert not manifests.put(newest)
    assert manifests.all() == [newest]


def test_an_unknown_sink_mode_or_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SinkInputError, match=r"valid values are .*delta, .*parquet"):
        open_sink("csv", path=str(tmp_path))
    with pytest.raises(SinkInputError, match="valid values are mirror, changes"):
        open_sink("delta", path=str(tmp_path), mode="both")
    with pytest.raises(SinkInputError, match="valid values are changes"):
        open_sink("parquet", path=str(tmp_path), mode=Mode.MIRROR)
    with pytest.raises(SinkInputError, match="file system"):
        open_sink("parquet", path="s3://bucket/out")
    with pytest.raises(SinkOptionError, match="no option 'paht'") as caught:
        open_sink("delta", paht=str(tmp_path))
    assert "Did you mean path?" in str(caught.value)
    with pytest.raises(SinkOptionError, match="needs path"):
        open_sink("delta")
    with pytest.raises(SinkOptionError, match=r"retention_hours .* is wrong"):
        open_sink("delta", path=str(tmp_path), retention_hours="long")
    with pytest.raises(SinkInputError, match="cannot be imported"):
        open_sink("no_such_module:Sink")
    with pytest.raises(SinkInputError, match="is no sink"):
        open_sink("pathlib:Path")


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(SinkUnwritable, match="Nothing can be written"):
        open_sink("delta", path=str(tmp_path / "out")).check()

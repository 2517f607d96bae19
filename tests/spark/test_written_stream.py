"""The writer of streams, driven as Spark does it: batches that come again, runs that are late, rows of every kind."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from tests.logs import LogConsumer
from tests.spark.driven import DrivenStream
from tests.spark.driven_writer import CHANGES, LOG, DrivenWriter, epochs, logged, staged

from headwater.backfill.errors import InvalidQuery
from headwater.backfill.planner import QueryPlanner
from headwater.backfill.query import QueryOptions
from headwater.capture import Capture, CapturedTable, SourceRecord, SourceState, TableState
from headwater.capture.stream_records import CheckpointBehind, StagedRowsLost, StoreTaken, StreamColumns, StreamFenced
from headwater.control.command import ResnapshotTable
from headwater.errors import HeadwaterError
from headwater.log_store import KvLogStoreFactory, LogView
from headwater.sources.open import open_source
from headwater.sources.postgres.offset import PostgresOffset
from headwater.spark import stream_writer
from headwater.spark.errors import InvalidOption, NoCapture, UnsupportedSchema
from headwater.spark.source import HeadwaterDataSource
from headwater.spark.write_options import WriteOptions
from headwater.state import WriteBatch, open_reader, open_writer
from headwater.stream import Epoch
from headwater.stream.errors import ChunkError

UPSERT, INSERT, DELETE = "update_postimage", "insert", "delete"


def test_a_batch_is_one_epoch_of_upserts(tmp_path: Path) -> None:
    writer = DrivenWriter(tmp_path, key="id")
    writer.batch(0, [(1, "a"), (2, "b")], [(3, "c")])
    writer.batch(1, [(1, "d")], [])
    assert logged(tmp_path) == [(UPSERT, 1, "a"), (UPSERT, 2, "b"), (UPSERT, 3, "c"), (UPSERT, 1, "d")]
    assert epochs(tmp_path) == [3, 1]


def test_rows_without_a_key_are_inserts_that_are_counted(tmp_path: Path) -> None:
    DrivenWriter(tmp_path).batch(0, [(1, "a"), (1, "a")], [(None, None)])
    DrivenWriter(tmp_path, run="run 2").batch(1, [(1, "a")])
    assert logged(tmp_path, "id", "_row_id") == [(INSERT, 1, 1), (INSERT, 1, 2), (INSERT, None, 3), (INSERT, 1, 4)]


def test_rows_that_tell_what_they_are_are_kept_as_such(tmp_path: Path) -> None:
    then = datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
    schema = f"{CHANGES}, _commit_version BIGINT, _commit_timestamp TIMESTAMP, _unavailable STRING"
    writer = DrivenWriter(tmp_path, schema, key="id")
    writer.batch(
        0,
        [
            (1, "a", "insert", 7, then, None),
            (1, "a", "update_preimage", 8, then, None),
            (1, None, "update_postimage", 8, then, "v"),
            (2, None, "delete", 9, None, None),
        ],
    )
    rows = logged(tmp_path, "id", "v", "_commit_timestamp", "_unavailable")
    assert [row[:3] for row in rows] == [
        ("insert", 1, "a"),
        ("update_preimage", 1, "a"),
        ("update_postimage", 1, None),
        ("delete", 2, None),
    ]
    assert [row[3] for row in rows[:3]] == [then] * 3
    assert rows[3][3] > then
    assert [row[4] for row in rows] == [None, None, "v", None]


def test_both_halves_of_an_update_stay_together_over_batches_of_arrow(tmp_path: Path) -> None:
    writer = DrivenWriter(tmp_path, CHANGES, key="id")
    old, new = writer.rows((1, "a", "update_preimage")), writer.rows((1, "b", "update_postimage"))
    writer.batch(0, [writer.rows((0, "z", "insert")), old, new], [writer.rows((3, "c", "insert"))])
    assert [row[0] for row in logged(tmp_path)] == ["insert", "update_preimage", "update_postimage", "insert"]


def test_an_update_whose_new_row_was_left_out_is_a_delete(tmp_path: Path) -> None:
    writer = DrivenWriter(tmp_path, CHANGES, key="id")
    writer.batch(0, [(1, "a", "update_preimage"), (2, "b", "insert"), (3, "c", "update_preimage")])
    assert [row[:2] for row in logged(tmp_path)] == [(DELETE, 1), (INSERT, 2), (DELETE, 3)]


def test_an_update_that_moves_the_key_is_a_delete_and_an_insert(tmp_path: Path) -> None:
    DrivenWriter(tmp_path, CHANGES, key="id").batch(0, [(1, "a", "update_preimage"), (2, "a", "update_postimage")])
    assert [row[:2] for row in logged(tmp_path)] == [(DELETE, 1), (INSERT, 2)]


# -- what Spark does again -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["run 1", "run 2"])
def test_a_batch_that_comes_again_is_not_written_again(run: str, tmp_path: Path) -> None:
    DrivenWriter(tmp_path, key="id").batch(0, [(1, "a")])
    again = DrivenWriter(tmp_path, key="id", run=run)
    again.batch(0, [(1, "a")])
    again.batch(1, [(2, "b")])
    assert logged(tmp_path) == [(UPSERT, 1, "a"), (UPSERT, 2, "b")]


def test_an_abort_after_a_commit_that_took_effect_changes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(stream_writer, "INLINE_BYTES", 0)
    writer = DrivenWriter(tmp_path, key="id")
    messages = writer.stage(0, [(1, "a")])
    writer.commit(0, messages)
    writer.abort(0, [*messages, None])
    writer.batch(0, [(1, "a")])
    assert logged(tmp_path) == [(UPSERT, 1, "a")]
    assert staged(tmp_path) == []


def test_an_aborted_batch_leaves_nothing_and_can_come_again(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(stream_writer, "INLINE_BYTES", 0)
    writer = DrivenWriter(tmp_path, key="id")
    messages = writer.stage(0, [(1, "a")], [(2, "b")])
    assert len(staged(tmp_path)) == 2
    writer.abort(0, messages)
    assert staged(tmp_path) == []
    with pytest.raises(StagedRowsLost):
        writer.commit(0, messages)
    writer.batch(0, [(1, "a")], [(2, "b")])
    assert logged(tmp_path) == [(UPSERT, 1, "a"), (UPSERT, 2, "b")]


def test_what_other_attempts_and_dead_runs_have_staged_is_removed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(stream_writer, "INLINE_BYTES", 0)
    dead = DrivenWriter(tmp_path, key="id", run="dead")
    dead.stage(0, [(1, "a")])
    dead.stage(1, [(1, "a")])
    DrivenWriter(tmp_path, key="id", query="other").stage(7, [(1, "a")])
    writer = DrivenWriter(tmp_path, key="id")
    writer.stage(0, [(1, "a")])
    writer.batch(0, [(1, "a")])
    assert [name.partition("-")[0] for name in staged(tmp_path)] == ["1"]
    writer.batch(1, [(2, "b")])
    assert staged(tmp_path) == []
    assert epochs(tmp_path) == [1, 1]


def test_a_run_that_was_started_again_is_fenced(tmp_path: Path) -> None:
    late = DrivenWriter(tmp_path, key="id")
    late.batch(0, [(1, "a")])
    messages = late.stage(1, [(2, "b")])
    DrivenWriter(tmp_path, key="id", run="run 2").batch(1, [(2, "b")])
    for number in (1, 2):
        with pytest.raises(StreamFenced, match="started again"):
            late.commit(number, messages)
    assert logged(tmp_path) == [(UPSERT, 1, "a"), (UPSERT, 2, "b")]


def test_a_batch_that_is_there_fences_the_run_before_it_too(tmp_path: Path) -> None:
    late = DrivenWriter(tmp_path, key="id")
    late.batch(0, [(1, "a")])
    DrivenWriter(tmp_path, key="id", run="run 2").batch(0, [(1, "a")])
    with pytest.raises(StreamFenced):
        late.batch(1, [(2, "b")])


def test_a_checkpoint_that_went_back_is_refused(tmp_path: Path) -> None:
    writer = DrivenWriter(tmp_path, key="id")
    for number in range(3):
        writer.batch(number, [(number, "a")])
    with pytest.raises(CheckpointBehind, match="batch 1, the store has its batch 2"):
        DrivenWriter(tmp_path, key="id", run="run 2").batch(1, [(1, "a")])
    assert epochs(tmp_path) == [1, 1, 1]


def test_another_stream_needs_a_word_and_its_batches_are_its_own(tmp_path: Path) -> None:
    first = DrivenWriter(tmp_path, key="id")
    first.batch(0, [(1, "a")])
    with pytest.raises(StoreTaken, match="takeover=true"):
        DrivenWriter(tmp_path, key="id", query="new", run="run 2").batch(0, [(1, "b")])
    DrivenWriter(tmp_path, key="id", query="new", run="run 2", takeover="true").batch(0, [(1, "b")])
    DrivenWriter(tmp_path, key="id", query="new", run="run 3").batch(1, [(1, "c")])
    assert [row[2] for row in logged(tmp_path)] == ["a", "b", "c"]
    with pytest.raises(StreamFenced, match="stream new has taken the store over"):
        first.batch(1, [(1, "d")])


def test_a_store_has_one_table(tmp_path: Path) -> None:
    DrivenWriter(tmp_path, key="id").batch(0, [(1, "a")])
    with pytest.raises(StoreTaken, match=LOG):
        DrivenWriter(tmp_path, key="id", table="shop.items").batch(1, [(1, "a")])


def test_a_capture_and_a_stream_refuse_the_store_of_the_other(tmp_path: Path) -> None:
    DrivenWriter(tmp_path, key="id").batch(0, [(1, "a")])
    database = open_source("postgresql://nobody@127.0.0.1:1/none", spill=tmp_path)
    with pytest.raises(StoreTaken, match="A stream writes this store"):
        Capture(database, tmp_path / "store", ["orders"]).run()
    with open_writer(str(tmp_path / "captured" / "store")) as store:
        factory = KvLogStoreFactory(store)
        with store.snapshot() as view:
            state = SourceState(factory.catalog, view, factory.sealer.batch)
        since = PostgresOffset.at(1)
        table = CapturedTable("public.t", "public", "t", 1, TableState.ACTIVE, since, "")
        state.put_table(factory.sealer.batch, table)
        state.put(factory.sealer.batch, SourceRecord({}, since))
        factory.sealer.seal(Epoch.from_ms(1))
        factory.close()
    with pytest.raises(StoreTaken, match="that of a capture"):
        DrivenWriter(tmp_path / "captured", key="id").batch(0, [(1, "a")])


def test_a_store_in_an_object_store_is_written_too(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(stream_writer, "INLINE_BYTES", 0)
    store = f"slatedb+file://{tmp_path}/objects"
    writer = DrivenWriter(tmp_path, key="id", store=store)
    messages = writer.stage(0, [(1, "a")])
    assert len(list((tmp_path / "objects" / "staging").rglob("*.arrow"))) == 1
    writer.commit(0, messages)
    writer.batch(0, [(1, "a")])
    writer.batch(1, [(2, "b")])
    assert not list((tmp_path / "objects" / "staging").rglob("*.arrow"))
    with open_reader(store) as reader, reader.snapshot() as view:
        assert [end.rows for end in LogView.open(view, LOG).epochs()] == [1, 1]


def test_a_driver_that_holds_the_store_is_fenced_by_the_next(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("headwater.capture.stream_log._OWNED_SECONDS", 0.2)
    DrivenWriter(tmp_path, key="id").batch(0, [(1, "a")])
    with open_writer(str(tmp_path / "store")) as held:
        DrivenWriter(tmp_path, key="id", run="run 2").batch(1, [(2, "b")])
        with pytest.raises(HeadwaterError, match="taken over"):
            KvLogStoreFactory(held).sealer.seal(Epoch.from_unix_ms(4_000_000_000_000))
    assert epochs(tmp_path) == [1, 1]


def test_a_batch_without_rows_makes_the_log_and_later_ones_nothing(tmp_path: Path) -> None:
    writer = DrivenWriter(tmp_path, key="id")
    writer.batch(0, [], [])
    assert logged(tmp_path) == []
    sealed = newest(tmp_path)
    writer.batch(1, [], [])
    assert newest(tmp_path) == sealed
    writer.batch(2, [(1, "a")])
    assert epochs(tmp_path) == [1]


def newest(folder: Path) -> int:
    with open_reader(str(folder / "store")) as reader:
        return int(reader.committed_epoch())


# -- columns ---------------------------------------------------------------------------------------------------------


def test_columns_come_go_and_become_wider(tmp_path: Path) -> None:
    DrivenWriter(tmp_path, "id INT, v STRING, n INT", key="id").batch(0, [(1, "a", 1)])
    DrivenWriter(tmp_path, "n BIGINT, id INT, w DOUBLE", key="id", run="run 2").batch(1, [(1 << 40, 2, 0.5)])
    with open_reader(str(tmp_path / "store")) as reader, reader.snapshot() as view:
        assert [end.schema_version for end in LogView.open(view, LOG).epochs()] == [1, 2]
    source = HeadwaterDataSource({"store": str(tmp_path / "store"), "table": LOG})
    assert source.schema()["n"].dataType.simpleString() == "bigint"
    assert source.schema().names[:4] == ["id", "v", "n", "w"]


@pytest.mark.parametrize(
    ("schema", "key", "words"),
    [("id INT, v INT", "id", "changed from string to int"), ("id INT, v STRING", "v", "its key changed")],
)
def test_other_changes_of_the_columns_are_refused(schema: str, key: str, words: str, tmp_path: Path) -> None:
    DrivenWriter(tmp_path, key="id").batch(0, [(1, "a")])
    with pytest.raises(StreamColumns, match=words):
        DrivenWriter(tmp_path, schema, key=key).batch(1, [(1, 1) if "v INT" in schema else (1, "a")])
    assert epochs(tmp_path) == [1]


def test_a_new_log_has_the_vnodes_that_were_asked_for(tmp_path: Path) -> None:
    DrivenWriter(tmp_path, key="id", vnodes="4").batch(0, [(1, "a")])
    DrivenWriter(tmp_path, key="id").batch(1, [(1, "a")])
    with open_reader(str(tmp_path / "store")) as reader, reader.snapshot() as view:
        assert LogView.open(view, LOG).log.vnode_count == 4
    with pytest.raises(StreamColumns, match="4 vnodes"):
        DrivenWriter(tmp_path, key="id", vnodes="8").batch(2, [(1, "a")])


@pytest.mark.parametrize(
    ("schema", "options", "words"),
    [
        ("id INT", {"key": "nr"}, "'nr'"),
        (CHANGES, {}, "no key"),
        ("id INT, _row_id BIGINT", {}, "_row_id"),
        ("id INT, _op INT", {"key": "id"}, "'_op'"),
        ("id INT, _change_type INT", {"key": "id"}, "must be string"),
        ("id INT, i INTERVAL", {"key": "id"}, "'i'"),
        ("id INT", {"table": ""}, "No table"),
        ("id INT", {"store": ""}, "No store"),
        ("id INT", {"store": "memory://x"}, "one process"),
        ("id INT", {"keys": "id"}, "Did you mean 'key'"),
        ("id INT", {"vnodes": "0"}, "1 to"),
        ("id INT", {"table": "a.b.c"}, "namespace.name"),
    ],
)
def test_what_cannot_be_written_is_refused(schema: str, options: dict[str, str], words: str, tmp_path: Path) -> None:
    with pytest.raises((InvalidOption, UnsupportedSchema), match=words):
        DrivenWriter(tmp_path, schema, **options)._writer()


def test_rows_that_the_log_cannot_hold_are_refused_without_their_values(tmp_path: Path) -> None:
    with pytest.raises(StreamColumns, match="null in the key column 'id'"):
        DrivenWriter(tmp_path, key="id").batch(0, [(None, "secret")])
    with pytest.raises(ChunkError, match="another change type") as caught:
        DrivenWriter(tmp_path, CHANGES, key="id").batch(0, [(1, "a", "secret")])
    assert "secret" not in str(caught.value)


def test_names_may_be_quoted() -> None:
    read = WriteOptions.parse({"store": "/s", "table": '"my shop"."a.b"', "key": 'id, "x,y"'})
    assert (read.namespace, read.name, read.key) == ("my shop", "a.b", ("id", "x,y"))
    assert WriteOptions.parse({"store": "/s", "table": "t"}).namespace == "public"


# -- what is stored --------------------------------------------------------------------------------------------------


def test_a_large_batch_goes_through_files_and_is_whole(tmp_path: Path) -> None:
    writer = DrivenWriter(tmp_path, key="id")
    ids = pa.array(range(200_000), pa.int32())
    batch = pa.record_batch({"id": ids, "v": pa.array(["x" * 40] * len(ids))})
    messages = writer.stage(0, [batch.slice(0, 100_000), batch.slice(100_000)], [batch.slice(0, 5)])
    assert len(staged(tmp_path)) == 1
    writer.commit(0, messages)
    assert staged(tmp_path) == []
    assert epochs(tmp_path) == [200_005]
    assert sum(row[1] for row in logged(tmp_path, "id")) == 199_999 * 100_000 + 10


def test_a_consumer_that_reads_lets_the_log_forget_and_a_slow_one_blocks_nobody(tmp_path: Path) -> None:
    writer = DrivenWriter(tmp_path, key="id")
    writer.batch(0, [(1, "a")])
    store = str(tmp_path / "store")
    with LogConsumer.open(store, LOG, "quick") as quick, LogConsumer.open(store, LOG, "slow") as slow:
        for number in range(1, 4):
            writer.batch(number, [(number, "b")])
        quick.commit(Epoch(newest(tmp_path)))
        writer.batch(4, [(4, "b")])
        assert len(epochs(tmp_path)) == 5
        for consumer in (quick, slow):
            consumer.commit(Epoch(newest(tmp_path)))
        for number in (5, 6):
            writer.batch(number, [(number, "b")])
    assert epochs(tmp_path) == [1, 1]


def test_a_store_of_version_1_goes_on(tmp_path: Path) -> None:
    kept = json.loads((Path(__file__).parents[1] / "fixtures" / "streams" / "written_v1.json").read_text())
    batch = WriteBatch()
    for key, value in kept["items"]:
        batch.put(bytes.fromhex(key), bytes.fromhex(value))
    with open_writer(str(tmp_path / "store")) as store:
        store.seal(Epoch(kept["epoch"]), batch)
    again = DrivenWriter(tmp_path, run="run 2")
    again.batch(1, [(3, "c")])
    again.batch(2, [(4, "d")])
    wanted = [(INSERT, 1, "a", 1), (INSERT, 2, "b", 2), (INSERT, 3, "c", 3), (INSERT, 4, "d", 4)]
    assert logged(tmp_path, "id", "v", "_row_id") == wanted
    with pytest.raises(StreamFenced):
        DrivenWriter(tmp_path, run="run 1").batch(3, [(5, "e")])


# -- reading it ------------------------------------------------------------------------------------------------------


def source_of(folder: Path, **options: str) -> HeadwaterDataSource:
    return HeadwaterDataSource(CaseInsensitiveDict({"store": str(folder / "store"), "table": LOG, **options}))


def test_a_written_log_is_read_without_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWATER_SOURCE", "postgresql://nobody@127.0.0.1:1/none")
    writer = DrivenWriter(tmp_path, key="id")
    for number in range(3):
        writer.batch(number, [(number, "a"), (number + 10, "b")])
    stream = DrivenStream(source_of(tmp_path, maxEpochs="1"))
    found = [sorted(row["id"] for row in stream.batch() or ()) for _ in range(2)]
    assert found == [[0, 10], [1, 11]]
    offset, end = stream.offset, stream.next_end()
    assert sorted(row["id"] for row in stream.rows(end)) == [2, 12]
    stream.kill()
    again = DrivenStream(source_of(tmp_path, maxEpochs="1"), offset)
    assert sorted(row["id"] for row in again.rows(end)) == [2, 12]
    again.offset = end
    assert again.available_now() == []
    writer.batch(3, [(3, "c")])
    (row,) = again.available_now()
    assert (row["id"], row["_change_type"]) == (3, UPSERT)
    assert row["_commit_version"] == newest(tmp_path)
    again.stop()


def test_what_a_written_log_has_not_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWATER_SOURCE", raising=False)
    with pytest.raises(NoCapture, match="no stream has written"):
        source_of(tmp_path).schema()
    DrivenWriter(tmp_path, key="id").batch(0, [(1, "a")])
    with pytest.raises(NoCapture, match=r"It has shop\.orders"):
        source_of(tmp_path, table="shop.items").schema()
    with pytest.raises(InvalidQuery, match="history=false"):
        QueryOptions(str(tmp_path / "store"), "", "q", (LOG,))
    planner = QueryPlanner(QueryOptions(str(tmp_path / "store"), "", "q", (LOG,), history=False))
    try:
        with pytest.raises(InvalidQuery, match="no database"):
            planner._logs.apply("1", ResnapshotTable(LOG))
    finally:
        planner.close()

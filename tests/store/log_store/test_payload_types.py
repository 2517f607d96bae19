"""Columns of every type that Arrow has: a log gives them back as they were, or refuses them when it is made."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.logs import epoch

from headwater.log_store import Compression, ForeignSchema, KvLogStoreFactory, LogView
from headwater.log_store.compaction import Compaction
from headwater.log_store.migration import Migration
from headwater.state import StateStore, open_writer
from headwater.stream import Chunk, Epoch, EpochPair

FLAT: dict[str, Any] = {
    "bool": pa.array([True, False, None] * 2),
    "date": pa.array([dt.date(2020, 1, 1), None] * 3),
    "decimal128": pa.array([Decimal("1.5"), None, Decimal(10) ** 30] * 2, pa.decimal128(38, 2)),
    "decimal256": pa.array([Decimal("1.5"), None, Decimal(10) ** 60] * 2, pa.decimal256(70, 2)),
    "duration": pa.array([dt.timedelta(1), None] * 3),
    "fixed binary": pa.array([b"ab", None] * 3, pa.binary(2)),
    "float16": pa.array(np.arange(6).astype(np.float16)),
    "interval": pa.array([pa.MonthDayNano([1, 2, 3]), None] * 3),
    "large binary": pa.array([b"x" * 1000, None, b""] * 2, pa.large_binary()),
    "large string": pa.array(["x" * 1000, None, ""] * 2, pa.large_string()),
    "time": pa.array([dt.time(1, 2, 3), None] * 3),
    "timestamp": pa.array([1, None, 3] * 2, pa.timestamp("ns", "Europe/Berlin")),
}
NESTED: dict[str, Any] = {
    "extension": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"u" * 16, None] * 3, pa.binary(16))),
    "fixed list": pa.array([[1, 2], None, [3, None]] * 2, pa.list_(pa.int64(), 2)),
    "large list": pa.array([[1, 2], None, []] * 2, pa.large_list(pa.int64())),
    "list": pa.array([["a", None], None, []] * 2, pa.list_(pa.string())),
    "list view": pa.array([[1, 2], None, []] * 2, pa.list_view(pa.int64())),
    "map": pa.array([[("k", 1)], None, []] * 2, pa.map_(pa.string(), pa.int64())),
    "null": pa.nulls(6),
    "struct": pa.array([{"a": 1, "b": ["x"]}, None, {"a": None, "b": None}] * 2),
}
UNHELD: dict[str, Any] = {
    "dictionary": pa.array(["a", "b", None] * 2).dictionary_encode(),
    "list of dictionary": pa.array([["a"], ["b"], None] * 2, pa.list_(pa.dictionary(pa.int8(), pa.string()))),
    "run end": pa.RunEndEncodedArray.from_arrays(pa.array([2, 6], pa.int32()), pa.array(["a", "b"])),
    "string view": pa.array(["x" * 100, None, ""] * 2, pa.string_view()),
}
IDS = [5, 3, 1, 4, 2, 1]


@pytest.fixture
def store() -> Iterator[StateStore]:
    with open_writer(f"memory://{uuid.uuid4()}") as made:
        yield made


def batch_of(column: Any) -> pa.RecordBatch:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("value", column.type)])
    return pa.RecordBatch.from_arrays([pa.array(IDS), column], schema=schema)


def held(store: StateStore) -> list[dict[str, Any]]:
    with store.snapshot() as view:
        shown = LogView.open(view, "t")
        return by_id(pa.Table.from_batches(shown.read_range(0, shown.sealed)).select(["id", "value"]).to_pylist())


def by_id(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row["id"])


def goes_through(store: StateStore, column: Any, log_format: int, compression: Compression, max_rows: int) -> None:
    batch = batch_of(column)
    factory = KvLogStoreFactory(store, compression=compression, max_rows=max_rows)
    log = factory.log("t", batch.schema, ("id",), log_format)
    writer = factory.writer(log)
    writer.init(EpochPair(epoch(1), Epoch(0)))
    writer.write_chunk(Chunk.inserts(batch, ("id",)))
    writer.end_epoch(epoch(2))
    factory.sealer.seal(epoch(1))
    assert held(store) == by_id(batch.to_pylist())
    factory.close()

    again = KvLogStoreFactory(store)
    if log_format == 1:
        migration = Migration(again, "t")
        assert migration.step()
        again.sealer.seal(epoch(2))
        assert held(store) == by_id(batch.to_pylist())
    assert Compaction(again, "t").step()
    again.sealer.seal(epoch(3))
    kept = [row for place, row in enumerate(batch.to_pylist()) if place != IDS.index(1)]
    assert held(store) == by_id(kept)
    again.close()


@pytest.mark.parametrize("max_rows", [0, 100], ids=["spilled", "buffered"])
@pytest.mark.parametrize("compression", list(Compression), ids=lambda how: how.name.lower())
@pytest.mark.parametrize("kind", [*FLAT, *NESTED])
def test_format_2_gives_back_what_was_written(
    store: StateStore, kind: str, compression: Compression, max_rows: int
) -> None:
    goes_through(store, (FLAT | NESTED)[kind], 2, compression, max_rows)


@pytest.mark.parametrize("max_rows", [0, 100], ids=["spilled", "buffered"])
@pytest.mark.parametrize("kind", FLAT)
def test_format_1_gives_back_flat_columns(store: StateStore, kind: str, max_rows: int) -> None:
    goes_through(store, FLAT[kind], 1, Compression.NONE, max_rows)


@pytest.mark.parametrize("kind", [*NESTED, *UNHELD])
def test_format_1_refuses_the_others_when_the_log_is_made(store: StateStore, kind: str) -> None:
    factory = KvLogStoreFactory(store)
    with pytest.raises(ForeignSchema, match="'value'"):
        factory.log("t", batch_of((NESTED | UNHELD)[kind]).schema, ("id",), 1)
    assert factory.registry.names() == []


@pytest.mark.parametrize("kind", ["dictionary", "list of dictionary", "run end", "string view"])
def test_what_format_2_cannot_hold_is_refused_when_the_log_is_made(store: StateStore, kind: str) -> None:
    factory = KvLogStoreFactory(store)
    with pytest.raises(ForeignSchema, match="'value'"):
        factory.log("t", batch_of(UNHELD[kind]).schema, ("id",), 2)

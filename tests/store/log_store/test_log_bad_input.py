"""Bad input for a log: it is refused with a clear error, and the epoch goes on as if it had not come."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.logs import KEY, SCHEMA, LogConsumer, epoch, filtered, numbered_chunk

from headwater.errors import HeadwaterError, InputError
from headwater.log_store import (
    ForeignSchema,
    ForeignVnode,
    InvalidOffset,
    KvLogStoreFactory,
    KvLogStoreWriter,
    LogView,
    WrongCall,
)
from headwater.log_store.compaction import Compaction
from headwater.log_store.migration import Migration
from headwater.state import StateStore, open_writer
from headwater.stream import Chunk, Epoch, EpochPair, VnodeBitmap
from headwater.stream.errors import ChunkError, VnodeCountError

FULL = VnodeBitmap.full(256)
EVEN = VnodeBitmap.of(range(0, 256, 2), 256)


@pytest.fixture
def store() -> Iterator[StateStore]:
    with open_writer(f"memory://{uuid.uuid4()}") as made:
        yield made


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def log_format(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def begin(writer: KvLogStoreWriter, at: int = 1) -> KvLogStoreWriter:
    writer.init(EpochPair(epoch(at), Epoch(0) if at == 1 else epoch(at - 1)))
    return writer


def end(factory: KvLogStoreFactory, *writers: KvLogStoreWriter) -> None:
    ended = writers[0].epoch
    for writer in writers:
        writer.end_epoch(ended.next())
    factory.sealer.seal(ended)


def held(store: StateStore, name: str = "orders", wanted: VnodeBitmap | None = None) -> list[int]:
    with store.snapshot() as view:
        shown = LogView.open(view, name)
        batches = shown.read_range(shown.bounds().gone, shown.sealed, wanted)
        return sorted(key for batch in batches for key in batch.column("id").to_pylist())


# -- chunks ---------------------------------------------------------------------------------------------------------


def _columns(change: Callable[[pa.RecordBatch], pa.RecordBatch]) -> Chunk:
    return Chunk.inserts(change(numbered_chunk(900, 3).rows), KEY)


def _without_nulls(rows: pa.RecordBatch) -> pa.RecordBatch:
    schema = pa.schema([SCHEMA.field(0).with_nullable(False), SCHEMA.field(1)])
    return pa.RecordBatch.from_arrays(rows.columns, schema=schema)


FOREIGN: dict[str, tuple[Chunk, type[HeadwaterError]]] = {
    "a column more": (_columns(lambda rows: rows.append_column("more", pa.array([1, 2, 3]))), ForeignSchema),
    "a column less": (_columns(lambda rows: rows.select(["id"])), ForeignSchema),
    "another order": (_columns(lambda rows: rows.select(["name", "id"])), ForeignSchema),
    "another type": (
        _columns(lambda rows: rows.set_column(1, pa.field("name", pa.binary()), rows.column(1).cast(pa.binary()))),
        ForeignSchema,
    ),
    "other nulls": (_columns(_without_nulls), ForeignSchema),
    "a vnode that the log does not have": (numbered_chunk(900, 20, 512), ForeignVnode),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_refused_chunk_leaves_nothing_and_the_epoch_goes_on(store: StateStore, log_format: int, kind: str) -> None:
    bad, error = FOREIGN[kind]
    factory = KvLogStoreFactory(store, max_rows=15)
    writer = begin(factory.writer(factory.log("orders", SCHEMA, KEY, log_format)))
    good = [numbered_chunk(first, 30) for first in (0, 100)]
    for chunk in good:
        for _ in range(2):
            with pytest.raises(error):
                writer.write_chunk(bad)
        writer.write_chunk(chunk)
    end(factory, writer)
    ids = [key for chunk in good for key in chunk.rows.column("id").to_pylist()]
    assert held(store) == ids
    with store.snapshot() as view:
        seqs = [
            seq for batch in LogView.open(view, "orders").read_range(0, epoch(1)) for seq in batch["_seq"].to_pylist()
        ]
    assert sorted(seqs) == list(range(len(ids)))


def test_a_vnode_that_the_log_does_not_have_is_refused(store: StateStore, log_format: int) -> None:
    factory = KvLogStoreFactory(store)
    writer = begin(factory.writer(factory.log("orders", SCHEMA, KEY, log_format, 8)))
    with pytest.raises(ForeignVnode):
        writer.write_chunk(numbered_chunk(0, 50, 256))


def test_metadata_of_a_schema_does_not_matter(store: StateStore, log_format: int) -> None:
    factory = KvLogStoreFactory(store)
    writer = begin(factory.writer(factory.log("orders", SCHEMA, KEY, log_format)))
    writer.write_chunk(Chunk.inserts(numbered_chunk(0, 3).rows.replace_schema_metadata({"from": "x"}), KEY))
    end(factory, writer)
    assert held(store) == [0, 1, 2]


@pytest.mark.parametrize("code", [-1, 0, 5, 6, 127])
def test_an_op_that_is_none_makes_no_chunk(code: int) -> None:
    with pytest.raises(ChunkError, match="op code"):
        Chunk.build(numbered_chunk(0, 1).rows, pa.array([code], pa.int8()), KEY)


def test_a_chunk_without_rows_and_one_larger_than_the_stage(store: StateStore, log_format: int) -> None:
    factory = KvLogStoreFactory(store, max_bytes=1000)
    writer = begin(factory.writer(factory.log("orders", SCHEMA, KEY, log_format)))
    writer.write_chunk(Chunk.empty(SCHEMA))
    writer.write_chunk(numbered_chunk(0, 2000))
    writer.write_chunk(Chunk.empty(SCHEMA))
    writer.write_chunk(numbered_chunk(2000, 2000))
    end(factory, writer)
    end(factory, writer)
    assert held(store) == list(range(4000))


# -- vnode counts, keys, columns ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 32_768])
def test_any_vnode_count_is_written_read_migrated_and_compacted(store: StateStore, log_format: int, count: int) -> None:
    factory = KvLogStoreFactory(store)
    writer = begin(factory.writer(factory.log("orders", SCHEMA, KEY, log_format, count)))
    for _ in range(2):
        writer.write_chunk(numbered_chunk(0, 500, count))
        end(factory, writer)
    with LogConsumer.open(store.location, "orders", "sink") as consumer:
        assert sum(batch.num_rows for batch in consumer.read(*consumer.wait(1))) == 1000
    assert held(store, wanted=VnodeBitmap.of([count - 1], count)) == sorted(
        2 * filtered(numbered_chunk(0, 500, count), VnodeBitmap.of([count - 1], count)).rows["id"].to_pylist()
    )
    factory.close()
    del writer
    again = KvLogStoreFactory(store)
    if log_format == 1:
        assert Migration(again, "orders").step()
        again.sealer.seal(epoch(3))
    assert Compaction(again, "orders").step()
    again.sealer.seal(epoch(4))
    assert held(store) == list(range(500))


@pytest.mark.parametrize("count", [-1, 0, 32_769])
def test_other_vnode_counts_are_refused(store: StateStore, count: int) -> None:
    factory = KvLogStoreFactory(store)
    with pytest.raises(VnodeCountError):
        factory.log("orders", SCHEMA, KEY, vnode_count=count)
    assert factory.registry.names() == []


def test_a_log_without_key_columns(store: StateStore, log_format: int) -> None:
    factory = KvLogStoreFactory(store)
    log = factory.log("orders", SCHEMA, (), log_format, 1)
    writer = begin(factory.writer(log))
    writer.write_chunk(Chunk.inserts(numbered_chunk(0, 5).rows, (), 1))
    end(factory, writer)
    assert held(store) == [0, 1, 2, 3, 4]
    with pytest.raises(ForeignSchema, match="no key"):
        Compaction(factory, "orders")


def test_a_log_without_columns_counts_its_rows(store: StateStore, log_format: int) -> None:
    factory = KvLogStoreFactory(store)
    writer = begin(factory.writer(factory.log("orders", pa.schema([]), (), log_format)))
    rows = numbered_chunk(0, 5).rows.select([])
    writer.write_chunk(Chunk(rows, pa.array([1] * 5, pa.int8()), pa.array([0] * 5, pa.uint16())))
    end(factory, writer)
    with store.snapshot() as view:
        assert [batch.num_rows for batch in LogView.open(view, "orders").read_range(0, epoch(1))] == [5]


@pytest.mark.parametrize("key", [("nope",), ("id", "id")])
def test_a_key_of_columns_that_the_log_does_not_have_is_refused(store: StateStore, key: tuple[str, ...]) -> None:
    factory = KvLogStoreFactory(store)
    with pytest.raises(ForeignSchema):
        factory.log("orders", SCHEMA, key)


# -- epochs ---------------------------------------------------------------------------------------------------------


def test_epochs_go_forward(store: StateStore, log_format: int) -> None:
    factory = KvLogStoreFactory(store)
    log = factory.log("orders", SCHEMA, KEY, log_format)
    writer = begin(factory.writer(log))
    writer.write_chunk(numbered_chunk(0, 5))
    for following in (0, 1):
        with pytest.raises(InvalidOffset, match="cannot follow"):
            writer.end_epoch(epoch(following))
    writer.write_chunk(numbered_chunk(5, 5))
    end(factory, writer)
    with pytest.raises(InvalidOffset, match="is sealed"):
        begin(factory.writer(log))
    with store.snapshot() as view, pytest.raises(InvalidOffset):
        list(LogView.open(view, "orders").read_range(epoch(1), epoch(0)))
    assert held(store) == list(range(10))


def test_an_epoch_before_one_that_ended_cannot_be_sealed(store: StateStore, log_format: int) -> None:
    factory = KvLogStoreFactory(store)
    writer = begin(factory.writer(factory.log("orders", SCHEMA, KEY, log_format)))
    for following in (5, 9):
        writer.write_chunk(numbered_chunk(following, 2))
        writer.end_epoch(epoch(following))
    with pytest.raises(InputError):
        factory.sealer.seal(epoch(3))
    factory.sealer.seal(epoch(5))
    assert held(store) == [5, 6, 9, 10]


# -- writers and columns --------------------------------------------------------------------------------------------


def test_a_second_writer_of_a_log_is_refused(store: StateStore) -> None:
    factory = KvLogStoreFactory(store)
    log = factory.log("orders", SCHEMA, KEY)
    writer = begin(factory.writer(log))
    writer.write_chunk(numbered_chunk(0, 5))
    with pytest.raises(WrongCall, match="has a writer"):
        begin(factory.writer(log))
    with pytest.raises(WrongCall, match="has begun"):
        begin(writer)
    end(factory, writer)
    assert held(store) == [0, 1, 2, 3, 4]


BAD_SCHEMAS = {
    "a reserved column": SCHEMA.append(pa.field("_op", pa.int8())),
    "a column twice": SCHEMA.append(SCHEMA.field(0)),
    "without its key": pa.schema([SCHEMA.field(1)]),
}


@pytest.mark.parametrize("kind", BAD_SCHEMAS)
def test_columns_that_a_log_cannot_have_are_refused_and_the_epoch_goes_on(store: StateStore, kind: str) -> None:
    factory = KvLogStoreFactory(store)
    writer = begin(factory.writer(factory.log("orders", SCHEMA, KEY)))
    writer.write_chunk(numbered_chunk(0, 5))
    with pytest.raises(InputError):
        writer.change_schema(BAD_SCHEMAS[kind], KEY)
    writer.write_chunk(numbered_chunk(5, 5))
    end(factory, writer)
    assert held(store) == list(range(10))


@pytest.mark.parametrize(
    "wanted", [VnodeBitmap.full(8), VnodeBitmap.of([1], 8), VnodeBitmap.of([1, 400], 512)], ids=["all", "one", "more"]
)
def test_a_range_of_vnodes_of_another_count_is_refused(store: StateStore, log_format: int, wanted: VnodeBitmap) -> None:
    factory = KvLogStoreFactory(store)
    writer = begin(factory.writer(factory.log("orders", SCHEMA, KEY, log_format)))
    writer.write_chunk(numbered_chunk(0, 50))
    end(factory, writer)
    with pytest.raises(InputError):
        held(store, wanted=wanted)


# -- names ----------------------------------------------------------------------------------------------------------

NAMES = [
    "public.orders",
    "a/b",
    "../../x",
    "a b",
    "%2e",
    "ü✓",
    "a\0b",
    "a:b",
    "-",
    *(pytest.param(name, id=f"only {name!r}") for name in ("", ".", "..")),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_log_of_any_name_has_consumers_that_hold_it(tmp_path: Path, name: str) -> None:
    _is_held_by_its_consumer(tmp_path, name, "sink")


@pytest.mark.parametrize("name", NAMES)
def test_a_consumer_of_any_name_holds_its_log(tmp_path: Path, name: str) -> None:
    _is_held_by_its_consumer(tmp_path, "orders", name)


def _is_held_by_its_consumer(tmp_path: Path, log: str, consumer: str) -> None:
    location = tmp_path / "around" / "store"
    with open_writer(location) as store:
        factory = KvLogStoreFactory(store)
        writer = begin(factory.writer(factory.log(log, SCHEMA, KEY)))
        for first in (0, 5):
            writer.write_chunk(numbered_chunk(first, 5))
            end(factory, writer)
        with LogConsumer.open(str(location), log, consumer) as late:
            factory.truncation.forget_unneeded(log, epoch(2))
            for _ in range(3):
                end(factory, writer)
            after, upto = late.wait(0.0)
            assert sum(batch.num_rows for batch in late.read(after, upto)) == 10
            assert [(found.log, found.name) for found in factory.consumers.all()] == [(log, consumer)]
        factory.close()
    assert {path.name for path in (tmp_path / "around").iterdir()} == {"store"}


def test_a_name_that_is_too_long_for_a_file_has_several_folders_and_the_log_goes_on(tmp_path: Path) -> None:
    with open_writer(tmp_path / "store") as store:
        factory = KvLogStoreFactory(store)
        writer = begin(factory.writer(factory.log("orders", SCHEMA, KEY)))
        end(factory, writer)
        LogConsumer.open(str(tmp_path / "store"), "orders", "x" * 300).close()
        writer.write_chunk(numbered_chunk(0, 5))
        end(factory, writer)
        assert held(store) == [0, 1, 2, 3, 4]
        factory.close()

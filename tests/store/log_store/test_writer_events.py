"""A writer without a reader: events, columns that change inside an epoch, epochs without a barrier."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pyarrow as pa
import pytest
from tests.logs import KEY, SCHEMA, LogConsumer, epoch, numbered_chunk

from headwater.log_store import ForeignSchema, InvalidOffset, KvLogStoreFactory, LogView
from headwater.log_store.compaction import Compaction
from headwater.log_store.log_events import SCHEMA as SCHEMA_EVENT
from headwater.log_store.log_events import TRUNCATE, events_of
from headwater.log_store.migration import Migration
from headwater.log_store.status import log_status
from headwater.state import StateStore, open_writer
from headwater.stream import Chunk, Epoch, EpochPair

WIDER = SCHEMA.append(pa.field("more", pa.int32()))


@pytest.fixture
def store() -> Iterator[StateStore]:
    with open_writer(f"memory://{uuid.uuid4()}") as made:
        yield made


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def log_format(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def wider(first: int, rows: int) -> Chunk:
    batch = numbered_chunk(first, rows).rows
    return Chunk.inserts(
        pa.RecordBatch.from_arrays([*batch.columns, pa.array([7] * rows, pa.int32())], schema=WIDER), KEY
    )


def held(store: StateStore) -> list[tuple[int, int | None]]:
    with store.snapshot() as view:
        shown = LogView.open(view, "orders")
        found = shown.read_range(shown.bounds().gone, shown.sealed)
        rows = [(row["id"], row.get("more")) for batch in found for row in batch.to_pylist()]
        return sorted(rows, key=str)


def test_columns_change_inside_an_epoch_and_it_is_read_migrated_and_left_by_compaction(
    store: StateStore, log_format: int
) -> None:
    factory = KvLogStoreFactory(store)
    writer = factory.writer(factory.log("orders", SCHEMA, KEY, log_format))
    writer.init(EpochPair(epoch(1), Epoch(0)))
    writer.write_chunk(numbered_chunk(0, 40))
    writer.change_schema(WIDER, KEY)
    with pytest.raises(ForeignSchema):
        writer.write_chunk(numbered_chunk(40, 5))
    writer.write_chunk(wider(20, 40))
    writer.end_epoch(epoch(2))
    factory.sealer.seal(epoch(1))
    expected = sorted([(key, None) for key in range(40)] + [(key, 7) for key in range(20, 60)], key=str)
    assert held(store) == expected
    with store.snapshot() as view:
        (end,) = LogView.open(view, "orders").epochs()
        assert (end.first_schema_version, end.schema_version) == (1, 2)
    migration = Migration(factory, "orders")
    number = 2
    while not migration.step():
        writer.end_epoch(epoch(number + 1))
        factory.sealer.seal(epoch(number))
        number += 1
    writer.end_epoch(epoch(number + 1))
    factory.sealer.seal(epoch(number))
    assert held(store) == expected
    compaction = Compaction(factory, "orders")
    assert compaction.step()
    assert compaction.saved.epochs_left_alone >= 1
    factory.sealer.seal(epoch(number + 1))
    assert held(store) == expected
    factory.close()


def test_a_key_that_changed_keeps_older_epochs_from_being_compacted_by_it(store: StateStore) -> None:
    factory = KvLogStoreFactory(store)
    writer = factory.writer(factory.log("orders", SCHEMA, KEY))
    writer.init(EpochPair(epoch(1), Epoch(0)))
    for number in (1, 2):
        writer.write_chunk(numbered_chunk(0, 5))
        writer.end_epoch(epoch(number + 1))
        factory.sealer.seal(epoch(number))
    with pytest.raises(ForeignSchema, match="'nope'"):
        writer.change_schema(SCHEMA, ("nope",))
    writer.change_schema(SCHEMA, ("name",))
    factory.sealer.seal(epoch(3))
    factory.close()
    again = KvLogStoreFactory(store)
    assert (again.existing("orders").key_columns, again.existing("orders").key_since) == (("name",), 2)
    assert Compaction(again, "orders").step()
    again.sealer.seal(epoch(4))
    assert len(held(store)) == 10
    again.close()


def test_events_are_sealed_in_their_place_and_forgotten_with_their_epoch(store: StateStore, log_format: int) -> None:
    factory = KvLogStoreFactory(store)
    log = factory.log("orders", SCHEMA, KEY, log_format)
    writer = factory.writer(log)
    writer.init(EpochPair(epoch(1), Epoch(0)))
    writer.write_chunk(numbered_chunk(0, 3))
    writer.note(TRUNCATE, {"position": 1})
    writer.note(SCHEMA_EVENT, {"position": 2})
    with store.snapshot() as view:
        assert list(events_of(view, "orders", 0, epoch(9))) == []
    writer.end_epoch(epoch(2))
    factory.sealer.seal(epoch(1))
    writer.note(TRUNCATE, {"position": 3})  # an epoch without rows
    writer.end_epoch(epoch(3))
    factory.sealer.seal(epoch(2))

    def events() -> list[tuple[int, int, str, object]]:
        with store.snapshot() as view:
            found = events_of(view, "orders", 0, epoch(9))
            return [(one.epoch.ms, one.seq, one.kind, one.detail["position"]) for one in found]

    assert events() == [(1, 3, TRUNCATE, 1), (1, 3, SCHEMA_EVENT, 2), (2, 0, TRUNCATE, 3)]
    factory.truncation.forget_unneeded("orders", epoch(1))
    for number in (3, 4):
        writer.end_epoch(epoch(number + 1))
        factory.sealer.seal(epoch(number))
    assert events() == [(2, 0, TRUNCATE, 3)]
    factory.close()


def test_the_schema_at_an_epoch_is_known_though_the_epoch_that_changed_it_has_no_rows(
    store: StateStore, log_format: int
) -> None:
    factory = KvLogStoreFactory(store)
    writer = factory.writer(factory.log("orders", SCHEMA, KEY, log_format))
    writer.init(EpochPair(epoch(1), Epoch(0)))
    writer.write_chunk(numbered_chunk(0, 3))
    changed = {2: WIDER, 4: WIDER.append(pa.field("most", pa.int32()))}
    for number in range(1, 6):
        if number in changed:
            writer.change_schema(changed[number], KEY, {"text": "a change"})
        writer.end_epoch(epoch(number + 1))
        factory.sealer.seal(epoch(number))
    with store.snapshot() as view:
        shown = LogView.open(view, "orders")
        assert [shown.schema_version_at(epoch(number)) for number in range(1, 6)] == [1, 2, 2, 3, 3]
        assert [end.epoch for end in shown.epochs()] == [epoch(1)]
        assert [event.detail["text"] for event in events_of(view, "orders", 0, epoch(9))] == ["a change"] * 2
    factory.close()


def test_epochs_without_rows_have_no_barrier_and_no_lag(tmp_path_factory: pytest.TempPathFactory) -> None:
    location = tmp_path_factory.mktemp("state") / "store"
    with open_writer(location) as store:
        factory = KvLogStoreFactory(store)
        writer = factory.writer(factory.log("orders", SCHEMA, KEY))
        writer.init(EpochPair(epoch(1), Epoch(0)))
        with pytest.raises(InvalidOffset, match="cannot follow"):
            writer.end_epoch(epoch(1))
        writer.write_chunk(numbered_chunk(0, 5))
        for number in (1, 2, 3):
            writer.end_epoch(epoch(number + 1))
            factory.sealer.seal(epoch(number))
        assert factory.sealer.ended == epoch(3)
        with LogConsumer.open(str(location), "orders", "mirror") as consumer:
            after, upto = consumer.wait(1.0)
            assert (after, upto) == (0, epoch(3))
            assert sum(batch.num_rows for batch in consumer.read(after, upto)) == 5
            consumer.commit(upto)
            writer.end_epoch(epoch(5))
            factory.sealer.seal(epoch(4))
            after, upto = consumer.wait(1.0)
            assert (after, upto) == (epoch(3), epoch(4))
            assert list(consumer.read(after, upto)) == []
            (status,) = log_status(store)
            (shown,) = status.consumers
            assert (shown.lag_epochs, shown.lag_rows, shown.delivered) == (0, 0, epoch(3))
            assert (status.epochs, status.newest) == (1, epoch(1))
        factory.close()

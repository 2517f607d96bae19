"""KvLogStoreReader: one reader of many logs, one store, one seal, and each log forgets what it delivered."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.logs import KEY, SCHEMA, epoch, random_chunk
from tests.query_state import group_rows, grouped

from headwater.log_store import KvLogStoreReader, LogStoreVnodeProgress, LogView, ReadLimits, SealedRange, StoragePlace
from headwater.log_store.consumers import SINGLE, SINGLE_FOLDER, Consumers
from headwater.log_store.errors import EpochGone, InvalidOffset, LogNotFound
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.log_events import RESHAPED, Reshaped
from headwater.log_store.status import log_status
from headwater.state import Catalog, WriteBatch, beside, open_reader, stores_beside
from headwater.state.errors import StoreOwned, WriterFenced
from headwater.state.location import open_writer
from headwater.state.query_store import open_query_store, own_state
from headwater.stream import Epoch, EpochPair, VnodeBitmap

LOGS = ("public.orders", "public.lines", "public.notes")


class Source:
    """Three logs of one store."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.store = open_writer(location)
        self.factory = KvLogStoreFactory(self.store)
        self._rng = random.Random(3)
        self.writers = [self.factory.writer(self.factory.log(name, SCHEMA, KEY)) for name in LOGS]
        for writer in self.writers:
            writer.init(EpochPair(epoch(1), Epoch(0)))

    def write(self, count: int) -> None:
        for _ in range(count):
            number = self.writers[0].epoch
            for writer in self.writers:
                writer.write_chunk(random_chunk(self._rng, 10))
                writer.end_epoch(epoch(number.ms + 1))
            self.factory.sealer.seal(number)

    def held(self, log: str) -> list[int]:
        with self.store.snapshot() as view:
            return [end.epoch.ms for end in LogView.open(view, log).epochs()]

    def close(self) -> None:
        self.factory.close()
        self.store.close()


@pytest.fixture(params=["memory", "embedded", "slatedb"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    made = Source(
        {
            "memory": f"memory://{uuid.uuid4()}",
            "embedded": str(tmp_path / "store"),
            "slatedb": f"slatedb+file://{tmp_path}/store",
        }[request.param]
    )
    made.write(1)  # a log is there once it is sealed
    yield made
    made.close()


def see(reader: KvLogStoreReader, number: int) -> None:
    """An object store shows a seal to readers a little later."""
    end = time.monotonic() + 10
    while reader._source.committed_epoch() < epoch(number) and time.monotonic() < end:
        time.sleep(0.02)


def ids(reader: KvLogStoreReader, sealed: SealedRange | None, log: str) -> list[int]:
    assert sealed is not None
    with reader._source.snapshot() as view:
        rows = LogView.open(view, log).read_range(sealed.after, sealed.end)
        return [key for batch in rows for key in batch.column("id").to_pylist()]


# -- ranges ---------------------------------------------------------------------------------------------------------


def test_a_range_is_a_cut_over_all_logs_and_the_next_one_begins_where_it_ends(source: Source) -> None:
    with grouped(source.location, "mirror", *LOGS) as reader:
        source.write(3)
        see(reader, 4)
        first = reader.next_item(ReadLimits(end=epoch(2)))
        assert first == SealedRange(Epoch(0), epoch(2))
        assert [len(ids(reader, first, log)) for log in LOGS] == [20, 20, 20]
        second = reader.next_item(timeout=5)
        assert second == SealedRange(epoch(2), epoch(4))
        assert reader.next_item(timeout=0.01) is None
        reader.start_from(epoch(1))
        again = reader.next_item()
        assert again == SealedRange(epoch(1), epoch(4))
        assert (reader.statistics.ranges, reader.statistics.read_epoch) == (3, epoch(4))


@pytest.mark.parametrize(
    ("limits", "ends"),
    [
        (ReadLimits(), [5]),
        (ReadLimits(max_rows=1), [1, 2, 3, 4, 5]),
        (ReadLimits(max_rows=60), [2, 4, 5]),
        (ReadLimits(max_epochs=3), [3, 5]),
        (ReadLimits(max_rows=90, max_epochs=2), [2, 4, 5]),
        (ReadLimits(end=epoch(3), max_rows=60), [2, 3]),
    ],
    ids=str,
)
def test_a_range_has_one_epoch_at_least_and_as_many_rows_as_the_limits_allow(
    source: Source, limits: ReadLimits, ends: list[int]
) -> None:
    with grouped(source.location, "mirror", *LOGS) as reader:
        source.write(4)
        see(reader, 5)
        found = []
        while (sealed := reader.next_item(limits)) is not None:
            found.append(sealed.end.ms)
        assert found == ends


def test_a_range_of_one_shape_ends_before_rows_of_another(source: Source) -> None:
    with grouped(source.location, "mirror", *LOGS) as reader:
        source.writers[1].note("schema", {RESHAPED: Reshaped.NOTHING.value})
        source.write(1)
        source.writers[1].note("schema", {RESHAPED: Reshaped.COLUMNS.value})
        source.write(2)
        see(reader, 4)
        for limits, ends in ((ReadLimits(one_shape=True), [2, 4]), (ReadLimits(), [4])):
            reader.start_from(0)
            found = [reader.next_item(limits) for _ in ends]
            assert [one.end.ms for one in found if one is not None] == ends


# -- progress -------------------------------------------------------------------------------------------------------


def test_progress_in_all_logs_is_one_seal_and_each_log_forgets(source: Source) -> None:
    with grouped(source.location, "mirror", *LOGS) as reader:
        source.write(3)
        see(reader, 4)
        reader.truncate({"public.orders": epoch(3), "public.lines": epoch(2)})
        assert {log: reader.consumer(log).delivered().ms for log in LOGS} == {
            "public.orders": 3,
            "public.lines": 2,
            "public.notes": 0,
        }
        assert (reader.statistics.truncations, reader.statistics.truncated_epoch) == (1, epoch(3))
    assert sorted(group_rows(own_state(source.location, "mirror"), "mirror")) == sorted(LOGS)
    source.write(3)
    assert [source.held(log)[0] for log in LOGS] == [4, 3, 1]
    with grouped(source.location, "mirror", *LOGS) as reader:
        assert reader.consumer("public.orders").delivered() == epoch(3)
        found = {one.log: one.delivered().ms for one in Consumers(source.location).all()}
        assert found == {"public.orders": 3, "public.lines": 2, "public.notes": 0}
        with pytest.raises(InvalidOffset, match="not sealed"):
            reader.truncate(epoch(99))


def test_a_truncation_of_all_logs_that_is_deferred_is_durable_with_the_next_seal(source: Source) -> None:
    with (
        open_query_store(own_state(source.location, "mirror"), "mirror") as store,
        open_reader(source.location) as logs,
    ):
        reader = KvLogStoreReader(logs, store)
        reader.init(LOGS)
        see(reader, 1)
        reader.truncate(epoch(1), defer=True)
        known = Consumers(source.location)
        assert {one.delivered() for one in known.all()} == {Epoch(0)}
        store.flush()
        assert {one.delivered() for one in known.all()} == {epoch(1)}
        known.close()


def alone(location: str, log: str, name: str, delivered: Epoch) -> None:
    """A consumer with a store of its own, as an earlier release wrote it."""
    with open_writer(beside(location, SINGLE_FOLDER, log, name)) as own, own.snapshot() as view:
        batch = WriteBatch()
        place = LogStoreVnodeProgress.aligned(VnodeBitmap.full(256), StoragePlace(delivered))
        Catalog.load(view).open_or_create(SINGLE, batch).put(batch, 0, (name,), (place.to_json(), 0, None))
        own.seal(epoch(1), batch)


def test_a_consumer_that_had_a_store_of_its_own_goes_on_where_it_was(source: Source) -> None:
    source.write(4)
    alone(source.location, "public.orders", "mirror", epoch(4))
    found = Consumers(source.location)
    assert [(one.log, one.name, one.delivered().ms) for one in found.all()] == [("public.orders", "mirror", 4)]
    with KvLogStoreReader.open(source.location, "mirror", ["public.orders"]) as reader:
        assert reader.consumer("public.orders").delivered() == epoch(4)
    assert [(one.log, one.name, one.delivered().ms) for one in found.all()] == [("public.orders", "mirror", 4)]
    found.close()
    if "://" not in source.location:
        assert stores_beside(source.location, SINGLE_FOLDER, 2) == []


def test_a_log_that_is_dropped_waits_no_longer(source: Source) -> None:
    with grouped(source.location, "mirror", "public.orders") as reader:
        source.write(2)
        reader.drop(["public.orders"])
        source.factory.truncation.forget_unneeded("public.orders", epoch(2))
        source.write(3)
        assert source.held("public.orders")[0] > 2
        with pytest.raises(LogNotFound):
            reader.init(["public.nothing"])


def test_only_one_process_is_the_reader(source: Source) -> None:
    with grouped(source.location, "mirror", "public.orders") as first:
        source.write(1)
        see(first, 1)
        with pytest.raises(StoreOwned), grouped(source.location, "mirror", "public.orders"):
            pass
        with (
            grouped(source.location, "mirror", "public.orders", takeover=True),
            pytest.raises(WriterFenced),
        ):
            first.truncate(epoch(1))


# -- rewinds --------------------------------------------------------------------------------------------------------


def test_a_log_goes_back_alone_as_far_as_it_holds(source: Source) -> None:
    with grouped(source.location, "mirror", "public.orders", "public.lines") as reader:
        one, other = (reader.consumer(log) for log in ("public.orders", "public.lines"))
        source.write(3)
        see(reader, 3)
        reader.truncate(epoch(3))
        reader.rewind(epoch(1), ["public.orders"])
        assert (one.delivered(), other.delivered()) == (epoch(1), epoch(3))
        source.write(2)
        assert source.held("public.orders")[0] == 2
        see(reader, 5)
        reader.truncate({"public.orders": epoch(5)})
        source.write(3)
        see(reader, 8)
        with pytest.raises(EpochGone):
            reader.rewind(epoch(1), ["public.orders"])
        assert one.delivered() == epoch(5)
        assert reader.statistics.rewinds == 1
    status = {one.name: [each.name for each in one.consumers] for one in log_status(source.store)}
    assert status == {"public.lines": ["mirror"], "public.notes": [], "public.orders": ["mirror"]}


def test_all_logs_go_back_together_or_none_and_one_that_is_not_past_the_epoch_stays(source: Source) -> None:
    with grouped(source.location, "mirror", *LOGS) as reader:
        source.write(4)
        see(reader, 5)
        reader.truncate({"public.orders": epoch(4), "public.lines": epoch(3), "public.notes": epoch(1)})
        reader.start_from(epoch(4))
        reader.rewind(epoch(2))
        assert [reader.consumer(log).delivered().ms for log in LOGS] == [2, 2, 1]
        assert reader.next_item() == SealedRange(epoch(2), epoch(5))
        for gone in (Epoch(0), epoch(9)):
            source.factory.truncation.drop(source.factory.sealer.batch, source.factory.existing(LOGS[2]), epoch(1))
            source.write(1)
            see(reader, source.writers[0].epoch.ms - 1)
            with pytest.raises((EpochGone, InvalidOffset)):
                reader.rewind(gone if gone else Epoch(0))
            assert [reader.consumer(log).delivered().ms for log in LOGS] == [2, 2, 1]


def test_a_rewind_leaves_a_vnode_that_is_behind_where_it_is(source: Source) -> None:
    low, high = VnodeBitmap.full(256).split(2)
    with grouped(source.location, "mirror", "public.orders") as reader:
        source.write(2)
        see(reader, 3)
        reader.truncate(epoch(1), high)
        reader.truncate(epoch(3), low)
        reader.rewind(epoch(2))
        places = dict(reader.consumer("public.orders").progress.places())
        assert {places[vnode].epoch.ms for vnode in low} == {2}
        assert {places[vnode].epoch.ms for vnode in high} == {1}

"""Who may write and read a log: vnodes that move, consumers that cannot be read."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.log_store import (
    FlushOptions,
    ForeignVnode,
    KvLogStoreFactory,
    LogConsumer,
    VnodesMoved,
)
from headwater.log_store.item import BarrierItem, ChunkItem
from headwater.log_store.progress_book import SINGLE as PROGRESS
from headwater.log_store.status import log_status
from headwater.log_store.testing import KEY, SCHEMA, Instance, epoch, numbered_chunk
from headwater.state import Catalog, StateStore, WriteBatch, open_writer
from headwater.state.beside import open_beside_writer
from headwater.stream import Epoch, EpochPair, VnodeBitmap

LOW, HIGH = VnodeBitmap.full(256).split(2)


@pytest.fixture
def store() -> Iterator[StateStore]:
    with open_writer(f"memory://{uuid.uuid4()}") as made:
        yield made


def test_vnodes_move_in_any_order_and_are_never_owned_twice(store: StateStore) -> None:
    factory = KvLogStoreFactory(store)
    log = factory.log("orders", SCHEMA, KEY)
    first, second = factory.writer(log, LOW), factory.writer(log, HIGH)
    for writer in (first, second):
        writer.init(EpochPair(epoch(1), Epoch(0)))
    flushes = [
        first.flush_current_epoch(epoch(2), FlushOptions(new_vnode_bitmap=HIGH)),
        second.flush_current_epoch(epoch(2), FlushOptions(new_vnode_bitmap=LOW)),
    ]
    for flush in flushes:
        flush.finish()
    factory.sealer.seal(epoch(1))
    first.flush_current_epoch(epoch(3), FlushOptions(new_vnode_bitmap=LOW)).finish()
    with pytest.raises(ForeignVnode):  # who still owns them in the next epoch
        second.flush_current_epoch(epoch(3))
    second.flush_current_epoch(epoch(3), FlushOptions(is_stop=True)).finish()
    third = factory.writer(log, HIGH)
    third.init(EpochPair(epoch(3), epoch(2)))
    with pytest.raises(ForeignVnode):
        factory.writer(log, VnodeBitmap.of([200], 256)).init(EpochPair(epoch(3), epoch(2)))
    for writer in (first, third):
        writer.write_chunk(numbered_chunk(0, 50).filter_vnodes(writer.store_state.vnodes))
        writer.flush_current_epoch(epoch(4)).finish()
    factory.sealer.seal(epoch(3))
    del third, writer
    factory.writer(log, HIGH).init(EpochPair(epoch(4), epoch(3)))
    factory.close()


def test_a_reader_gives_nothing_of_other_vnodes_until_it_begins_anew(store: StateStore) -> None:
    instance = Instance.open(store, 1, vnodes=LOW)
    instance.writer.write_chunk(numbered_chunk(0, 40).filter_vnodes(LOW))
    (item,) = (instance.next_chunk(),)
    instance.flush(2, new_vnode_bitmap=VnodeBitmap.full(256))
    instance.writer.write_chunk(numbered_chunk(40, 40))
    for _ in range(2):
        with pytest.raises(VnodesMoved):
            instance.reader.next_item(0)
    instance.reader.init(1)
    instance.reader.start_from()
    again, _ = instance.until_barrier()
    assert sorted(key for chunk in again for key in chunk.rows["id"].to_pylist()) == sorted(
        item.chunk.rows["id"].to_pylist()
    )
    live = instance.next(2.0)
    assert isinstance(live, ChunkItem)
    assert live.chunk.num_rows == 40


def test_a_reader_that_waits_is_told_of_other_vnodes(store: StateStore) -> None:
    instance = Instance.open(store, 1, vnodes=LOW)
    found: list[object] = []

    def read() -> None:
        try:
            while not isinstance(item := instance.reader.next_item(30), BarrierItem):
                found.append(item)
            instance.reader.next_item(30)
        except VnodesMoved as error:
            found.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    instance.flush(2, new_vnode_bitmap=HIGH)
    thread.join(20)
    assert not thread.is_alive()
    assert [type(one) for one in found] == [VnodesMoved]


def test_a_drain_says_so_in_its_barrier(store: StateStore) -> None:
    instance = Instance.open(store, 1)
    reader = threading.Thread(target=lambda: instance.reader.truncate(_forced(instance).offset))
    reader.start()
    instance.flush(2, drain_seconds=10.0)
    reader.join(10)
    instance.flush(3)
    assert not instance.next_barrier().forces_commit


def _forced(instance: Instance) -> BarrierItem:
    item = instance.next_barrier()
    assert item.is_drain
    assert item.forces_commit
    return item


def test_a_consumer_whose_progress_is_damaged_holds_everything_and_is_shown(tmp_path: Path) -> None:
    location = str(tmp_path / "store")
    with open_writer(location) as store:
        factory = KvLogStoreFactory(store)
        writer = factory.writer(factory.log("orders", SCHEMA, KEY))
        writer.init(EpochPair(epoch(1), Epoch(0)))

        def write(number: int) -> None:
            writer.write_chunk(numbered_chunk(number * 10, 5))
            writer.flush_current_epoch(epoch(number + 1)).finish()
            factory.sealer.seal(epoch(number))

        write(1)
        with LogConsumer.open(location, "orders", "mirror") as consumer:
            consumer.commit(epoch(1))
        with open_beside_writer(location, "consumers", "orders", "mirror") as own:
            with own.snapshot() as view:
                table = Catalog.load(view).open(PROGRESS)
            batch = WriteBatch()
            table.put(batch, 0, ("mirror",), ({"count": 256, "places": 7}, 0, None))
            own.seal(own.committed_epoch().next(), batch)
        for number in (2, 3, 4):
            write(number)
        (status,) = log_status(store)
        (shown,) = status.consumers
        assert (shown.unreadable, shown.holds_back, status.epochs, status.gone) == (True, True, 4, 0)
        factory.close()

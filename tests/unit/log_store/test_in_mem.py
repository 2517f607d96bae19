"""Scenario 19: the log store in memory, and what both kinds of log store have in common."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, contextmanager

import pyarrow as pa
import pytest

from headwater.log_store import (
    BarrierItem,
    ChunkItem,
    DrainTimeout,
    FlushOptions,
    ForeignSchema,
    ForeignVnode,
    InMemLogStoreFactory,
    InMemLogStoreReader,
    InMemLogStoreWriter,
    InvalidOffset,
    KvLogStoreFactory,
    LogClosed,
    LogItem,
    LogOffset,
    LogReader,
    LogStoreFactory,
    LogWriter,
    WrongCall,
)
from headwater.log_store.testing import KEY, SCHEMA, epoch, numbered_chunk, rows_of
from headwater.state import open_writer
from headwater.stream import Chunk, Epoch, EpochPair, VnodeBitmap


def started(items: int = 4, wait_seconds: float | None = None) -> tuple[InMemLogStoreReader, InMemLogStoreWriter]:
    factory = InMemLogStoreFactory(items=items, wait_seconds=wait_seconds)
    reader, writer = factory.pair(factory.log("orders", SCHEMA, KEY), "sink")
    writer.init(EpochPair(epoch(1), Epoch(0)))
    reader.init(1)
    reader.start_from()
    return reader, writer


@pytest.fixture
def background() -> Iterator[Callable[[Callable[[], object]], Future[object]]]:
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit


Background = Callable[[Callable[[], object]], Future[object]]


def read(reader: LogReader) -> LogItem:
    item = reader.next_item(5)
    assert item is not None
    return item


def test_19_a_checkpoint_ends_when_its_barrier_is_truncated_not_earlier(background: Background) -> None:
    reader, writer = started(items=4)
    chunks = [numbered_chunk(10 * place, 10) for place in range(3)]
    writer.write_chunk(chunks[0])
    writer.write_chunk(chunks[1])
    writer.flush_current_epoch(epoch(2), FlushOptions(is_checkpoint=False)).finish()
    writer.write_chunk(chunks[2])
    flush = background(lambda: writer.flush_current_epoch(epoch(3)))

    for place in range(2):
        item = read(reader)
        assert isinstance(item, ChunkItem)
        assert (item.epoch, item.chunk_id) == (epoch(1), place)
        assert rows_of(item.chunk) == rows_of(chunks[place])
        reader.truncate(item.offset)
    barrier = read(reader)
    assert isinstance(barrier, BarrierItem)
    assert not barrier.is_checkpoint
    item = read(reader)
    assert isinstance(item, ChunkItem)
    assert (item.epoch, item.chunk_id) == (epoch(2), 0)
    reader.truncate(item.offset)
    barrier = read(reader)
    assert isinstance(barrier, BarrierItem)
    assert (barrier.epoch, barrier.is_checkpoint) == (epoch(2), True)
    assert reader.next_item(0) is None
    with pytest.raises(FutureTimeout):
        flush.result(0.05)
    reader.truncate(barrier.offset)
    flush.result(5).finish()  # type: ignore[attr-defined]
    writer.write_chunk(chunks[0])
    assert isinstance(read(reader), ChunkItem)


def test_19_a_checkpoint_barrier_that_is_not_truncated_holds_back_the_next_item(background: Background) -> None:
    reader, writer = started()
    flush = background(lambda: writer.flush_current_epoch(epoch(2), FlushOptions(drain_seconds=0.01)))
    barrier = read(reader)
    with pytest.raises(DrainTimeout, match="did not deliver epoch"):
        flush.result(5)
    writer.write_chunk(numbered_chunk(0, 3))
    assert reader.next_item(0) is None
    assert reader.next_item(0.01) is None
    found: list[LogItem | None] = []
    waiting = threading.Thread(target=lambda: found.append(reader.next_item(5)))
    waiting.start()
    reader.truncate(barrier.offset)
    waiting.join(5)
    assert isinstance(found[0], ChunkItem)


def test_19_a_checkpoint_that_timed_out_is_covered_by_the_next_one(background: Background) -> None:
    reader, writer = started()
    with pytest.raises(DrainTimeout):
        writer.flush_current_epoch(epoch(2), FlushOptions(drain_seconds=0.01))
    assert writer.epoch == epoch(2)
    flush = background(lambda: writer.flush_current_epoch(epoch(3)))
    for number in (1, 2):
        barrier = read(reader)
        assert barrier.epoch == epoch(number)
        reader.truncate(barrier.offset)
    flush.result(5)


def test_19_a_full_channel_holds_up_the_writer(background: Background) -> None:
    reader, writer = started(items=1)
    writer.write_chunk(numbered_chunk(0, 3))
    write = background(lambda: writer.write_chunk(numbered_chunk(3, 3)))
    with pytest.raises(FutureTimeout):
        write.result(0.05)
    assert isinstance(read(reader), ChunkItem)
    write.result(5)
    assert isinstance(read(reader), ChunkItem)


def test_19_a_writer_waits_for_room_only_as_long_as_was_said() -> None:
    reader, writer = started(items=1, wait_seconds=0.01)
    writer.write_chunk(numbered_chunk(0, 3))
    with pytest.raises(DrainTimeout, match="no room"):
        writer.write_chunk(numbered_chunk(3, 3))
    with pytest.raises(DrainTimeout, match="no room"):
        writer.flush_current_epoch(epoch(2))
    assert writer.epoch == epoch(1)
    assert rows_of(_chunk(read(reader))) == rows_of(numbered_chunk(0, 3))
    writer.write_chunk(numbered_chunk(6, 3))  # what was refused was not added
    second = read(reader)
    assert second.offset == LogOffset(epoch(1), 1)
    assert rows_of(_chunk(second)) == rows_of(numbered_chunk(6, 3))


def _chunk(item: LogItem) -> Chunk:
    assert isinstance(item, ChunkItem)
    return item.chunk


def test_19_a_barrier_that_is_no_checkpoint_waits_for_nobody() -> None:
    reader, writer = started(items=4)
    for number in (2, 3, 4):
        writer.flush_current_epoch(epoch(number), FlushOptions(is_checkpoint=False)).finish()
    assert [read(reader).epoch for _ in range(3)] == [epoch(1), epoch(2), epoch(3)]


def test_19_truncations_go_forward_and_not_beyond_what_was_read() -> None:
    reader, writer = started()
    with pytest.raises(InvalidOffset, match="was read"):
        reader.truncate(LogOffset(epoch(1), 0))
    writer.write_chunk(numbered_chunk(0, 3))
    writer.write_chunk(numbered_chunk(3, 3))
    first = read(reader).offset
    with pytest.raises(InvalidOffset, match="was read"):
        reader.truncate(LogOffset(epoch(1), 1))
    reader.truncate(first)
    with pytest.raises(InvalidOffset, match="forward"):
        reader.truncate(first)


def test_19_a_rewind_is_refused_with_what_to_do_instead() -> None:
    reader, _ = started()
    with pytest.raises(WrongCall, match=r"cannot be rewound.*begin again after the last checkpoint"):
        reader.rewind()


def test_19_other_vnodes_and_another_schema_come_with_the_barrier_and_reading_goes_on() -> None:
    reader, writer = started(items=8)
    half = VnodeBitmap.from_ranges([range(128)])
    wider = SCHEMA.append(pa.field("more", pa.int64()))
    options = FlushOptions(is_checkpoint=False, new_vnode_bitmap=half, schema_change=wider)
    writer.flush_current_epoch(epoch(2), options).finish()
    rows = pa.RecordBatch.from_pylist([{"id": key, "name": "a", "more": 1} for key in range(20)], schema=wider)
    whole = Chunk.inserts(rows, KEY)
    with pytest.raises(ForeignVnode):
        writer.write_chunk(whole)
    with pytest.raises(ForeignSchema):
        writer.write_chunk(numbered_chunk(0, 3).filter_vnodes(half))
    writer.write_chunk(whole.filter_vnodes(half))
    barrier = read(reader)
    assert isinstance(barrier, BarrierItem)
    assert barrier.new_vnode_bitmap == half
    assert barrier.schema_change == wider
    assert _chunk(read(reader)) == whole.filter_vnodes(half)


def test_19_the_end_of_one_side_is_told_to_the_other(background: Background) -> None:
    reader, writer = started(items=2)
    writer.write_chunk(numbered_chunk(0, 3))
    writer.flush_current_epoch(epoch(2), FlushOptions(is_checkpoint=False, is_stop=True)).finish()
    read(reader)
    read(reader)
    with pytest.raises(LogClosed):
        reader.next_item(5)
    with pytest.raises(WrongCall, match="stopped"):
        writer.write_chunk(numbered_chunk(0, 3))

    reader, writer = started(items=4)
    flush = background(lambda: writer.flush_current_epoch(epoch(2)))
    read(reader)
    reader.close()
    reader.close()
    with pytest.raises(LogClosed, match="was closed"):
        flush.result(5)
    with pytest.raises(LogClosed, match="was closed"):
        writer.write_chunk(numbered_chunk(0, 3))


def test_19_calls_out_of_order_are_refused() -> None:
    factory = InMemLogStoreFactory()
    reader, writer = factory.pair(factory.log("orders", SCHEMA, KEY), "sink")
    with pytest.raises(WrongCall):
        writer.write_chunk(numbered_chunk(0, 1))
    with pytest.raises(LogClosed):
        reader.init(0)
    writer.init(EpochPair(epoch(2), epoch(1)))
    with pytest.raises(WrongCall):
        writer.init(EpochPair(epoch(2), epoch(1)))
    with pytest.raises(WrongCall):
        reader.start_from()
    reader.init(0)
    with pytest.raises(InvalidOffset):
        reader.start_from(epoch(2))
    reader.start_from(epoch(1))
    with pytest.raises(InvalidOffset):
        writer.flush_current_epoch(epoch(2))
    with pytest.raises(WrongCall, match="items=0"):
        InMemLogStoreFactory(items=0)
    with pytest.raises(ForeignSchema):
        factory.log("orders", SCHEMA.remove(1), KEY)


@contextmanager
def kv_factory() -> Iterator[LogStoreFactory]:
    with open_writer(f"memory://{uuid.uuid4()}") as store:
        factory = KvLogStoreFactory(store)
        yield factory
        factory.close()


@contextmanager
def in_mem_factory() -> Iterator[LogStoreFactory]:
    yield InMemLogStoreFactory(items=8)


@pytest.mark.parametrize("kind", [kv_factory, in_mem_factory])
def test_19_both_kinds_of_log_store_are_driven_alike(
    kind: Callable[[], AbstractContextManager[LogStoreFactory]],
) -> None:
    with kind() as factory:
        reader, writer = factory.pair(factory.log("orders", SCHEMA, KEY), "sink")
        drive(reader, writer)
        if factory.ALLOW_REWIND:
            assert reader.rewind() >= 0
        else:
            with pytest.raises(WrongCall):
                reader.rewind()
        reader.close()


def drive(reader: LogReader, writer: LogWriter) -> None:
    writer.init(EpochPair(epoch(1), Epoch(0)))
    reader.init(5)
    reader.start_from()
    first, second = numbered_chunk(0, 10), numbered_chunk(10, 10)
    writer.write_chunk(first)
    writer.flush_current_epoch(epoch(2), FlushOptions(is_checkpoint=False)).finish()
    writer.pause()
    writer.resume()
    writer.write_chunk(second)
    assert writer.epoch == epoch(2)
    found = [read(reader) for _ in range(3)]
    assert [item.offset for item in found] == [LogOffset(epoch(1), 0), LogOffset(epoch(1)), LogOffset(epoch(2), 0)]
    assert [rows_of(item.chunk) for item in found if isinstance(item, ChunkItem)] == [rows_of(first), rows_of(second)]
    reader.truncate(found[-1].offset)
    with pytest.raises(InvalidOffset):
        reader.truncate(found[0].offset)

"""Scenario 12: only so many readers of a process read history at once; the others wait, and their writers do not."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator

import pytest

from headwater.log_store import HistoricalReads, KvLogStoreFactory, KvLogStoreReader, KvLogStoreWriter, WrongCall
from headwater.log_store.item import BarrierItem, ChunkItem
from headwater.log_store.reader import ReaderState
from headwater.log_store.testing import KEY, SCHEMA, epoch, numbered_chunk, rows_of
from headwater.state import StateStore, open_writer
from headwater.stream import Epoch, EpochPair

Pair = tuple[KvLogStoreReader, KvLogStoreWriter]


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def log_format(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def store(log_format: int) -> Iterator[StateStore]:
    """Two logs with one epoch of history each."""
    location = f"memory://{uuid.uuid4()}"
    with open_writer(location) as before:
        factory = KvLogStoreFactory(before)
        for place, name in enumerate(("a", "b")):
            _, writer = factory.pair(factory.log(name, SCHEMA, KEY, log_format), "sink")
            writer.init(EpochPair(epoch(1), Epoch(0)))
            writer.write_chunk(numbered_chunk(100 * place, 10))
            writer.flush_current_epoch(epoch(2)).finish()
        factory.sealer.seal(epoch(1))
        factory.close()
        with open_writer(location, takeover=True) as again:
            yield again


def started(factory: KvLogStoreFactory, name: str, log_format: int) -> Pair:
    reader, writer = factory.pair(factory.log(name, SCHEMA, KEY, log_format), "sink", sleep=lambda _: None)
    writer.init(EpochPair(epoch(2), epoch(1)))
    reader.init(1)
    reader.start_from()
    return reader, writer


def test_12_a_second_reader_waits_for_the_first_while_its_writer_goes_on(store: StateStore, log_format: int) -> None:
    factory = KvLogStoreFactory(store, historical_reads=HistoricalReads(1))
    first, _ = started(factory, "a", log_format)
    second, writer = started(factory, "b", log_format)
    assert isinstance(first.next_item(1), ChunkItem)
    assert second.next_item(0) is None
    assert second.state is ReaderState.HISTORY
    live = numbered_chunk(200, 5)
    writer.write_chunk(live)
    writer.flush_current_epoch(epoch(3)).finish()
    assert second.next_item(0.01) is None
    assert isinstance(first.next_item(1), BarrierItem)
    assert second.next_item(0) is None
    assert first.next_item(0) is None  # its history has ended
    assert first.state is ReaderState.LIVE

    old = second.next_item(1)
    assert isinstance(old, ChunkItem)
    assert (old.epoch, old.chunk_id) == (epoch(1), 0)
    assert rows_of(old.chunk) == rows_of(numbered_chunk(100, 10))
    assert isinstance(second.next_item(1), BarrierItem)
    new = second.next_item(1)
    assert isinstance(new, ChunkItem)
    assert (new.epoch, new.chunk_id) == (epoch(2), 0)
    assert rows_of(new.chunk) == rows_of(live)
    assert isinstance(second.next_item(1), BarrierItem)


def test_12_a_waiting_reader_goes_on_as_soon_as_the_permit_is_free(store: StateStore, log_format: int) -> None:
    factory = KvLogStoreFactory(store, historical_reads=HistoricalReads(1))
    first, _ = started(factory, "a", log_format)
    second, _ = started(factory, "b", log_format)
    assert isinstance(first.next_item(1), ChunkItem)
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(second.next_item(10)))
    waiting.start()
    first.close()
    waiting.join(10)
    assert len(found) == 1
    assert isinstance(found[0], ChunkItem)


@pytest.mark.parametrize("way", ["rewind", "init", "close", "dropped", "failed and rewound"])
def test_12_the_permit_is_given_back(
    way: str, store: StateStore, log_format: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = HistoricalReads(1)
    factory = KvLogStoreFactory(store, historical_reads=reads)
    first, writer = started(factory, "a", log_format)
    assert isinstance(first.next_item(1), ChunkItem)
    assert reads.free == 0
    if way == "rewind":
        first.rewind()
    elif way == "init":
        writer._link.moved(writer._start())  # type: ignore[union-attr]
        first.init(1)
    elif way == "close":
        first.close()
        first.close()
        with pytest.raises(WrongCall, match="closed"):
            first.init(0)
    elif way == "dropped":
        del first
    else:
        with monkeypatch.context() as patch:
            patch.setattr(first, "_history", iter(()).__next__)  # raises when it is asked
            with pytest.raises(TypeError):
                first.next_item(1)
        assert reads.free == 0
        first.rewind()
    assert reads.free == 1
    second, _ = started(factory, "b", log_format)
    assert isinstance(second.next_item(1), ChunkItem)


def test_12_a_rewound_reader_does_not_keep_the_others_waiting_while_it_waits_itself(
    store: StateStore, log_format: int
) -> None:
    reads = HistoricalReads(1)
    factory = KvLogStoreFactory(store, historical_reads=reads)
    seen: list[int | None] = []
    reader, writer = factory.pair(
        factory.log("a", SCHEMA, KEY, log_format), "sink", sleep=lambda _: seen.append(reads.free)
    )
    writer.init(EpochPair(epoch(2), epoch(1)))
    reader.init(1)
    reader.start_from()
    reader.next_item(1)
    reader.rewind()
    assert seen == [1]
    reader.start_from()
    assert isinstance(reader.next_item(1), ChunkItem)


def test_12_a_reader_without_history_needs_no_permit(log_format: int) -> None:
    reads = HistoricalReads(1)
    held = reads.acquire()
    with open_writer(f"memory://{uuid.uuid4()}") as store:
        factory = KvLogStoreFactory(store, historical_reads=reads)
        reader, writer = factory.pair(factory.log("a", SCHEMA, KEY, log_format), "sink")
        writer.init(EpochPair(epoch(1), Epoch(0)))
        reader.init(1)
        reader.start_from()
        writer.write_chunk(numbered_chunk(0, 5))
        assert isinstance(reader.next_item(1), ChunkItem)
    assert held is not None
    assert reads.free == 0


def test_12_permits_are_counted_over_all_factories_and_threads() -> None:
    reads = HistoricalReads(3)
    most, under_way, lock = 0, 0, threading.Lock()

    def read() -> None:
        nonlocal most, under_way
        permit = reads.acquire(10)
        assert permit is not None
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.001)
        with lock:
            under_way -= 1
        permit.release()
        permit.release()

    threads = [threading.Thread(target=read) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most <= 3
    assert reads.free == 3


def test_12_no_limit_by_default() -> None:
    reads = HistoricalReads()
    held = [reads.acquire(0) for _ in range(100)]
    assert all(held)
    assert reads.free is None
    with pytest.raises(WrongCall, match="limit=0"):
        HistoricalReads(0)

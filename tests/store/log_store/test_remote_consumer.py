"""Consumers with progress of their own, on every engine."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.log_store.errors import EpochGone, InvalidOffset, LogNotFound, ProgressConflict, RetentionMiss
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.log_view import LogView
from headwater.log_store.remote import LogConsumer
from headwater.log_store.testing import KEY, SCHEMA, epoch, random_chunk
from headwater.log_store.writer import KvLogStoreWriter
from headwater.state import StateStore, open_writer
from headwater.state.errors import StoreOwned
from headwater.stream import Chunk, Epoch, EpochPair, VnodeBitmap


class Source:
    """A log whose writer has no reader of its own."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.rng = random.Random(7)
        self.store: StateStore = open_writer(location)
        self.factory = KvLogStoreFactory(self.store)
        self.log = self.factory.log("public.orders", SCHEMA, KEY)
        self.writer: KvLogStoreWriter = self.factory.writer(self.log)
        self.writer.init(EpochPair(epoch(1), Epoch(0)))
        self.written: dict[int, Chunk] = {}

    def write(self, count: int) -> None:
        for _ in range(count):
            number = self.writer.epoch
            self.written[number.ms] = random_chunk(self.rng, 40)
            self.writer.write_chunk(self.written[number.ms])
            self.writer.flush_current_epoch(epoch(number.ms + 1)).finish()
            self.factory.sealer.seal(number)

    def held(self) -> list[int]:
        with self.store.snapshot() as view:
            return [end.epoch.ms for end in LogView.open(view, "public.orders").epochs()]

    def ids(self, *numbers: int, vnodes: VnodeBitmap | None = None) -> list[int]:
        chunks = [self.written[number] for number in numbers]
        if vnodes is not None:
            chunks = [chunk.filter_vnodes(vnodes) for chunk in chunks]
        return sorted(key for chunk in chunks for key in chunk.rows.column("id").to_pylist())


@pytest.fixture(params=["memory", "embedded", "slatedb"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    made = Source(
        {
            "memory": f"memory://{uuid.uuid4()}",
            "embedded": str(tmp_path / "store"),
            "slatedb": f"slatedb+file://{tmp_path}/store",
        }[request.param]
    )
    yield made
    made.factory.close()
    made.store.close()


def delivered(consumer: LogConsumer, timeout: float = 5.0) -> tuple[Epoch, list[int]]:
    after, upto = consumer.wait(timeout)
    return upto, sorted(key for batch in consumer.read(after, upto) for key in batch.column("id").to_pylist())


def see(consumer: LogConsumer, number: int) -> None:
    """An object store shows a seal to readers a little later."""
    deadline = time.monotonic() + 10
    while consumer._source.committed_epoch() < epoch(number) and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_consumer_gets_each_epoch_once_over_restarts_and_the_log_forgets_after_all(source: Source) -> None:
    source.write(3)
    with LogConsumer.open(source.location, "public.orders", "mirror") as consumer:
        upto, ids = delivered(consumer)
        assert (upto, ids) == (epoch(3), source.ids(1, 2, 3))
        consumer.commit(epoch(2))
        with pytest.raises(StoreOwned):
            LogConsumer.open(source.location, "public.orders", "mirror")
    with LogConsumer.open(source.location, "public.orders", "mirror") as consumer:
        upto, ids = delivered(consumer)
        assert ids == source.ids(3)
        consumer.commit(upto)
        assert consumer.wait(0.01) == (upto, upto)
        source.write(2)  # one announces, the other deletes
        assert source.held() == [4, 5]
        see(consumer, 5)
        assert delivered(consumer) == (epoch(5), source.ids(4, 5))


def test_the_slowest_consumer_decides_and_a_new_one_starts_at_what_is_held(source: Source) -> None:
    source.write(2)
    with (
        LogConsumer.open(source.location, "public.orders", "fast") as fast,
        LogConsumer.open(source.location, "public.orders", "slow") as slow,
    ):
        fast.wait(5)
        fast.commit(epoch(2))
        source.write(1)
        assert source.held() == [1, 2, 3]
        slow.wait(5)
        slow.commit(epoch(1))
        source.write(1)
        assert source.held() == [1, 2, 3, 4], "epoch 1 is announced, not deleted yet"
        see(fast, 4)
        with pytest.raises(EpochGone) as caught:
            fast.rewind(Epoch(0))
        assert caught.value.oldest == epoch(1)
        fast.rewind(epoch(1))
        assert delivered(fast)[1] == source.ids(2, 3, 4)
        with pytest.raises(EpochGone):
            LogConsumer.open(source.location, "public.orders", "late", start=Epoch(0))
        with LogConsumer.open(source.location, "public.orders", "new") as new:
            assert delivered(new)[1] == source.ids(2, 3, 4)
        source.write(1)
        assert source.held() == [2, 3, 4, 5]


def test_vnodes_are_delivered_one_by_one(source: Source) -> None:
    source.write(2)
    low, high = VnodeBitmap.full(256).split(2)
    with LogConsumer.open(source.location, "public.orders", "parts") as consumer:
        upto, _ = delivered(consumer)
        consumer.commit(upto, low)
        assert consumer.delivered() == 0
        after, upto = consumer.wait(5)
        ids = sorted(key for batch in consumer.read(after, upto) for key in batch.column("id").to_pylist())
        assert ids == source.ids(1, 2, vnodes=high)
        consumer.commit(upto, high)
        assert consumer.delivered() == epoch(2)
        with pytest.raises(ProgressConflict):
            consumer.commit(epoch(1), low)


def test_what_cannot_be_is_refused(source: Source) -> None:
    source.write(1)
    with pytest.raises(LogNotFound, match=r"public\.orders"):
        LogConsumer.open(source.location, "nothing", "mirror")
    with LogConsumer.open(source.location, "public.orders", "mirror") as consumer:
        consumer.wait(5)
        with pytest.raises(InvalidOffset, match="not sealed"):
            consumer.commit(epoch(9))
        source.write(2)
        source.factory.consumers.drop_epochs(source.factory.sealer.batch, source.log, epoch(2))
        source.write(1)
        see(consumer, 4)
        with pytest.raises(RetentionMiss, match="unread by consumer 'mirror'"):
            consumer.wait(1)

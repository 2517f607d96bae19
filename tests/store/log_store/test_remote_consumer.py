"""Consumers with progress of their own, on every engine."""

from __future__ import annotations

import os
import random
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.logs import KEY, SCHEMA, LogConsumer, epoch, filtered, random_chunk

from headwater.log_store import consumers as consumers_module
from headwater.log_store.errors import EpochGone, InvalidOffset, LogNotFound, ProgressConflict, RetentionMiss
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.log_view import LogView
from headwater.log_store.progress import LogStoreVnodeProgress, StoragePlace
from headwater.log_store.writer import KvLogStoreWriter
from headwater.state import Catalog, StateStore, TableSchema, WriteBatch, beside, open_writer
from headwater.state.beside import marks_beside
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
            self.writer.end_epoch(epoch(number.ms + 1))
            self.factory.sealer.seal(number)

    def held(self) -> list[int]:
        with self.store.snapshot() as view:
            return [end.epoch.ms for end in LogView.open(view, "public.orders").epochs()]

    def ids(self, *numbers: int, vnodes: VnodeBitmap | None = None) -> list[int]:
        chunks = [self.written[number] for number in numbers]
        if vnodes is not None:
            chunks = [filtered(chunk, vnodes) for chunk in chunks]
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
    while consumer.reader._source.committed_epoch() < epoch(number) and time.monotonic() < deadline:
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
        source.factory.truncation.drop(source.factory.sealer.batch, source.log, epoch(2))
        source.write(1)
        see(consumer, 4)
        with pytest.raises(RetentionMiss, match="unread by consumer 'mirror'"):
            consumer.wait(1)


class Looks:
    """Counts the looks at all consumers, and those of them that were read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lists = self.reads = 0
        listed, read = marks_beside, consumers_module.Consumers._rows

        def counted(*arguments: Any) -> Any:
            self.lists += arguments[1] == consumers_module.SINGLE_FOLDER  # groups are another look
            return listed(*arguments)

        def counted_read(*arguments: Any) -> Any:
            self.reads += 1
            return read(*arguments)

        monkeypatch.setattr(consumers_module, "marks_beside", counted)
        monkeypatch.setattr(consumers_module.Consumers, "_rows", counted_read)

    def taken(self) -> tuple[int, int]:
        found = (self.lists, self.reads)
        self.lists = self.reads = 0
        return found


def test_the_consumers_of_all_logs_are_looked_at_once_per_seal_and_read_when_they_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = str(tmp_path / "store")
    with open_writer(location) as store:
        factory = KvLogStoreFactory(store)
        writers = [factory.writer(factory.log(f"t{number}", SCHEMA, KEY)) for number in range(10)]
        for writer in writers:
            writer.init(EpochPair(epoch(1), Epoch(0)))
        looks = Looks(monkeypatch)

        def seal(number: int) -> tuple[int, int]:
            for writer in writers:
                writer.end_epoch(epoch(number + 1))
            factory.sealer.seal(epoch(number))
            return looks.taken()

        seal(1)
        for number in range(10):
            for name in ("a", "b"):
                LogConsumer.open(location, f"t{number}", name).close()
        looks.taken()
        rest(tmp_path, -3600)
        assert seal(2) == (1, 2)
        assert seal(3) == (1, 2), "not surely in the past: the time of the files says nothing"
        rest(tmp_path)
        assert seal(4) == (1, 2)
        assert seal(5) == (1, 0)
        for name in ("a", "b"):
            with LogConsumer.open(location, "t3", name) as consumer:
                consumer.commit(epoch(4))
        looks.taken()
        rest(tmp_path, 5.0)
        assert seal(6) == (1, 2)
        assert factory.truncation.gone("t3") == 0
        assert seal(7) == (1, 0)
        assert factory.truncation.gone("t3") == epoch(4)
        shutil.rmtree(tmp_path / "store" / "queries" / "a")
        assert seal(8) == (1, 0)
        assert [found.name for found in factory.consumers.of("t3")] == ["b"]
        factory.close()


def rest(folder: Path, seconds: float = 10.0) -> None:
    """As if the consumers had written nothing for some *seconds*."""
    for path in folder.rglob("queries/*/data.mdb"):
        then = time.time() - seconds
        if path.stat().st_mtime > time.time() - 2:
            os.utime(path, (then, then))


def test_a_consumer_on_an_object_store_is_read_again_after_a_commit_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(f"slatedb+file://{tmp_path}/store")
    source.write(2)
    with LogConsumer.open(source.location, "public.orders", "mirror") as consumer:
        looks = Looks(monkeypatch)
        source.write(3)
        assert looks.taken() == (3, 1)
        consumer.commit(epoch(2))
        source.write(2)
        assert looks.taken() == (2, 1)
        assert source.held() == [3, 4, 5, 6, 7]
    source.factory.close()
    source.store.close()


def test_the_stores_of_many_consumers_need_few_addresses(tmp_path: Path) -> None:
    source = Source(str(tmp_path / "store"))
    source.write(1)
    before = mapped_gib()
    with ExitStack() as stack:
        for number in range(40):
            stack.enter_context(LogConsumer.open(source.location, "public.orders", f"c{number}"))
        assert len(source.factory.consumers.all()) == 40
        assert mapped_gib() - before < 100, "1 GiB each, and the log's own store once"
    source.factory.close()
    source.store.close()


def mapped_gib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 30)


def test_a_start_that_is_refused_late_leaves_no_consumer(source: Source) -> None:
    source.write(2)
    with LogConsumer.open(source.location, "public.orders", "mirror") as consumer:
        consumer.commit(epoch(2))
        consumer.drop()
    for start, error in ((epoch(9), InvalidOffset), (Epoch(0), None)):
        if error is not None:
            with pytest.raises(error):  # its store is there, so only the second look refuses it
                LogConsumer.open(source.location, "public.orders", "mirror", start=start)
            assert source.factory.consumers.all() == []
        else:
            LogConsumer.open(source.location, "public.orders", "mirror", start=start).close()
            assert [found.name for found in source.factory.consumers.all()] == ["mirror"]


def test_progress_of_the_first_version_is_read_and_written_on(tmp_path: Path) -> None:
    source = Source(str(tmp_path / "store"))
    source.write(3)
    old = TableSchema("consumer_progress", 1, consumers_module.SINGLE.key, consumers_module.SINGLE.value[:2])
    with open_writer(beside(source.location, "consumers", "public.orders", "mirror")) as own, own.snapshot() as view:
        batch = WriteBatch()
        place = LogStoreVnodeProgress.aligned(VnodeBitmap.full(256), StoragePlace(epoch(2)))
        Catalog.load(view).open_or_create(old, batch).put(batch, 0, ("mirror",), (place.to_json(), 0))
        own.seal(epoch(1), batch)
    assert source.factory.consumers.all()[0].delivered() == epoch(2)
    with LogConsumer.open(source.location, "public.orders", "mirror") as consumer:
        assert delivered(consumer) == (epoch(3), source.ids(3))
        consumer.commit(epoch(3))
    for _ in range(2):  # a reader that was open meanwhile looks again
        found = source.factory.consumers.all()[0].delivered()
    assert found == epoch(3)
    source.factory.close()
    source.store.close()

"""What goes wrong around a log: crashes between barriers, failing reads, moved vnodes, threads, other consumers."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater import failpoints
from headwater.log_store import layout, reader
from headwater.log_store.errors import EpochGone, InvalidOffset, WrongCall
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.item import BarrierItem, ChunkItem
from headwater.log_store.log_view import LogView
from headwater.log_store.remote import LogConsumer
from headwater.log_store.state import LogStoreState
from headwater.log_store.testing import KEY, SCHEMA, Instance, epoch, numbered_chunk, rows_of
from headwater.state import StateStore, WriteBatch, open_writer, stores_beside
from headwater.state.errors import StoreFull, StoreUnavailable
from headwater.stream import Chunk, Epoch, EpochPair, Op, VnodeBitmap
from headwater.stream.errors import ChunkError

FULL = VnodeBitmap.full(256)
EVEN = VnodeBitmap.of(range(0, 256, 2), 256)
ODD = ~EVEN
Reopen = Callable[[], StateStore]


@pytest.fixture
def location(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def reopen(location: str) -> Iterator[Reopen]:
    opened: list[StateStore] = []

    def open_again() -> StateStore:
        opened.append(open_writer(location, takeover=bool(opened)))
        return opened[-1]

    yield open_again
    for store in opened:
        store.close()


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def log_format(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def rng() -> random.Random:
    return random.Random(20261115)


def two(store: StateStore, at: int, log_format: int, **more: Any) -> tuple[KvLogStoreFactory, list[Instance]]:
    factory = KvLogStoreFactory(store, **more)
    made = [
        Instance.open(store, at, log_format=log_format, vnodes=vnodes, factory=factory, max_rows=0)
        for vnodes in (EVEN, ODD)
    ]
    return factory, made


def ids_of(store: StateStore, upto: int, name: str = "orders") -> list[int]:
    with store.snapshot() as view:
        shown = LogView.open(view, name)
        batches = shown.read_range(shown.bounds().gone, epoch(upto))
        return sorted(key for batch in batches for key in batch.column("id").to_pylist())


# -- other consumers, and the store ---------------------------------------------------------------------------------


def test_rows_that_a_reader_truncates_before_their_barrier_stay_for_other_consumers(
    reopen: Reopen, location: str, log_format: int
) -> None:
    store = reopen()
    instance = Instance.open(store, 1, log_format=log_format)
    instance.writer.write_chunk(numbered_chunk(0, 50))
    instance.reader.truncate(instance.next_chunk().offset)
    instance.flush(2)
    assert ids_of(store, 1) == list(range(50))
    with LogConsumer.open(location, "orders", "mirror") as mirror:
        after, upto = mirror.wait(1)
        assert sum(batch.num_rows for batch in mirror.read(after, upto)) == 50


def test_m4_rows_that_came_before_a_pause_survive_a_crash(reopen: Reopen, log_format: int) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format)
    instance.writer.write_chunk(numbered_chunk(0, 20))
    instance.writer.pause()
    instance.flush(2)
    again = Instance.open(reopen(), 2, log_format=log_format)
    assert rows_of(again.until_barrier()[0]) == rows_of(numbered_chunk(0, 20))


def test_an_epoch_delivered_before_its_seal_leaves_nothing_behind(reopen: Reopen, log_format: int) -> None:
    store = reopen()
    instance = Instance.open(store, 1, log_format=log_format)
    for number in (1, 2, 3):
        instance.writer.write_chunk(numbered_chunk(100 * number, 20))
        instance.flush(number + 1, checkpoint=False)
        instance.reader.truncate(instance.until_barrier()[1].offset)
    instance.flush(5)
    instance.flush(6)
    with store.snapshot() as view:
        shown = LogView.open(view, "orders")
        assert shown.bounds().gone == epoch(3)
        spaces = [key[4] for key, _ in view.scan_prefix(layout.prefix(shown.log.number))]
    assert spaces == [layout.BARRIERS] * 2, "only the newest barriers"


def test_an_instance_that_begins_removes_nothing_of_one_that_runs(reopen: Reopen, log_format: int) -> None:
    store = reopen()
    factory = KvLogStoreFactory(store, stage_bytes=100)
    first = Instance.open(store, 1, log_format=log_format, vnodes=EVEN, factory=factory)
    mine = numbered_chunk(0, 200).filter_vnodes(EVEN)
    for part in mine.split(max_rows=20):
        first.writer.write_chunk(part)
    second = Instance.open(store, 1, log_format=log_format, vnodes=ODD, factory=factory)
    for instance in (first, second):
        instance.flush(2, seal=False)
    factory.sealer.seal(epoch(1))
    assert ids_of(store, 1) == sorted(mine.rows.column("id").to_pylist())


def test_two_logs_of_a_store_are_sealed_as_one(reopen: Reopen, log_format: int) -> None:
    store = reopen()
    factory = KvLogStoreFactory(store)
    writers = [factory.writer(factory.log(name, SCHEMA, KEY, log_format)) for name in ("a", "b")]
    for writer in writers:
        writer.init(EpochPair(epoch(1), Epoch(0)))
    for number in (1, 2):
        for place, writer in enumerate(writers):
            writer.write_chunk(numbered_chunk(1000 * place + 10 * number, 10))
            writer.flush_current_epoch(epoch(number + 1)).finish()
            if number == 2 and place == 0:
                failpoints.arm("log_store.before_seal=raise")
                try:
                    with pytest.raises(failpoints.FailpointError):
                        factory.sealer.seal(epoch(2))
                finally:
                    failpoints.arm("")
                assert (ids_of(store, 1, "a"), ids_of(store, 1, "b")) == (list(range(10, 20)), list(range(1010, 1020)))
        factory.sealer.seal(epoch(number))
    assert ids_of(store, 2, "a") == list(range(10, 30))
    assert ids_of(store, 2, "b") == list(range(1010, 1030))


def test_a_snapshot_older_than_a_truncation_still_shows_what_it_saw(reopen: Reopen, log_format: int) -> None:
    store = reopen()
    instance = Instance.open(store, 1, log_format=log_format)
    for number in (1, 2):
        instance.writer.write_chunk(numbered_chunk(100 * number, 20))
        instance.flush(number + 1)
    store.pin("old")
    with store.snapshot() as before:
        for number in (3, 4):
            instance.reader.truncate(instance.until_barrier()[1].offset)
            instance.flush(number + 1)
        instance.flush(6)
        for view in (before, store.snapshot(epoch(2))):
            with view:
                shown = LogView.open(view, "orders")
                assert shown.bounds().gone == 0
                assert sum(batch.num_rows for batch in shown.read_range(0, epoch(2))) == 40
    with store.snapshot() as view, pytest.raises(EpochGone) as caught:
        list(LogView.open(view, "orders").read_range(0, epoch(2)))
    assert caught.value.oldest == epoch(2)
    with store.snapshot() as view:
        shown = LogView.open(view, "orders")
        for after, upto in ((epoch(4), epoch(3)), (epoch(2), epoch(9))):
            with pytest.raises(InvalidOffset):
                list(shown.read_range(after, upto))


def test_m13_too_many_rows_for_an_epoch_are_refused_as_a_whole(reopen: Reopen, log_format: int) -> None:
    store = reopen()
    instance = Instance.open(store, 1, log_format=log_format)
    instance.writer._next_seq = layout.MAX_SEQ - 4
    with pytest.raises(WrongCall, match="more than"):
        instance.writer.write_chunk(numbered_chunk(0, 10))
    instance.writer.write_chunk(numbered_chunk(100, 5))
    instance.flush(2)
    assert ids_of(store, 1) == list(range(100, 105))
    assert rows_of(instance.until_barrier()[0]) == rows_of(numbered_chunk(100, 5))


def test_a_chunk_that_finds_no_room_on_disk_is_refused_as_a_whole(
    reopen: Reopen, log_format: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = reopen()
    factory = KvLogStoreFactory(store, stage_bytes=500)
    instance = Instance.open(store, 1, log_format=log_format, factory=factory)
    instance.writer.write_chunk(numbered_chunk(0, 20))

    def full(batch: object) -> None:
        raise StoreFull("No room.")

    with monkeypatch.context() as patch:
        patch.setattr(store, "stage", full)
        with pytest.raises(StoreFull):
            instance.writer.write_chunk(numbered_chunk(100, 20))
    instance.writer.write_chunk(numbered_chunk(200, 20))
    instance.flush(2)
    assert ids_of(store, 1) == [*range(20), *range(200, 220)]
    assert rows_of(instance.until_barrier()[0]) == rows_of([numbered_chunk(0, 20), numbered_chunk(200, 20)])


def test_10_history_of_two_schemas_is_read_with_both(reopen: Reopen, location: str, log_format: int) -> None:
    wider = SCHEMA.append(pa.field("more", pa.int64()))
    instance = Instance.open(reopen(), 1, log_format=log_format, max_rows=0)
    instance.writer.write_chunk(numbered_chunk(0, 10))
    instance.flush(2, schema_change=wider)
    columns = [pa.array([100, 101], pa.int64()), pa.array(["x", "y"]), pa.array([7, None], pa.int64())]
    later = Chunk.inserts(pa.RecordBatch.from_arrays(columns, schema=wider), KEY)
    instance.writer.write_chunk(later)
    instance.flush(3)
    live = [instance.until_barrier()[0] for _ in range(2)]
    store = reopen()
    factory = KvLogStoreFactory(store)
    source, writer = factory.pair(factory.existing("orders"), "sink")
    writer.init(EpochPair(epoch(3), epoch(2)))
    source.init(1)
    source.start_from()
    items = [source.next_item(1) for _ in range(4)]
    for chunks, item in zip(live, (items[0], items[2]), strict=True):
        assert isinstance(item, ChunkItem)
        assert item.chunk.schema == chunks[0].schema
        assert sorted(item.chunk.rows.column("id").to_pylist()) == sorted(chunks[0].rows.column("id").to_pylist())
    with LogConsumer.open(location, "orders", "mirror") as mirror:
        widths = [len(batch.schema.names) for batch in mirror.read(*mirror.wait(1))]
    assert sorted(set(widths)) == [6, 7]


# -- history --------------------------------------------------------------------------------------------------------


def test_m22_history_that_cannot_be_read_for_a_moment_is_not_skipped(
    reopen: Reopen, log_format: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format)
    for number in (1, 2, 3):
        instance.writer.write_chunk(numbered_chunk(100 * number, 30))
        instance.flush(number + 1)
    again = Instance.open(reopen(), 4, log_format=log_format)
    again.reader._history_rows = 7
    found: list[Chunk] = []
    barriers: list[int] = []
    original = LogView.batches
    turn = 0

    def failing(self: LogView, *arguments: Any) -> Iterator[Any]:
        for batch in original(self, *arguments):
            yield batch
            raise StoreUnavailable("For a moment.")

    while len(barriers) < 3:
        turn += 1
        with monkeypatch.context() as patch:
            if turn % 3 == 0:
                patch.setattr(LogView, "batches", failing)
                again.reader._history = None
            try:
                item = again.next(1)
            except StoreUnavailable:
                continue
        assert item is not None
        if isinstance(item, ChunkItem):
            found.append(item.chunk)
        else:
            barriers.append(item.epoch.ms)
    assert barriers == [1, 2, 3]
    assert rows_of(found) == rows_of([numbered_chunk(100 * number, 30) for number in (1, 2, 3)])


def test_6_history_of_several_chunks_is_truncated_and_rewound_chunk_by_chunk(reopen: Reopen, log_format: int) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format)
    instance.writer.write_chunk(numbered_chunk(0, 40))
    instance.flush(2)
    again = Instance.open(reopen(), 2, log_format=log_format)
    again.reader._history_rows = 5
    delivered: list[Chunk] = []
    while isinstance(item := again.next(1), ChunkItem):
        delivered.append(item.chunk)
        again.reader.truncate(item.offset)
        again.reader.rewind()
        again.reader.start_from()
    assert isinstance(item, BarrierItem)
    assert rows_of(delivered) == rows_of(numbered_chunk(0, 40))


def test_m12_history_goes_on_in_a_new_snapshot_while_the_log_is_truncated(
    reopen: Reopen, log_format: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "HISTORY_VIEW_SECONDS", 0.0)
    instance = Instance.open(reopen(), 1, log_format=log_format)
    for number in range(1, 6):
        instance.writer.write_chunk(numbered_chunk(100 * number, 10))
        instance.flush(number + 1)
    again = Instance.open(reopen(), 6, log_format=log_format)
    for number in range(1, 6):
        chunks, barrier = again.until_barrier()
        assert barrier.epoch == epoch(number)
        assert rows_of(chunks) == rows_of(numbered_chunk(100 * number, 10))
        again.reader.truncate(barrier.offset)
        again.flush(number + 6)


def test_m11_an_epoch_that_a_paused_instance_did_not_end_is_over_for_all(reopen: Reopen, log_format: int) -> None:
    factory, (even, odd) = two(reopen(), 1, log_format)
    odd.writer.pause()
    for number in (1, 2):
        even.writer.write_chunk(numbered_chunk(100 * number, 20).filter_vnodes(EVEN))
        for instance in (even, odd):
            instance.flush(number + 1, seal=False, checkpoint=number == 2)
    factory.sealer.seal(epoch(2))
    whole = Instance.open(reopen(), 3, log_format=log_format)
    assert whole.until_barrier()[1].is_checkpoint is False
    _, barrier = whole.until_barrier()
    whole.reader.truncate(barrier.offset)
    whole.reader.rewind()
    whole.reader.start_from()
    assert whole.next(0.01) is None
    whole.flush(4)
    whole.flush(5)
    with whole.factory._store.snapshot() as view:
        assert LogView.open(view, "orders").bounds().gone == epoch(2)


def test_m1_a_vnode_that_is_ahead_inside_a_later_epoch_holds_nothing_up(reopen: Reopen, log_format: int) -> None:
    factory, (even, odd) = two(reopen(), 1, log_format)
    for number in (1, 2, 3):
        for instance, vnodes in ((even, EVEN), (odd, ODD)):
            for first in (0, 50):
                instance.writer.write_chunk(numbered_chunk(1000 * number + first, 50).filter_vnodes(vnodes))
                if number == 3 and first == 0 and instance is even:
                    for _ in range(2):
                        even.until_barrier()
                    even.reader.truncate(even.next_chunk().offset)
        for instance in (even, odd):
            instance.flush(number + 1, seal=False)
        factory.sealer.seal(epoch(number))
    for instance in (even, odd):
        instance.flush(5, seal=False)
    factory.sealer.seal(epoch(4))
    whole = Instance.open(reopen(), 5, log_format=log_format)
    found: list[Chunk] = []
    for number in (1, 2, 3, 4):
        chunks, barrier = whole.until_barrier()
        assert barrier.epoch == epoch(number)
        whole.reader.truncate(barrier.offset)
        whole.flush(number + 5)
        found += chunks
    rest = [numbered_chunk(1000 * n + first, 50).filter_vnodes(ODD) for n in (1, 2, 3) for first in (0, 50)]
    rest.append(numbered_chunk(3050, 50).filter_vnodes(EVEN))
    assert rows_of(found) == rows_of(rest)


def test_a_start_epoch_counts_as_delivered_and_only_one_that_ended_is_taken(reopen: Reopen, log_format: int) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format)
    for number in (1, 2, 3):
        for first in (0, 20):
            instance.writer.write_chunk(numbered_chunk(1000 * number + first, 20))
        instance.flush(number + 1)
    again = Instance.open(reopen(), 4, log_format=log_format)
    again.reader._history_rows = 5
    again.reader.truncate(again.next_chunk().offset)  # inside epoch 1
    again.reader.rewind()
    with pytest.raises(InvalidOffset, match="has not ended"):
        again.reader.start_from(epoch(4))
    again.reader.start_from(epoch(2))
    chunks, barrier = again.until_barrier()
    assert barrier.epoch == epoch(3)
    assert sum(chunk.num_rows for chunk in chunks) == 40
    again.reader.truncate(barrier.offset)
    again.writer.write_chunk(numbered_chunk(5000, 10))
    again.flush(5)
    for _ in range(2):  # what was handed back by a rewind is skipped as well
        again.reader.rewind()
        again.reader.start_from()
    again.reader.rewind()
    again.reader.start_from(epoch(4))
    assert again.next(0.01) is None
    again.flush(6)
    again.flush(7)
    with again.factory._store.snapshot() as view:
        assert LogView.open(view, "orders").bounds().gone == epoch(4)


def test_m5_17_m25_update_pairs_stay_whole_in_history_of_small_chunks(reopen: Reopen, log_format: int) -> None:
    ids = pa.array([key for key in range(20) for _ in range(2)], pa.int64())
    names = pa.array([f"{place:02d}" for place in range(40)])
    rows = pa.RecordBatch.from_arrays([ids, names], schema=SCHEMA)
    written = Chunk.build(rows, [Op.UPDATE_DELETE, Op.UPDATE_INSERT] * 20, KEY)
    instance = Instance.open(reopen(), 1, log_format=log_format)
    instance.writer.write_chunk(written)
    instance.flush(2)
    delivered: list[Chunk] = []
    for number in range(2, 100):  # one chunk, a barrier between, and a crash: again and again
        instance = Instance.open(reopen(), number, log_format=log_format)
        instance.reader._history_rows = 3
        item = instance.next(1)
        if not isinstance(item, ChunkItem):
            break
        assert item.chunk.num_rows <= 4
        assert item.chunk.ops.to_pylist() == [Op.UPDATE_DELETE, Op.UPDATE_INSERT] * (item.chunk.num_rows // 2)
        delivered.append(item.chunk)
        instance.reader.truncate(item.offset)
        instance.flush(number + 1)
    assert rows_of(delivered) == rows_of(written)
    with pytest.raises(ChunkError):
        Chunk.build(rows.slice(0, 1), [Op.UPDATE_DELETE], KEY)


def test_18_a_log_without_epochs_has_no_history(reopen: Reopen, log_format: int) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format)
    assert instance.next() is None
    with pytest.raises(WrongCall):
        instance.reader.start_from()


def test_25_26_barriers_that_a_sink_passes_over_are_truncated_with_what_comes_after(reopen: Reopen) -> None:
    instance = Instance.open(reopen(), 1)
    for number in (1, 2):
        instance.writer.write_chunk(numbered_chunk(100 * number, 10))
        instance.flush(number + 1)
    instance.until_barrier()
    instance.reader.truncate(instance.next_chunk().offset)
    instance.flush(4)
    assert instance.factory.consumers.of("orders")[0].delivered() == epoch(1)
    again = Instance.open(reopen(), 4)
    chunks, barrier = again.until_barrier()
    assert (chunks, barrier.epoch) == ([], epoch(2)), "barrier 1 and the chunk are done, barrier 2 is not"


# -- moved vnodes, pauses, threads ----------------------------------------------------------------------------------


def test_m2_history_after_a_move_waits_for_the_seal_of_the_epoch_that_ended(reopen: Reopen, log_format: int) -> None:
    factory, (even, odd) = two(reopen(), 1, log_format)
    for instance, vnodes in ((even, EVEN), (odd, ODD)):
        instance.writer.write_chunk(numbered_chunk(0, 60).filter_vnodes(vnodes))
    even.flush(2, seal=False, new_vnode_bitmap=FULL)
    even.reader.init(1)
    even.reader.start_from()
    assert even.next(0.01) is None
    odd.flush(2, seal=False, is_stop=True)
    assert even.next(0.01) is None
    factory.sealer.seal(epoch(1))
    chunks, _ = even.until_barrier()
    assert rows_of(chunks) == rows_of(numbered_chunk(0, 60))


def test_m3_vnodes_that_move_while_a_spilled_chunk_is_read_do_not_disturb_it(
    reopen: Reopen, log_format: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    factory, (even, odd) = two(reopen(), 1, log_format)
    mine = numbered_chunk(0, 60).filter_vnodes(ODD)
    odd.writer.write_chunk(mine)
    original = LogStoreState.read_spilled

    def moving(self: LogStoreState, *arguments: Any) -> Chunk:
        odd.flush(2, seal=False, new_vnode_bitmap=EVEN)
        even.flush(2, seal=False, new_vnode_bitmap=ODD)
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LogStoreState, "read_spilled", moving)
        assert rows_of(odd.next_chunk().chunk) == rows_of(mine)
    factory.sealer.seal(epoch(1))
    for instance in (even, odd):
        instance.reader.init(1)
        instance.reader.start_from()
    assert rows_of(even.until_barrier()[0]) == rows_of(mine)
    assert odd.until_barrier()[0] == []


def test_a_resume_while_a_reader_waits_in_history_keeps_the_order(reopen: Reopen) -> None:
    instance = Instance.open(reopen(), 1)
    instance.writer.write_chunk(numbered_chunk(0, 10))
    instance.flush(2)
    again = Instance.open(reopen(), 2)
    again.writer.write_chunk(numbered_chunk(100, 10))
    again.writer.pause()
    resume = threading.Timer(0.05, again.writer.resume)
    resume.start()
    item = again.next(5)
    resume.join()
    assert item is not None
    assert item.epoch == epoch(1), "history comes first"


@pytest.mark.parametrize("max_rows", [0, 300])
@pytest.mark.parametrize("background", [False, True])
def test_a_writer_and_a_reader_in_two_threads_at_full_speed(
    reopen: Reopen, log_format: int, max_rows: int, background: bool
) -> None:
    factory = KvLogStoreFactory(reopen(), stage_bytes=20_000)
    instance = Instance.open(None, 1, log_format=log_format, factory=factory, max_rows=max_rows)  # type: ignore[arg-type]
    rng = random.Random(3)
    epochs = 25
    failures: list[BaseException] = []

    def write() -> None:
        try:
            first = 0
            for number in range(1, epochs + 1):
                for _ in range(rng.randrange(4)):
                    rows = rng.randrange(1, 120)
                    instance.writer.write_chunk(numbered_chunk(first, rows))
                    first += rows
                if number % 5 == 2:
                    instance.writer.pause()
                    instance.writer.resume()
                instance.flush(number + 1, seal=False)
                seal = factory.sealer.seal_in_background if background else factory.sealer.seal
                seal(epoch(number))
            factory.sealer.wait()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    found: list[int] = []
    barriers = 0
    try:
        while barriers < epochs:
            item = instance.reader.next_item(20.0)
            assert item is not None, failures
            if isinstance(item, ChunkItem):
                found += item.chunk.rows.column("id").to_pylist()
            else:
                barriers += 1
            if rng.random() < 0.4:
                instance.reader.truncate(item.offset)
            elif rng.random() < 0.02:
                break
    finally:
        thread.join(30)
    factory.close()
    assert not failures
    assert found == list(range(len(found)))


# -- consumers of other processes -----------------------------------------------------------------------------------


def test_a_consumer_that_cannot_be_looked_at_holds_the_log(
    reopen: Reopen, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = reopen()
    instance = Instance.open(store, 1)
    instance.writer.write_chunk(numbered_chunk(0, 10))
    instance.flush(2)
    with LogConsumer.open(location, "orders", "mirror"):
        pass
    instance.reader.truncate(instance.until_barrier()[1].offset)

    def unreachable(*place: str) -> None:
        raise StoreUnavailable("For a moment.")

    with monkeypatch.context() as patch:
        patch.setattr("headwater.log_store.remote_consumers.open_beside_reader", unreachable)
        instance.flush(3)
        instance.flush(4)
    assert ids_of(store, 3) == list(range(10))


def test_a_consumer_that_is_refused_leaves_no_trace(reopen: Reopen, location: str) -> None:
    instance = Instance.open(reopen(), 1)
    for number in (1, 2, 3):
        instance.flush(number + 1)
        instance.reader.truncate(instance.until_barrier()[1].offset)
    for start, error in ((Epoch(0), EpochGone), (epoch(9), InvalidOffset)):
        with pytest.raises(error):
            LogConsumer.open(location, "orders", "late", start=start)
    assert stores_beside(location, "consumers", 2) == []


def test_progress_counts_only_once_it_is_durable(reopen: Reopen, location: str) -> None:
    instance = Instance.open(reopen(), 1)
    instance.writer.write_chunk(numbered_chunk(0, 10))
    instance.flush(2)
    with LogConsumer.open(location, "orders", "mirror") as mirror:
        failpoints.arm("log_store.consumer_before_commit=raise")
        try:
            with pytest.raises(failpoints.FailpointError):
                mirror.commit(epoch(1))
        finally:
            failpoints.arm("")
        assert mirror.delivered() == 0
        after, upto = mirror.wait(1)
        assert sum(batch.num_rows for batch in mirror.read(after, upto)) == 10
        mirror.commit(upto)


def test_a_consumer_that_comes_between_the_look_and_the_seal_gets_all_that_it_was_promised(
    reopen: Reopen, location: str
) -> None:
    instance = Instance.open(reopen(), 1)
    for number in (1, 2, 3):
        instance.writer.write_chunk(numbered_chunk(100 * number, 10))
        instance.flush(number + 1)
        instance.reader.truncate(instance.until_barrier()[1].offset)
    instance.flush(5, seal=False)
    sealer = instance.factory.sealer
    sealer.seal(epoch(4))  # epochs 1 and 2 are gone, 3 is announced
    instance.flush(6, seal=False)
    batch = WriteBatch()
    instance.factory.truncation.add_to(batch)  # the writer looks for consumers here
    LogConsumer.open(location, "orders", "mirror").close()
    sealer.parts.clear()
    sealer.batch.extend(batch)
    sealer.seal(epoch(5))
    with LogConsumer.open(location, "orders", "mirror") as mirror:
        assert mirror.wait(1) == (epoch(3), epoch(5))
        assert list(mirror.read(epoch(3), epoch(5))) == []


def test_a_consumer_sent_back_before_its_start_keeps_what_it_has_not_read(reopen: Reopen) -> None:
    store = open_writer(f"memory://{uuid.uuid4()}")
    instance = Instance.open(store, 1)
    for number in (1, 2, 3):
        instance.writer.write_chunk(numbered_chunk(100 * number, 300))
        instance.flush(number + 1)
    late = instance.factory.consumers.register(instance.log, "late", epoch(3))
    instance.factory.consumers.rewind(instance.log, "late", epoch(1))
    late.progress.apply_per_vnode(epoch(2), dict.fromkeys(range(256), 0))  # the first rows of epoch 2
    assert late.delivered() == epoch(1)
    store.close()


def test_a_live_reader_is_not_sent_back_or_dropped_behind_its_back(reopen: Reopen) -> None:
    store = reopen()
    factory, pair = two(store, 1, 2)
    for number in (1, 2):
        for instance, own in zip(pair, (EVEN, ODD), strict=True):
            instance.writer.write_chunk(numbered_chunk(100 * number, 20).filter_vnodes(own))
            instance.flush(number + 1, seal=False)
        factory.sealer.seal(epoch(number))
    book, log = factory.consumers, pair[0].log
    with pytest.raises(WrongCall, match="'sink' of log 'orders' is read by 2 live readers"):
        book.rewind(log, "sink", Epoch(0))
    with pytest.raises(WrongCall, match="stops them first"):
        book.drop(factory.sealer.batch, "orders", "sink")
    pair[0].reader.truncate(pair[0].until_barrier()[1].offset)
    pair[0].flush(4, seal=False, is_stop=True)
    with pytest.raises(WrongCall, match="1 live reader of"):
        book.rewind(log, "sink", Epoch(0))
    pair[1].flush(4, is_stop=True)
    assert book.of("orders")[0].progress.bitmap() == EVEN
    book.rewind(log, "sink", Epoch(0))
    again = Instance.open(store, 5, factory=factory)
    for number in (1, 2):
        assert rows_of(again.until_barrier()[0]) == rows_of(numbered_chunk(100 * number, 20))
    with pytest.raises(WrongCall, match="1 live reader of"):
        book.rewind(log, "sink", epoch(1))


def test_many_consumers_do_not_take_up_the_addresses_of_the_writer(
    reopen: Reopen, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.log_store.remote_consumers._stores_kept_open", lambda location: 2)
    instance = Instance.open(reopen(), 1)
    instance.flush(2)
    for name in ("a", "b", "c", "d", "e"):
        LogConsumer.open(location, "orders", name).close()
    for _ in range(2):
        assert [consumer.name for consumer in instance.factory.remote.all()] == ["a", "b", "c", "d", "e"]
        assert sum(known.reader is not None for known in instance.factory.remote._known.values()) == 2
    instance.factory.close()

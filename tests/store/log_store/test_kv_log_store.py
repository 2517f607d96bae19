"""The scenarios of the log store's catalogue, by their numbers, over both formats and several buffer sizes."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.log_store.errors import (
    DrainTimeout,
    EpochGone,
    ForeignSchema,
    ForeignVnode,
    InvalidOffset,
    LogClosed,
    LogCorrupt,
    LogNotFound,
    RetentionMiss,
    UnknownVersion,
    WrongCall,
)
from headwater.log_store.factory import KvLogStoreFactory
from headwater.log_store.item import BarrierItem, ChunkItem
from headwater.log_store.log_view import LogView
from headwater.log_store.testing import KEY, SCHEMA, Instance, epoch, random_chunk, rows_of
from headwater.state import StateStore, open_writer
from headwater.stream import Chunk, Epoch, EpochPair, VnodeBitmap

EVEN = VnodeBitmap.of(range(0, 256, 2), 256)
ODD = ~EVEN


@pytest.fixture(params=["memory", "embedded"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], StateStore]]:
    """Opens the store; each further call is a crash: the writer before is fenced, what it had not sealed is gone."""
    location = f"memory://{uuid.uuid4()}" if request.param == "memory" else str(tmp_path / "store")
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


Reopen = Callable[[], StateStore]


@pytest.mark.parametrize("max_rows", [0, 5, 15, 100])
def test_1_what_is_written_is_read_in_order_buffered_or_spilled(
    reopen: Reopen, log_format: int, max_rows: int, rng: random.Random
) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format, max_rows=max_rows)
    first, second = random_chunk(rng), random_chunk(rng)
    instance.writer.write_chunk(first)
    instance.flush(2, checkpoint=False)
    instance.writer.write_chunk(second)
    instance.flush(3)
    assert rows_of(instance.next_chunk().chunk) == rows_of(first)
    barrier = instance.next_barrier()
    assert (barrier.epoch, barrier.is_checkpoint) == (epoch(1), False)
    assert rows_of(instance.next_chunk().chunk) == rows_of(second)
    barrier = instance.next_barrier()
    assert (barrier.epoch, barrier.is_checkpoint) == (epoch(2), True)
    assert instance.next() is None


@pytest.mark.parametrize("max_rows", [0, 15, 100])
def test_2_a_truncation_after_the_seal_is_not_durable(
    reopen: Reopen, log_format: int, max_rows: int, rng: random.Random
) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format, max_rows=max_rows)
    first, second = random_chunk(rng), random_chunk(rng)
    instance.writer.write_chunk(first)
    instance.flush(2, checkpoint=False)
    instance.writer.write_chunk(second)
    instance.flush(3)
    instance.until_barrier()
    _, barrier = instance.until_barrier()
    instance.reader.truncate(barrier.offset)
    again = Instance.open(reopen(), 3, log_format=log_format)
    for expected, number in ((first, 1), (second, 2)):
        chunks, barrier = again.until_barrier()
        assert rows_of(chunks) == rows_of(expected)
        assert barrier.epoch == epoch(number)
    assert again.next() is None


@pytest.mark.parametrize("max_rows", [2, 15, 100])
def test_3_a_truncated_chunk_is_gone_after_a_crash_and_the_rest_is_there(
    reopen: Reopen, log_format: int, max_rows: int, rng: random.Random
) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format, max_rows=max_rows)
    one, two, three = (random_chunk(rng) for _ in range(3))
    instance.writer.write_chunk(one)
    instance.writer.write_chunk(two)
    instance.flush(2)
    instance.writer.write_chunk(three)
    delivered = instance.next_chunk()
    instance.reader.truncate(delivered.offset)
    instance.flush(3)
    again = Instance.open(reopen(), 3, log_format=log_format)
    chunks, barrier = again.until_barrier()
    assert rows_of([delivered.chunk, *chunks]) == rows_of([one, two])
    assert barrier.epoch == epoch(1)
    chunks, barrier = again.until_barrier()
    assert rows_of(chunks) == rows_of(three)
    live = random_chunk(rng)
    again.writer.write_chunk(live)
    assert rows_of(again.next_chunk().chunk) == rows_of(live)


def test_4_m1_an_instance_truncates_for_its_own_vnodes_only(
    reopen: Reopen, log_format: int, rng: random.Random
) -> None:
    factory = KvLogStoreFactory(reopen())
    pair = [Instance.open(None, 1, log_format=log_format, vnodes=own, factory=factory) for own in (EVEN, ODD)]  # type: ignore[arg-type]
    written = []
    for number in (1, 2):
        chunks = [random_chunk(rng, 30, vnodes=own) for own in (EVEN, ODD)]
        for instance, chunk in zip(pair, chunks, strict=True):
            instance.writer.write_chunk(chunk)
        if number == 2:  # between the barriers only the first delivers epoch 1
            _, barrier = pair[0].until_barrier()
            pair[0].reader.truncate(barrier.offset)
        for instance in pair:
            instance.flush(number + 1, seal=False)
        factory.sealer.seal(epoch(number))
        written.append(chunks)
    whole = Instance.open(reopen(), 3, log_format=log_format)
    chunks, barrier = whole.until_barrier()
    assert rows_of(chunks) == rows_of(written[0][1])
    assert barrier.epoch == epoch(1)
    chunks, barrier = whole.until_barrier()
    assert rows_of(chunks) == rows_of(written[1])
    assert whole.next() is None


def test_5_m22_a_read_that_is_given_up_loses_nothing(
    reopen: Reopen, log_format: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format, max_rows=0)
    assert instance.next(0.01) is None
    chunk = random_chunk(rng)
    instance.writer.write_chunk(chunk)
    instance.flush(2)
    with monkeypatch.context() as patch:
        patch.setattr(
            "headwater.log_store.state.LogStoreState.read_spilled",
            lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()),
        )
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                instance.next()
    assert rows_of(instance.next_chunk().chunk) == rows_of(chunk)
    assert instance.next_barrier().epoch == epoch(1)


@pytest.mark.parametrize("recovered", [False, True])
def test_6_a_rewind_hands_out_exactly_what_was_not_truncated(
    reopen: Reopen, log_format: int, recovered: bool, rng: random.Random
) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format)
    chunks = {number: random_chunk(rng, 20) for number in (1, 2, 3)}
    for number, chunk in chunks.items():
        instance.writer.write_chunk(chunk)
        instance.flush(number + 1)
    if recovered:
        instance = Instance.open(reopen(), 4, log_format=log_format)
        chunks[4] = random_chunk(rng, 20)
        instance.writer.write_chunk(chunks[4])
        instance.flush(5)
    taken: list[ChunkItem | BarrierItem] = []
    while (item := instance.next()) is not None:
        taken.append(item)
    for place in range(len(taken)):
        instance.reader.rewind()
        instance.reader.start_from()
        rest: list[ChunkItem | BarrierItem] = []
        while (item := instance.next()) is not None:
            rest.append(item)
        assert rows_of([i.chunk for i in rest if isinstance(i, ChunkItem)]) == rows_of(
            [i.chunk for i in taken[place:] if isinstance(i, ChunkItem)]
        )
        assert [i.epoch for i in rest if isinstance(i, BarrierItem)] == [
            i.epoch for i in taken[place:] if isinstance(i, BarrierItem)
        ]
        instance.reader.truncate(rest[0].offset)
    instance.reader.rewind()
    instance.reader.start_from()
    assert instance.next() is None


def test_7_history_that_was_delivered_is_not_read_again(reopen: Reopen, log_format: int, rng: random.Random) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format)
    chunks = [random_chunk(rng) for _ in range(2)]
    for number, chunk in enumerate(chunks, 1):
        instance.writer.write_chunk(chunk)
        instance.flush(number + 1)
    instance = Instance.open(reopen(), 3, log_format=log_format)
    _, barrier = instance.until_barrier()
    instance.reader.truncate(barrier.offset)
    instance.flush(4)
    instance = Instance.open(reopen(), 4, log_format=log_format)
    found, barrier = instance.until_barrier()
    assert barrier.epoch == epoch(2)
    assert rows_of(found) == rows_of(chunks[1])


def test_8_9_m18_a_drain_waits_for_the_reader_but_not_for_ever(reopen: Reopen, rng: random.Random) -> None:
    instance = Instance.open(reopen(), 1)
    chunk = random_chunk(rng)
    instance.writer.write_chunk(chunk)
    with pytest.raises(DrainTimeout, match=r"'orders'.*0\.05 s"):
        instance.flush(2, drain_seconds=0.05)
    wider = SCHEMA.append(pa.field("more", pa.int64()))
    done = threading.Event()

    def flush() -> None:
        instance.flush(3, drain_seconds=10.0, schema_change=wider)
        done.set()

    thread = threading.Thread(target=flush)
    thread.start()
    assert rows_of(instance.next_chunk().chunk) == rows_of(chunk)
    assert instance.next_barrier().schema_change is None
    barrier = instance.next_barrier()
    assert barrier.schema_change == wider
    time.sleep(0.05)
    assert not done.is_set()
    instance.reader.truncate(barrier.offset)
    thread.join(10)
    assert done.is_set()
    with pytest.raises(ForeignSchema):
        instance.writer.write_chunk(chunk)


def test_11_m9_a_truncation_inside_the_current_epoch_is_durable_one_barrier_later(
    reopen: Reopen, log_format: int, rng: random.Random
) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format, max_rows=0)
    first, second = random_chunk(rng), random_chunk(rng)
    instance.writer.write_chunk(first)
    item = instance.next_chunk()
    instance.reader.truncate(item.offset)
    instance.writer.write_chunk(second)
    instance.flush(2)
    again = Instance.open(reopen(), 2, log_format=log_format)
    chunks, _ = again.until_barrier()
    assert rows_of(chunks) == rows_of([first, second])


def test_the_same_truncation_is_durable_with_the_next_barrier(
    reopen: Reopen, log_format: int, rng: random.Random
) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format, max_rows=0)
    first, second = random_chunk(rng), random_chunk(rng)
    instance.writer.write_chunk(first)
    instance.reader.truncate(instance.next_chunk().offset)
    instance.writer.write_chunk(second)
    instance.flush(2)
    instance.flush(3)
    again = Instance.open(reopen(), 3, log_format=log_format)
    chunks, _ = again.until_barrier()
    assert rows_of(chunks) == rows_of(second)


def test_m2_vnodes_move_to_another_instance_and_nothing_is_lost_or_hidden(
    reopen: Reopen, log_format: int, rng: random.Random
) -> None:
    factory = KvLogStoreFactory(reopen())
    even, odd = (Instance.open(None, 1, log_format=log_format, vnodes=own, factory=factory) for own in (EVEN, ODD))  # type: ignore[arg-type]
    first = {id(instance): random_chunk(rng, 30, vnodes=own) for instance, own in ((even, EVEN), (odd, ODD))}
    for instance in (even, odd):
        instance.writer.write_chunk(first[id(instance)])
    (_,) = (even.next_chunk(),)
    for instance, new in ((even, VnodeBitmap.full(256)), (odd, None)):
        options = {"new_vnode_bitmap": new} if new is not None else {"is_stop": True}
        instance.flush(2, seal=False, **options)
    factory.sealer.seal(epoch(1))
    even.reader.init(5)
    even.reader.start_from()
    chunks, barrier = even.until_barrier()
    assert barrier.epoch == epoch(1)
    assert rows_of(chunks) == rows_of(list(first.values()))
    later = random_chunk(rng, 30)
    even.writer.write_chunk(later)
    assert rows_of(even.next_chunk().chunk) == rows_of(later)
    with pytest.raises(WrongCall):
        odd.writer.write_chunk(later)


def test_m4_while_paused_barriers_go_on_and_nothing_is_written(reopen: Reopen, rng: random.Random) -> None:
    instance = Instance.open(reopen(), 1)
    instance.writer.write_chunk(random_chunk(rng))
    instance.flush(2)
    instance.writer.pause()
    for wrong in (instance.writer.pause, lambda: instance.writer.write_chunk(random_chunk(rng))):
        with pytest.raises(WrongCall):
            wrong()
    assert instance.next(0.01) is None
    instance.flush(3)
    instance.writer.resume()
    with pytest.raises(WrongCall):
        instance.writer.resume()
    assert len(instance.until_barrier()[0]) == 1
    assert instance.next_barrier().epoch == epoch(2)
    again = Instance.open(reopen(), 4)
    assert again.until_barrier()[1].epoch == epoch(1)
    assert again.next() is None, "no barrier was stored while paused"


def test_m6_m7_the_bound_is_passed_by_one_chunk_at_most_and_a_rewind_leaks_no_room(
    reopen: Reopen, rng: random.Random
) -> None:
    instance = Instance.open(reopen(), 1, max_rows=25)
    buffer = instance.reader._buffer
    for _ in range(6):
        instance.writer.write_chunk(random_chunk(rng, 10))
    assert buffer.statistics().rows == 30
    assert buffer.statistics().spilled_rows == 30
    instance.flush(2)
    while instance.next() is not None:
        pass
    assert buffer.statistics().rows == 30, "consumed but not truncated still counts"
    instance.reader.rewind()
    instance.reader.start_from(epoch(1))
    assert buffer.statistics().rows == 0
    instance.writer.write_chunk(random_chunk(rng, 10))
    assert buffer.statistics().rows == 10
    assert instance.next_chunk().epoch == epoch(2)


def test_m8_references_to_small_spilled_chunks_are_joined_inside_an_epoch(
    reopen: Reopen, log_format: int, rng: random.Random
) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format, max_rows=0)
    chunks = [random_chunk(rng, 10) for _ in range(4)]
    instance.writer.write_chunk(chunks[0])
    assert rows_of(instance.next_chunk().chunk) == rows_of(chunks[0]), "a reference that was taken is not extended"
    instance.writer.write_chunk(chunks[1])
    instance.writer.write_chunk(chunks[2])
    instance.flush(2)
    instance.writer.write_chunk(chunks[3])
    assert rows_of(instance.next_chunk().chunk) == rows_of(chunks[1:3])
    assert instance.next_barrier().epoch == epoch(1)
    assert rows_of(instance.next_chunk().chunk) == rows_of(chunks[3])


def test_m14_43_empty_chunks_and_empty_epochs_pass(reopen: Reopen, log_format: int) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format)
    instance.writer.write_chunk(Chunk.empty(SCHEMA))
    instance.flush(2)
    instance.flush(3)
    for number in (1, 2):
        assert instance.next_barrier().epoch == epoch(number)
    again = Instance.open(reopen(), 3, log_format=log_format)
    for number in (1, 2):
        assert again.next_barrier().epoch == epoch(number)


@pytest.mark.parametrize("vnode_count", [1, 7, 1024])
def test_m19_other_vnode_counts(reopen: Reopen, log_format: int, vnode_count: int, rng: random.Random) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format, vnode_count=vnode_count)
    chunk = random_chunk(rng, 50, vnode_count)
    instance.writer.write_chunk(chunk)
    instance.flush(2)
    again = Instance.open(reopen(), 2, log_format=log_format, vnode_count=vnode_count)
    chunks, barrier = again.until_barrier()
    assert rows_of(chunks) == rows_of(chunk)
    again.reader.truncate(barrier.offset)
    again.flush(3)
    again.flush(4)
    with again.factory._store.snapshot() as view:
        assert LogView.open(view, "orders").bounds().gone == epoch(1)


def test_45_which_barriers_force_a_commit() -> None:
    def forces(checkpoint: bool, **options: object) -> bool:
        return BarrierItem(epoch(1), checkpoint, **options).forces_commit  # type: ignore[arg-type]

    assert not forces(True)
    assert forces(True, is_stop=True)
    assert forces(True, new_vnode_bitmap=EVEN)
    assert forces(True, schema_change=SCHEMA)
    assert not forces(False, is_stop=True, new_vnode_bitmap=EVEN, schema_change=SCHEMA)


def test_a_log_forgets_what_all_its_consumers_have_delivered(
    reopen: Reopen, log_format: int, rng: random.Random
) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format)
    slow = instance.factory.consumers.register(instance.log, "slow")
    for number in range(1, 6):
        instance.writer.write_chunk(random_chunk(rng))
        instance.flush(number + 1)
        instance.reader.truncate(instance.until_barrier()[1].offset)
    instance.flush(7)
    store = instance.factory._store

    def held() -> list[Epoch]:
        with store.snapshot() as view:
            return [end.epoch for end in LogView.open(view, "orders").epochs()]

    assert len(held()) == 6
    assert slow.delivered() == 0
    instance.factory.consumers.rewind(instance.log, "slow", epoch(4))
    instance.flush(8)
    assert held()[0] == epoch(1), "announced, and deleted by a later seal"
    instance.flush(9)
    assert held()[0] == epoch(5)
    instance.factory.consumers.drop(instance.factory.sealer.batch, "orders", "slow")
    instance.flush(10)
    assert held()[0] == epoch(5)
    instance.flush(11)
    assert held()[0] == epoch(6)
    with pytest.raises(EpochGone) as caught:
        instance.factory.consumers.register(instance.log, "late", epoch(2))
    assert caught.value.oldest == epoch(5)
    consumers, batch = instance.factory.consumers, instance.factory.sealer.batch
    consumers.register(instance.log, "other")
    with pytest.raises(EpochGone):
        consumers.rewind(instance.log, "other", epoch(2))
    with pytest.raises(LogNotFound):
        consumers.drop(batch, "orders", "slow")
    with pytest.raises(LogNotFound):
        consumers.rewind(instance.log, "slow", epoch(7))


def test_retention_never_drops_silently(reopen: Reopen, rng: random.Random) -> None:
    instance = Instance.open(reopen(), 1)
    for number in (1, 2, 3):
        instance.writer.write_chunk(random_chunk(rng))
        instance.flush(number + 1)
    instance.factory.consumers.drop_epochs(instance.factory.sealer.batch, instance.log, epoch(2))
    instance.flush(5)
    with pytest.raises(RetentionMiss, match="unread by consumer 'sink'") as caught:
        Instance.open(reopen(), 5)
    assert caught.value.oldest == epoch(2)


def test_a_range_is_read_from_any_snapshot_and_always_alike(
    reopen: Reopen, log_format: int, rng: random.Random
) -> None:
    instance = Instance.open(reopen(), 1, log_format=log_format)
    written: dict[int, Chunk] = {}
    for number in range(1, 5):
        written[number] = random_chunk(rng, 200)
        instance.writer.write_chunk(written[number])
        instance.flush(number + 1, checkpoint=number % 2 == 0)
    store = instance.factory._store
    quarter = VnodeBitmap.from_ranges([range(64, 128)], 256)
    for take in (store.snapshot, store.mapped_snapshot):
        with take() as view:
            log = LogView.open(view, "orders")
            for wanted in (None, quarter, EVEN):
                runs = [list(log.read_range(epoch(1), epoch(3), wanted)) for _ in range(2)]
                assert [a.equals(b) for a, b in zip(*runs, strict=True)] == [True] * len(runs[0])
                assert all(batch.schema == log.schema() for batch in runs[0])
                found = [row for batch in runs[0] for row in batch.to_pylist()]
                expected = [
                    (int(epoch(number)), seq, vnode)
                    for number in (2, 3)
                    for seq, vnode in enumerate(written[number].vnodes.to_pylist())
                    if wanted is None or vnode in wanted
                ]
                assert sorted((row["_epoch"], row["_seq"], row["_vnode"]) for row in found) == expected
                last: dict[int, tuple[int, int]] = {}
                for row in found:
                    place = (row["_epoch"], row["_seq"])
                    assert place > last.get(row["_vnode"], (0, -1)), "in order inside a vnode"
                    last[row["_vnode"]] = place
            with pytest.raises(InvalidOffset):
                list(log.read_range(epoch(1), epoch(9)))


def test_bad_input_is_refused_and_nothing_is_half_written(reopen: Reopen, log_format: int, rng: random.Random) -> None:
    store = reopen()
    instance = Instance.open(store, 5, log_format=log_format, vnodes=EVEN)
    other = Chunk.inserts(random_chunk(rng).rows.rename_columns(["id", "other"]), KEY)
    refusals: tuple[tuple[Callable[[], object], type[Exception]], ...] = (
        (lambda: instance.writer.write_chunk(other), ForeignSchema),
        (lambda: instance.writer.write_chunk(random_chunk(rng, 50)), ForeignVnode),
        (lambda: instance.flush(5), InvalidOffset),
        (lambda: instance.flush(4), InvalidOffset),
        (lambda: instance.writer.init(EpochPair(epoch(9), epoch(8))), WrongCall),
        (instance.reader.start_from, WrongCall),
        (lambda: instance.reader.truncate(BarrierItem(epoch(5), True).offset), InvalidOffset),
        (lambda: instance.factory.log("x", SCHEMA, KEY, 3), UnknownVersion),
        (lambda: instance.factory.log("orders", other.schema, KEY), ForeignSchema),
        (lambda: instance.factory.existing("nothing"), LogNotFound),
        (lambda: instance.writer._store_state.own(VnodeBitmap.full(8)), ForeignVnode),
    )
    for refuse, error in refusals:
        with pytest.raises(error):
            refuse()
    mine = random_chunk(rng, 40, vnodes=EVEN)
    instance.writer.write_chunk(mine)
    instance.flush(6)
    assert rows_of(instance.until_barrier()[0]) == rows_of(mine)
    factory = KvLogStoreFactory(reopen())
    late = factory.writer(factory.existing("orders"))
    with pytest.raises(InvalidOffset, match="sealed"):
        late.init(EpochPair(epoch(5), epoch(4)))


def test_damaged_records_are_called_corrupt(reopen: Reopen, log_format: int, rng: random.Random) -> None:
    from headwater.log_store import layout
    from headwater.state import WriteBatch

    instance = Instance.open(reopen(), 1, log_format=log_format)
    instance.writer.write_chunk(random_chunk(rng))
    instance.flush(2)
    store = instance.factory._store
    with store.snapshot() as view:
        cells = list(view.scan_prefix(layout.prefix(instance.log.number)))
    number = 10
    for key, value in (cells[0], cells[-1]):
        for damaged in (value[: len(value) // 2], b"", b"\x07" + value[1:]):
            batch = WriteBatch()
            batch.put(key, damaged)
            store.seal(epoch(number), batch)
            number += 1
            with store.snapshot() as view, pytest.raises((LogCorrupt, UnknownVersion)):
                list(LogView.open(view, "orders").read_range(Epoch(0), epoch(1)))
        batch = WriteBatch()
        batch.put(key, value)
        store.seal(epoch(number), batch)
        number += 1


def test_a_stopped_writer_lets_its_reader_end(reopen: Reopen, rng: random.Random) -> None:
    instance = Instance.open(reopen(), 1)
    instance.writer.write_chunk(random_chunk(rng))
    instance.flush(2, is_stop=True)
    _, barrier = instance.until_barrier()
    assert barrier.is_stop
    with pytest.raises(LogClosed):
        instance.next()


def test_an_epoch_larger_than_memory_is_staged_and_a_dead_writers_part_of_one_disappears(
    reopen: Reopen, log_format: int, rng: random.Random
) -> None:
    def large(store: StateStore, at: int) -> tuple[KvLogStoreFactory, list[Chunk]]:
        factory = KvLogStoreFactory(store, stage_bytes=2000)
        writer = factory.writer(factory.log("orders", SCHEMA, KEY, log_format))
        writer.init(EpochPair(epoch(at), epoch(at - 1)))
        chunks = [random_chunk(rng, 50) for _ in range(10)]
        for chunk in chunks:
            writer.write_chunk(chunk)
            assert factory.sealer.pending_bytes < 20_000
        if at == 1:
            return factory, chunks
        writer.flush_current_epoch(epoch(at + 1)).finish()
        factory.sealer.seal(epoch(at))
        return factory, chunks

    large(reopen(), 1)  # dies before its barrier
    factory, chunks = large(reopen(), 2)
    with factory._store.snapshot() as view:
        log = LogView.open(view, "orders")
        assert [end.epoch for end in log.epochs()] == [epoch(2)]
        ids = [number for batch in log.read_range(Epoch(0), epoch(2)) for number in batch.column("id").to_pylist()]
    assert sorted(ids) == sorted(number for chunk in chunks for number in chunk.rows.column("id").to_pylist())

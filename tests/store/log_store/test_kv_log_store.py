"""The scenarios of the log store's catalogue, by their numbers, over both formats: what a writer and readers do."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.logs import KEY, SCHEMA, LogConsumer, epoch, filtered, numbered_chunk, random_chunk, rows_of
from tests.store.log_store.tools import Table, flat

from headwater import failpoints
from headwater.log_store import KvLogStoreFactory, LogView
from headwater.log_store.consumers import SINGLE_FOLDER
from headwater.log_store.errors import (
    EpochGone,
    ForeignSchema,
    InvalidOffset,
    LogCorrupt,
    LogNotFound,
    RetentionMiss,
    UnknownVersion,
    WrongCall,
)
from headwater.log_store.serde import BARRIERS, CHUNKS, ROWS, prefix
from headwater.state import WriteBatch, stores_beside
from headwater.state.errors import StoreFull, StoreUnavailable
from headwater.state.query_store import QUERIES
from headwater.stream import Chunk, Epoch, EpochPair, Op, VnodeBitmap
from headwater.stream.errors import ChunkError

EVEN = VnodeBitmap.of(range(0, 256, 2), 256)
Open = Callable[..., Table]


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def log_format(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=["memory", "embedded"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, log_format: int) -> Iterator[Open]:
    location = f"memory://{uuid.uuid4()}" if request.param == "memory" else str(tmp_path / "store")
    tables: list[Table] = []

    def open_table(**options: Any) -> Table:
        tables.append(Table(location, log_format, **options))
        return tables[-1]

    yield open_table
    for table in tables:
        table.close()


def delivered(table: Table, name: str = "sink") -> list[tuple[int, int, str]]:
    """What the consumer gets and has not delivered: op, id and name of each row; in order."""
    with LogConsumer.open(table.location, "orders", name) as consumer:
        return sorted(row[3:] for row in flat(consumer.read(*consumer.wait(1))))


def commit(table: Table, number: int, name: str = "sink") -> None:
    with LogConsumer.open(table.location, "orders", name) as consumer:
        consumer.wait(1)
        consumer.commit(epoch(number))


def held(table: Table) -> list[int]:
    return list(table.formats())


# -- what is written is read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_rows", [0, 5, 15, 100])
def test_1_what_is_written_is_read_in_order_buffered_or_spilled(opened: Open, max_rows: int) -> None:
    table = opened(max_rows=max_rows)
    chunks = [random_chunk(table.rng) for _ in range(4)]
    table.write(*chunks[:2])
    table.write(*chunks[2:])
    assert [row[1] for row in table.rows_in_order()] == [epoch(1)] * 20 + [epoch(2)] * 20
    assert delivered(table) == rows_of(chunks)
    assert table.factory.buffer.statistics().rows_in == 40


def test_2_what_is_not_sealed_is_not_read_and_gone_after_a_crash(opened: Open) -> None:
    table = opened(max_rows=15)
    first, second, third = (random_chunk(table.rng) for _ in range(3))
    table.write(first)
    table.write(second, seal=False)
    assert delivered(table) == rows_of(first)
    table.open(takeover=True)
    assert table.next == 2
    table.write(third)
    assert delivered(table) == rows_of([first, third])


def test_3_7_what_was_truncated_does_not_come_again_and_the_rest_does(opened: Open) -> None:
    table = opened()
    chunks = [random_chunk(table.rng) for _ in range(3)]
    for chunk in chunks:
        table.write(chunk)
    assert delivered(table) == rows_of(chunks)
    commit(table, 2)
    table.open(takeover=True)
    assert delivered(table) == rows_of(chunks[2])
    later = random_chunk(table.rng)
    table.write(later)
    assert delivered(table) == rows_of([chunks[2], later])


def test_6_a_rewind_gives_exactly_what_came_after_the_epoch(opened: Open) -> None:
    table = opened()
    chunks = [random_chunk(table.rng) for _ in range(4)]
    table.write(chunks[0])
    with LogConsumer.open(table.location, "orders", "sink") as consumer:
        for chunk in chunks[1:]:
            table.write(chunk)
        for target in (3, 2, 1, 0):
            consumer.commit(epoch(4))
            consumer.rewind(Epoch(0) if target == 0 else epoch(target))
            rows = sorted(row[3:] for row in flat(consumer.read(*consumer.wait(1))))
            assert rows == rows_of(chunks[target:])


def test_m2_vnodes_are_delivered_side_by_side(opened: Open) -> None:
    table = opened()
    chunks = [random_chunk(table.rng, 60) for _ in range(2)]
    for chunk in chunks:
        table.write(chunk)
    with LogConsumer.open(table.location, "orders", "sink") as consumer:
        after, upto = consumer.wait(1)
        even = sorted(row[3:] for row in flat(consumer.read(after, upto, EVEN)))
        assert even == rows_of([filtered(chunk, EVEN) for chunk in chunks])
        consumer.commit(upto, EVEN)
        rest = sorted(row[3:] for row in flat(consumer.read(*consumer.wait(1))))
        assert rest == rows_of([filtered(chunk, ~EVEN) for chunk in chunks])


def test_m14_43_empty_chunks_and_empty_epochs_pass(opened: Open) -> None:
    table = opened()
    table.write(Chunk.empty(SCHEMA))
    table.seal()
    rows = random_chunk(table.rng)
    table.write(rows)
    assert held(table) == [3], "an epoch without rows needs no barrier"
    assert delivered(table) == rows_of(rows)


@pytest.mark.parametrize("vnode_count", [1, 7, 1024])
def test_m19_other_vnode_counts(opened: Open, log_format: int, vnode_count: int) -> None:
    table = opened()
    table.seal()
    writer = table.factory.writer(table.factory.log("other", SCHEMA, KEY, log_format, vnode_count))
    writer.init(EpochPair(epoch(2), epoch(1)))
    chunk = random_chunk(table.rng, 50, vnode_count)
    writer.write_chunk(chunk)
    writer.end_epoch(epoch(3))
    table.factory.sealer.seal(epoch(2))
    with LogConsumer.open(table.location, "other", "sink") as consumer:
        after, upto = consumer.wait(1)
        assert sorted(row[3:] for row in flat(consumer.read(after, upto))) == rows_of(chunk)
        consumer.commit(upto)
    for number in (3, 4):
        writer.end_epoch(epoch(number + 1))
        table.factory.sealer.seal(epoch(number))
    with table.store.snapshot() as view:
        assert LogView.open(view, "other").bounds().gone == epoch(2)


def test_a_range_is_read_from_any_snapshot_and_always_alike(opened: Open) -> None:
    table = opened()
    written = {}
    for number in range(1, 5):
        written[number] = random_chunk(table.rng, 200)
        table.write(written[number])
    quarter = VnodeBitmap.from_ranges([range(64, 128)], 256)
    for take in (table.store.snapshot, table.store.mapped_snapshot):
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
            for after, upto in ((epoch(1), epoch(9)), (epoch(4), epoch(3))):
                with pytest.raises(InvalidOffset):
                    list(log.read_range(after, upto))


def test_10_rows_of_two_schemas_are_read_with_both(opened: Open) -> None:
    wider = SCHEMA.append(pa.field("more", pa.int64()))
    table = opened()
    table.write(numbered_chunk(0, 10))
    table.writer.change_schema(wider, KEY)
    columns = [pa.array([100, 101], pa.int64()), pa.array(["x", "y"]), pa.array([7, None], pa.int64())]
    later = pa.RecordBatch.from_arrays(columns, schema=wider)
    table.write(Chunk.inserts(later, KEY))
    with LogConsumer.open(table.location, "orders", "sink") as consumer:
        batches = list(consumer.read(*consumer.wait(1)))
    assert sorted({len(batch.schema.names) for batch in batches}) == [6, 7]
    rows = pa.concat_tables([pa.Table.from_batches([batch]) for batch in batches if "more" in batch.schema.names])
    assert rows.select(wider.names).sort_by("id").to_pylist() == later.to_pylist()
    with pytest.raises(ForeignSchema):
        table.writer.write_chunk(numbered_chunk(0, 1))


def test_m5_17_m25_update_pairs_stay_whole_and_half_of_one_is_refused(opened: Open) -> None:
    table = opened(max_rows=4)
    pairs = [(op, key) for key in range(30) for op in (Op.UPDATE_DELETE, Op.UPDATE_INSERT)]
    rows = pa.RecordBatch.from_arrays([pa.array([key for _, key in pairs]), pa.array(["x"] * 60)], schema=SCHEMA)
    table.write(Chunk.build(rows, pa.array([int(op) for op, _ in pairs], pa.int8()), KEY))
    per_vnode: dict[int, list[int]] = {}
    for vnode, _, _, op, _, _ in table.rows_in_order():
        per_vnode.setdefault(vnode, []).append(op)
    assert all(ops == [Op.UPDATE_DELETE, Op.UPDATE_INSERT] * (len(ops) // 2) for ops in per_vnode.values())
    with pytest.raises(ChunkError):
        Chunk.build(rows.slice(0, 1), pa.array([int(Op.UPDATE_DELETE)], pa.int8()), KEY)


# -- the buffer and the seal ----------------------------------------------------------------------------------------


def test_m6_m7_the_buffer_of_all_logs_is_bounded_in_rows_and_in_bytes(opened: Open, log_format: int) -> None:
    table = opened(max_rows=100, max_bytes=20_000)
    other = table.factory.writer(table.factory.log("other", SCHEMA, KEY, log_format))
    other.init(EpochPair(epoch(1), Epoch(0)))
    for place in range(40):
        (table.writer, other)[place % 2].write_chunk(random_chunk(table.rng, 30))
        held = table.factory.buffer.statistics()
        assert held.rows <= 100
        assert held.bytes <= 20_000
    assert held.spills >= 13
    assert (held.rows_in, held.spilled_rows) == (1200, 1200 - held.rows)
    table.end_epoch()
    other.end_epoch(epoch(2))
    table.factory.sealer.seal_in_background(epoch(1))
    after = table.factory.buffer.statistics()
    assert (after.rows, after.bytes) == (0, 0)
    table.factory.sealer.wait()
    assert table.factory.buffer.statistics().sealing_bytes == 0
    assert len(delivered(table)) == 600
    table.factory.close()


def test_a_chunk_that_is_larger_than_the_buffer_is_held_alone(opened: Open) -> None:
    table = opened(max_rows=10)
    table.writer.write_chunk(numbered_chunk(0, 5))
    table.writer.write_chunk(numbered_chunk(100, 50))
    held = table.factory.buffer.statistics()
    assert (held.rows, held.spilled_rows, held.spills) == (50, 5, 1)
    table.write(numbered_chunk(200, 1))
    assert len(delivered(table)) == 56


def test_an_epoch_larger_than_memory_is_spilled_and_a_dead_writers_part_of_one_disappears(opened: Open) -> None:
    table = opened(max_bytes=2000)
    for _ in range(10):
        table.writer.write_chunk(random_chunk(table.rng, 50))
        assert table.factory.buffer.statistics().bytes < 20_000
    table.open(takeover=True)  # it died before its barrier
    chunks = [random_chunk(table.rng, 50) for _ in range(10)]
    table.write(*chunks)
    assert delivered(table) == rows_of(chunks)


def test_a_chunk_that_finds_no_room_on_disk_is_refused_as_a_whole(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = opened(max_bytes=500)
    table.writer.write_chunk(numbered_chunk(0, 20))

    def full(batch: object) -> None:
        raise StoreFull("No room.")

    with monkeypatch.context() as patch:
        patch.setattr(table.store, "stage", full)
        with pytest.raises(StoreFull):
            table.writer.write_chunk(numbered_chunk(100, 20))
    table.write(numbered_chunk(200, 20))
    assert delivered(table) == rows_of([numbered_chunk(0, 20), numbered_chunk(200, 20)])


def test_two_logs_of_a_store_are_sealed_as_one(opened: Open, log_format: int) -> None:
    table = opened()
    factory = table.factory
    writers = [factory.writer(factory.log(name, SCHEMA, KEY, log_format)) for name in ("a", "b")]
    for writer in writers:
        writer.init(EpochPair(epoch(1), Epoch(0)))

    def ids(name: str) -> list[int]:
        with table.store.snapshot() as view:
            shown = LogView.open(view, name)
            return sorted(row[4] for row in flat(shown.read_range(0, shown.sealed)))

    for number in (1, 2):
        for place, writer in enumerate(writers):
            writer.write_chunk(numbered_chunk(1000 * place + 10 * number, 10))
            writer.end_epoch(epoch(number + 1))
        if number == 2:
            failpoints.arm("log_store.before_seal=raise")
            try:
                with pytest.raises(failpoints.FailpointError):
                    factory.sealer.seal(epoch(2))
            finally:
                failpoints.arm("")
            assert (ids("a"), ids("b")) == (list(range(10, 20)), list(range(1010, 1020)))
        factory.sealer.seal(epoch(number))
    assert ids("a") == list(range(10, 30))
    assert ids("b") == list(range(1010, 1030))


# -- what a log forgets ---------------------------------------------------------------------------------------------


def test_a_log_forgets_what_all_its_consumers_have_delivered(opened: Open) -> None:
    table = opened()
    table.seal()
    for name in ("fast", "slow"):
        LogConsumer.open(table.location, "orders", name).close()
    for _ in range(5):
        table.write()
    commit(table, 6, "fast")
    for _ in range(2):
        table.seal()
    assert held(table) == [2, 3, 4, 5, 6]
    commit(table, 4, "slow")
    table.seal()
    assert held(table)[0] == 2, "announced, and deleted by a later seal"
    table.seal()
    assert held(table) == [5, 6]
    with pytest.raises(EpochGone) as caught:
        LogConsumer.open(table.location, "orders", "late", start=epoch(2))
    assert caught.value.oldest == epoch(4)


def test_a_snapshot_older_than_a_truncation_still_shows_what_it_saw(opened: Open) -> None:
    table = opened()
    for number in (1, 2):
        table.write(numbered_chunk(100 * number, 20))
    table.store.pin("old")
    with table.store.snapshot() as before:
        commit(table, 2)
        for _ in range(3):
            table.seal()
        for view in (before, table.store.snapshot(epoch(2))):
            with view:
                shown = LogView.open(view, "orders")
                assert shown.bounds().gone == 0
                assert sum(batch.num_rows for batch in shown.read_range(0, epoch(2))) == 40
    with table.store.snapshot() as view, pytest.raises(EpochGone) as caught:
        list(LogView.open(view, "orders").read_range(0, epoch(2)))
    assert caught.value.oldest == epoch(2)


def test_what_was_delivered_leaves_nothing_behind(opened: Open) -> None:
    table = opened()
    for number in (1, 2, 3):
        table.write(numbered_chunk(100 * number, 20))
    commit(table, 3)
    for _ in range(3):
        table.seal()
    assert [table.raw(space) for space in (ROWS, CHUNKS, BARRIERS)] == [0, 0, 0]


def test_retention_never_drops_silently(opened: Open) -> None:
    table = opened()
    for _ in range(3):
        table.write()
    commit(table, 1)
    table.factory.truncation.drop(table.factory.sealer.batch, table.log, epoch(2))
    table.seal()
    with (
        LogConsumer.open(table.location, "orders", "sink") as consumer,
        pytest.raises(RetentionMiss, match="unread by consumer 'sink'") as caught,
    ):
        consumer.wait(1)
    assert caught.value.oldest == epoch(2)


# -- consumers that come, go back, and cannot be read ---------------------------------------------------------------


def test_a_consumer_that_cannot_be_read_holds_the_log(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    table = opened()
    table.write(numbered_chunk(0, 10))
    LogConsumer.open(table.location, "orders", "mirror").close()
    assert [one.name for one in table.factory.consumers.all()] == ["mirror"]
    commit(table, 1, "mirror")

    def unreachable(*place: object) -> Any:
        raise StoreUnavailable("For a moment.")

    with monkeypatch.context() as patch:
        patch.setattr("headwater.log_store.consumers.Consumers._rows", unreachable)
        assert [(one.name, one.unreadable) for one in table.factory.consumers.all()] == [("mirror", True)]
        for _ in range(2):
            table.seal()
        fresh = KvLogStoreFactory(table.store)
        with pytest.raises(StoreUnavailable):  # never read: it is not known which logs it needs
            fresh.consumers.all()
    assert held(table) == [1]
    for _ in range(2):
        table.seal()
    assert held(table) == []


def test_a_consumer_that_is_refused_leaves_no_trace(opened: Open) -> None:
    table = opened()
    for _ in range(3):
        table.write()
    table.factory.truncation.forget_unneeded("orders", epoch(2))
    for _ in range(2):
        table.seal()
    for start, error in ((Epoch(0), EpochGone), (epoch(9), InvalidOffset)):
        with pytest.raises(error):
            LogConsumer.open(table.location, "orders", "late", start=start)
    with pytest.raises(LogNotFound, match="orders"):
        LogConsumer.open(table.location, "nothing", "late")
    assert stores_beside(table.location, QUERIES, 1) == stores_beside(table.location, SINGLE_FOLDER, 2) == []


def test_progress_counts_only_once_it_is_durable(opened: Open) -> None:
    table = opened()
    table.write(numbered_chunk(0, 10))
    with LogConsumer.open(table.location, "orders", "mirror") as mirror:
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


def test_a_consumer_that_comes_between_the_look_and_the_seal_gets_all_that_it_was_promised(opened: Open) -> None:
    table = opened()
    for number in (1, 2, 3):
        table.write(numbered_chunk(100 * number, 10))
    truncation, sealer = table.factory.truncation, table.factory.sealer
    truncation.forget_unneeded("orders", epoch(2))
    table.seal()
    table.seal()  # epochs 1 and 2 are gone
    truncation.forget_unneeded("orders", epoch(3))
    table.seal()  # 3 is announced
    batch = WriteBatch()
    truncation.add_to(batch)  # the writer looks for consumers here
    LogConsumer.open(table.location, "orders", "mirror").close()
    sealer.parts.clear()
    sealer.batch.extend(batch)
    table.seal()
    with LogConsumer.open(table.location, "orders", "mirror") as mirror:
        after, upto = mirror.wait(1)
        assert (after, upto) == (epoch(3), epoch(table.next - 1))
        assert list(mirror.read(after, upto)) == []


# -- what is refused ------------------------------------------------------------------------------------------------


def test_m13_too_many_rows_for_an_epoch_are_refused_as_a_whole(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    table = opened()
    table.writer.write_chunk(numbered_chunk(0, 5))
    with monkeypatch.context() as patch:
        patch.setattr("headwater.log_store.state.MAX_SEQ", 10)
        with pytest.raises(WrongCall, match="more than"):
            table.writer.write_chunk(numbered_chunk(10, 10))
    table.write(numbered_chunk(100, 5))
    assert delivered(table) == rows_of([numbered_chunk(0, 5), numbered_chunk(100, 5)])


def test_bad_input_is_refused_and_nothing_is_half_written(opened: Open) -> None:
    table = opened()
    other = Chunk.inserts(random_chunk(table.rng).rows.rename_columns(["id", "other"]), KEY)
    fresh = KvLogStoreFactory(table.store)
    refusals: tuple[tuple[Callable[[], object], type[Exception]], ...] = (
        (lambda: table.writer.write_chunk(other), ForeignSchema),
        (lambda: table.writer.end_epoch(epoch(1)), InvalidOffset),
        (lambda: table.writer.init(EpochPair(epoch(9), epoch(8))), WrongCall),
        (lambda: table.factory.log("x", SCHEMA, KEY, 3), UnknownVersion),
        (lambda: table.factory.log("orders", other.schema, KEY), ForeignSchema),
        (lambda: table.factory.existing("nothing"), LogNotFound),
        (lambda: fresh.writer(fresh.log("orders", SCHEMA, KEY)).write_chunk(other), WrongCall),
        (lambda: fresh.writer(fresh.log("orders", SCHEMA, KEY)).end_epoch(epoch(3)), WrongCall),
    )
    for refuse, error in refusals:
        with pytest.raises(error):
            refuse()
    mine = random_chunk(table.rng, 40)
    table.write(mine)
    assert delivered(table) == rows_of(mine)
    late = KvLogStoreFactory(table.store)
    with pytest.raises(InvalidOffset, match="sealed"):
        late.writer(late.existing("orders")).init(EpochPair(epoch(1), Epoch(0)))


def test_damaged_records_are_called_corrupt(opened: Open) -> None:
    table = opened()
    table.write()
    with table.store.snapshot() as view:
        cells = list(view.scan_prefix(prefix(table.log.number)))
    number = 10
    for key, value in (cells[0], cells[-1]):
        for damaged in (value[: len(value) // 2], b"", b"\x07" + value[1:], value):
            batch = WriteBatch()
            batch.put(key, damaged)
            table.store.seal(epoch(number), batch)
            number += 1
            if damaged != value:
                with table.store.snapshot() as view, pytest.raises((LogCorrupt, UnknownVersion)):
                    list(LogView.open(view, "orders").read_range(Epoch(0), epoch(1)))

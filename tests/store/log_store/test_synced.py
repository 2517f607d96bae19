"""The synced log store: scenarios 27 to 31, M23 and M24 by their numbers, and what exactly once means in it."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.store.log_store.synced_tools import Run, by_vnode, committed, log_keys, rows_in_order
from tests.store.log_store.tools import chunk as chunk_of

from headwater.log_store import ForeignSchema, ForeignVnode, InvalidOffset, KvLogStoreFactory, WrongCall
from headwater.log_store.metrics import Metric
from headwater.log_store.synced import SyncedLogStore, SyncedMessage
from headwater.log_store.synced_dispatch import SyncedLogDispatch
from headwater.log_store.synced_metrics import synced_metrics
from headwater.log_store.testing import KEY, SCHEMA, epoch, numbered_chunk, random_chunk, rows_of
from headwater.log_store.watermarks import Watermark
from headwater.state import StateStore, open_writer
from headwater.state.errors import StoreFull, StoreUnavailable
from headwater.stream import (
    Barrier,
    BarrierKind,
    Chunk,
    EpochPair,
    MessageOrderError,
    Op,
    Pause,
    Resume,
    SchemaChange,
    Stop,
    UpdateVnodeBitmap,
    VnodeBitmap,
)

HALVES = VnodeBitmap.full(256).split(2)
Reopen = Callable[[], StateStore]


@pytest.fixture(params=["memory", "embedded"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
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


def watermark(value: int, column: str = "id") -> Watermark:
    return Watermark(column, pa.scalar(value, pa.int64()))


def kinds(items: list[SyncedMessage]) -> list[str]:
    """What came, as words: a chunk by its lowest id and its rows, a watermark by its value, a barrier by its epoch."""
    words = []
    for item in items:
        if isinstance(item, Chunk):
            words.append(f"rows {min(item.rows.column('id').to_pylist())}+{item.num_rows}")
        elif isinstance(item, Watermark):
            words.append(f"watermark {item.value.as_py()}")
        else:
            words.append(f"barrier {item.closes.ms}")
    return words


def joined(items: list[SyncedMessage]) -> list[SyncedMessage]:
    """Neighbouring chunks as one: where they are parted is up to the format."""
    found: list[SyncedMessage] = []
    for item in items:
        if isinstance(item, Chunk) and found and isinstance(found[-1], Chunk):
            found[-1] = Chunk.concat([found[-1], item])
        else:
            found.append(item)
    return found


# -- the scenarios ---------------------------------------------------------------------------------------------------


def test_27_what_is_polled_as_it_comes_keeps_its_order_and_nothing_is_written(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format)
    sent: list[Chunk | Watermark] = [numbered_chunk(0, 10), watermark(5), numbered_chunk(10, 10)]
    for message in sent:
        run.synced.push(message)
    assert [run.poll() for _ in sent] == sent
    run.barrier()
    assert kinds(run.polls()) == ["barrier 1"]
    assert log_keys(run.store) == 0
    assert by_vnode(committed(run.store)) == by_vnode(rows_in_order([numbered_chunk(0, 20)]))


def test_28_a_checkpoint_waits_for_rows_while_they_are_polled(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format)
    for message in (numbered_chunk(0, 10), watermark(5), numbered_chunk(10, 10)):
        run.synced.push(message)
    run.barrier()
    assert kinds(run.polls()) == ["rows 0+10", "watermark 5", "rows 10+10", "barrier 1"]
    assert log_keys(run.store) == 0
    counters = run.synced.log.counters
    assert (counters.dirty, counters.clean) == (1, 1)
    assert len(committed(run.store)) == 20


def test_29_without_a_buffer_barriers_come_first_and_small_neighbours_as_one_chunk(
    reopen: Reopen, log_format: int
) -> None:
    run = Run(reopen(), log_format, max_rows=0, begin=False)
    initial = Barrier(EpochPair(epoch(1), epoch(0)), BarrierKind.INITIAL)
    run.synced.push(initial)
    for message in (numbered_chunk(0, 10), numbered_chunk(10, 10), watermark(5), numbered_chunk(20, 10)):
        run.synced.push(message)
    run.barrier()
    found = run.polls()
    assert kinds(found) == ["barrier 0", "barrier 1", "rows 0+20", "watermark 5", "rows 20+10"]
    assert rows_in_order(run.got) == rows_in_order(numbered_chunk(0, 30))


@pytest.mark.parametrize("aligned", [False, True], ids=["30 unaligned", "31 aligned"])
def test_30_31_a_barrier_waits_for_what_is_being_sent_and_surfaces_when_it_was_sent(
    aligned: bool, reopen: Reopen, log_format: int
) -> None:
    run = Run(reopen(), log_format, aligned=aligned, begin=False)
    dispatch = SyncedLogDispatch(run.synced)
    messages: list[SyncedMessage] = [
        Barrier(EpochPair(epoch(1), epoch(0)), BarrierKind.INITIAL),
        numbered_chunk(0, 10),
        watermark(5),
        numbered_chunk(10, 10),
        Barrier(EpochPair(epoch(2), epoch(1)), BarrierKind.CHECKPOINT),
    ]
    sent: list[SyncedMessage] = []
    surfaced: list[Barrier] = []
    waiting = list(messages)
    while len(sent) < len(messages):
        while waiting and dispatch.wants_input:
            dispatch.push(waiting.pop(0))
        item = dispatch.poll()
        assert item is not None
        assert dispatch.poll() is None  # it is being sent
        assert dispatch.next_barrier() is None
        sent.append(item)
        dispatch.sent()
        if (barrier := dispatch.next_barrier()) is not None:
            surfaced.append(barrier)
    assert sent == messages
    assert surfaced == [messages[0], messages[-1]]
    with pytest.raises(WrongCall):
        dispatch.sent()


def test_30_a_barrier_that_comes_while_rows_are_sent_goes_before_the_next_rows(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format, pause_seconds=0)
    dispatch = SyncedLogDispatch(run.synced)
    for place in range(3):
        dispatch.push(numbered_chunk(10 * place, 10))
    first = dispatch.poll()
    assert isinstance(first, Chunk)
    barrier = run.barrier()
    dispatch.push(numbered_chunk(30, 10))
    later = run.barrier(BarrierKind.BARRIER)
    assert dispatch.poll() is None
    dispatch.sent()
    assert dispatch.poll() is barrier
    run.got = [first]
    run.work(barrier)
    dispatch.sent()
    assert dispatch.next_barrier() is barrier
    run.factory.sealer.seal(barrier.closes)
    assert dispatch.poll() is later
    dispatch.sent()

    again = Run(reopen(), log_format)  # a crash: what was sent before the barrier is done, exactly that
    assert rows_of(committed_chunks(again)) == rows_of(numbered_chunk(0, 30))


def committed_chunks(run: Run) -> list[Chunk]:
    """Everything that was worked on once the log is drained."""
    run.drain()
    rows = [(Op(op), key, name) for _, op, key, name in committed(run.store)]
    return [chunk_of(rows)]


# -- exactly once ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_rows", [0, 25, 2048])
@pytest.mark.parametrize("polls", range(0, 14, 2))
def test_a_crash_at_any_place_works_on_every_sealed_row_once_and_in_order(
    polls: int, max_rows: int, log_format: int
) -> None:
    location = f"memory://{uuid.uuid4()}"
    rng = random.Random(polls)
    chunks = [random_chunk(rng, 10) for _ in range(6)]
    with open_writer(location) as store:
        run = Run(store, log_format, max_rows=max_rows, pause_seconds=0)
        for place, chunk in enumerate(chunks):
            run.synced.push(chunk)
            if place % 2:
                run.barrier(BarrierKind.BARRIER if place == 1 else BarrierKind.CHECKPOINT)
        for _ in range(polls):
            run.poll()
        sealed = store.committed_epoch().ms
        with open_writer(location, takeover=True) as after:
            again = Run(after, log_format, history_rows=3)
            expected = chunks[: 2 * sealed]
            again.drain()
            assert by_vnode(committed(after)) == by_vnode(rows_in_order(expected))
            for _ in range(3):
                again.drain()
            assert log_keys(after) == 0


def test_m5_an_update_pair_at_the_border_of_a_chunk_is_not_lost_by_a_checkpoint_and_a_crash(
    reopen: Reopen, log_format: int
) -> None:
    """Progress is of emitted rows only: the pair that did not fit into the chunk before the barrier comes after it."""
    rows: list[tuple[Op, int, str]] = []
    for key in range(8):
        rows += [(Op.INSERT, 7, f"new {key}"), (Op.UPDATE_DELETE, 7, f"old {key}"), (Op.UPDATE_INSERT, 7, f"set {key}")]
    sent = chunk_of(rows)
    run = Run(reopen(), log_format, pause_seconds=0)
    run.synced.push(sent)
    run.checkpoint()
    for _ in range(40):
        run = Run(reopen(), log_format, history_rows=2)
        item = run.poll()
        if not isinstance(item, Chunk):
            break
        run.checkpoint()  # between two chunks of one vnode
    assert rows_in_order(sent) == committed(run.store)
    assert run.polls() == []


def test_a_barrier_that_is_no_checkpoint_overtakes_rows_and_writes_nothing(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format)
    run.synced.push(numbered_chunk(0, 10))
    run.barrier(BarrierKind.BARRIER)
    assert kinds([run.poll() or watermark(0)]) == ["barrier 1"]
    assert run.synced.log.state.counters.storage_write_count == 0
    run.synced.push(numbered_chunk(10, 5))
    run.clock.now += 1
    run.barrier()
    assert kinds(run.polls()) == ["rows 0+10", "rows 10+5", "barrier 2"]


def test_rows_of_epochs_that_were_no_checkpoint_are_durable_with_the_next_one(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format, pause_seconds=0)
    for number in (1, 2, 3):
        run.synced.push(numbered_chunk(100 * number, 10))
        run.barrier(BarrierKind.BARRIER if number < 3 else BarrierKind.CHECKPOINT)
    assert kinds([run.synced.poll() or watermark(0) for _ in range(2)]) == ["barrier 1", "barrier 2"]
    run.poll()
    assert run.epochs_held() == [1, 2, 3]
    again = Run(reopen(), log_format)
    assert kinds(again.polls()) == ["rows 100+10", "rows 200+10", "rows 300+10"]


def test_a_held_checkpoint_goes_when_its_time_is_over_and_then_nobody_waits(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format, pause_seconds=0.064)
    for place in range(4):
        run.synced.push(numbered_chunk(10 * place, 10))
    barrier = run.barrier()
    assert isinstance(run.poll(), Chunk)
    run.clock.now += 0.06
    assert isinstance(run.poll(), Chunk)
    run.clock.now += 0.005
    assert run.poll() is barrier
    assert run.synced.log.counters.write_pause_ns == 65_000_000
    following = run.barrier()
    assert run.poll() is following  # it is dirty: at once
    assert run.synced.log.state.counters.storage_write_count == 20
    assert kinds(run.polls()) == ["rows 20+10", "rows 30+10"]
    assert run.synced.log.counters.clean == 1
    assert run.synced.log.counters.wait_next_poll_ns == 65_000_000


def test_m24_a_backlog_that_is_only_in_the_store_is_not_clean(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format, max_rows=10)
    assert isinstance(run.synced, SyncedLogStore)
    run.synced.push(numbered_chunk(0, 10))
    run.synced.push(numbered_chunk(10, 10))  # spilled
    assert not run.synced.is_clean
    assert isinstance(run.poll(), Chunk)  # memory is empty now
    assert not run.synced.is_clean
    barrier = run.barrier()
    assert run.poll() is barrier  # not held
    assert run.synced.log.counters.write_pause_ns == 0
    assert kinds(run.polls()) == ["rows 10+10"]
    assert run.synced.is_clean


def test_m24_rows_of_a_later_epoch_in_the_store_are_a_backlog_too(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format, max_rows=10)
    assert isinstance(run.synced, SyncedLogStore)
    run.synced.push(numbered_chunk(0, 10))
    barrier = run.barrier()
    assert kinds([run.poll() or watermark(0)]) == ["rows 0+10"]
    run.synced.push(numbered_chunk(10, 20))  # spilled, behind the barrier
    assert run.poll() is barrier
    assert not run.synced.is_clean
    assert run.epochs_held() == []


def test_a_chunk_is_taken_into_memory_only_if_it_fits_as_a_whole(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format, max_rows=25)
    for rows, held, spilled in ((10, 10, 0), (16, 10, 16), (15, 25, 16), (1, 25, 17)):
        run.synced.push(numbered_chunk(0, rows))
        figures = run.synced.statistics()  # type: ignore[union-attr]
        assert (figures.rows, figures.spilled_rows) == (held, spilled)
    assert kinds(run.polls()) == ["rows 0+10", "rows 0+16", "rows 0+15", "rows 0+1"]
    wide = Run(reopen(), log_format, max_bytes=numbered_chunk(0, 10).nbytes)
    wide.synced.push(numbered_chunk(0, 10))
    wide.synced.push(numbered_chunk(10, 1))
    assert wide.synced.statistics().spilled_rows == 1  # type: ignore[union-attr]


def test_while_whoever_polls_keeps_up_seals_write_nothing_for_the_log(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format)
    run.checkpoint()

    def stored() -> dict[bytes, bytes]:
        with run.store.snapshot() as view:
            return {key: bytes(value) for key, value in view.scan(end=b"\x7f")}

    before = stored()
    for number in range(20):
        run.synced.push(numbered_chunk(10 * number, 10))
        run.synced.push(watermark(10 * number))
        run.checkpoint(BarrierKind.CHECKPOINT if number % 3 else BarrierKind.BARRIER)
    assert stored() == before
    assert log_keys(run.store) == 0
    assert run.synced.log.state.counters.storage_write_count == 0


def test_what_was_emitted_is_forgotten(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format, max_rows=0)
    for number in range(6):
        run.synced.push(numbered_chunk(100 * number, 20))
        run.checkpoint()
    assert len(run.epochs_held()) == 6
    run.polls()
    for _ in range(3):
        run.checkpoint()
    assert log_keys(run.store) == 0
    assert by_vnode(committed(run.store)) == by_vnode(
        rows_in_order([numbered_chunk(100 * number, 20) for number in range(6)])
    )


def test_rows_before_a_draining_checkpoint_are_all_delivered_with_it(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format, max_rows=10, pause_seconds=0)
    for place in range(4):
        run.synced.push(numbered_chunk(10 * place, 10))
    run.checkpoint()
    run.synced.push(numbered_chunk(40, 10))
    run = Run(reopen(), log_format, max_rows=10, pause_seconds=0)
    run.synced.push(numbered_chunk(50, 10))
    run.synced.push(numbered_chunk(60, 10))
    barrier = run.barrier(BarrierKind.SYNC_CHECKPOINT)
    run.synced.push(numbered_chunk(70, 10))
    while run.poll() is not barrier:
        pass
    rows = [*range(40), *range(50, 70)]
    assert sorted(key for _, _, key, _ in committed(run.store)) == rows


# -- watermarks ------------------------------------------------------------------------------------------------------


def test_m23_a_watermark_that_was_not_emitted_follows_the_persisted_rows_after_a_crash(
    reopen: Reopen, log_format: int
) -> None:
    run = Run(reopen(), log_format, pause_seconds=0)
    for message in (numbered_chunk(0, 10), watermark(4), numbered_chunk(10, 10), watermark(9), numbered_chunk(20, 10)):
        run.synced.push(message)
    run.checkpoint()
    again = Run(reopen(), log_format)
    again.synced.push(numbered_chunk(30, 10))
    assert kinds(joined(again.polls())) == ["rows 0+30", "watermark 9", "rows 30+10"]
    again.checkpoint()
    third = Run(reopen(), log_format)  # it was emitted before the seal: not again
    assert kinds(third.polls()) == []


def test_m23_a_watermark_waits_for_all_persisted_rows_over_several_crashes(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format, pause_seconds=0)
    for message in (numbered_chunk(0, 10), watermark(9), numbered_chunk(10, 10)):
        run.synced.push(message)
    run.checkpoint()
    run.checkpoint()
    for _ in range(2):
        run = Run(reopen(), log_format, history_rows=10)
        item = run.poll()
        assert isinstance(item, Chunk)
        assert item.num_rows == 10
        run.checkpoint()
    run = Run(reopen(), log_format)
    assert kinds(run.polls()) == ["watermark 9"]
    run.checkpoint()
    assert kinds(Run(reopen(), log_format).polls()) == []


def test_m23_a_watermark_of_rows_that_were_lost_is_lost_with_them(reopen: Reopen, log_format: int) -> None:
    """Those rows come again from above, below it: to emit it before them would break its promise."""
    run = Run(reopen(), log_format, pause_seconds=0)
    run.synced.push(numbered_chunk(0, 10))
    run.synced.push(watermark(3))
    run.barrier()
    run.synced.push(numbered_chunk(10, 10))
    run.synced.push(watermark(15))
    run.poll()
    again = Run(reopen(), log_format)
    assert kinds(again.polls()) == ["rows 0+10", "watermark 3"]


def test_m23_a_newer_watermark_takes_the_place_of_one_that_was_not_emitted(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format, pause_seconds=0)
    for message in (numbered_chunk(0, 10), watermark(3)):
        run.synced.push(message)
    run.checkpoint()
    run = Run(reopen(), log_format, pause_seconds=0)
    run.synced.push(numbered_chunk(10, 10))
    run.synced.push(watermark(12))
    run.checkpoint()  # of the persisted rows none was polled
    assert kinds(joined(Run(reopen(), log_format).polls())) == ["rows 0+20", "watermark 12"]


def test_m23_a_watermark_that_promises_no_more_is_not_emitted(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format, pause_seconds=0)
    run.synced.push(numbered_chunk(0, 10))
    run.synced.push(watermark(8))
    run.checkpoint()
    run = Run(reopen(), log_format)
    for value in (5, 8, 9, 9):
        run.synced.push(numbered_chunk(10 + value, 1))
        run.synced.push(watermark(value))
    assert kinds(run.polls()) == [
        "rows 0+10",
        "watermark 8",
        "rows 15+1",
        "rows 18+1",
        "rows 19+1",
        "watermark 9",
        "rows 19+1",
    ]


def test_m23_other_owners_take_the_lowest_watermark_and_none_where_one_is_unknown(
    reopen: Reopen, log_format: int
) -> None:
    store = reopen()
    factory = KvLogStoreFactory(store)
    runs = [
        Run(store, log_format, vnodes=half, factory=factory, owner=f"part {place}", pause_seconds=0)
        for place, half in enumerate(HALVES)
    ]
    for run, value in zip(runs, (30, 20), strict=True):
        run.synced.push(numbered_chunk(0, 50).filter_vnodes(run.synced.log.state.vnodes))
        run.synced.push(watermark(value))
    runs[0].synced.push(Watermark("name", pa.scalar("x")))  # the other one says nothing of this column
    for run in runs:
        barrier = run.barrier()
        assert run.synced.poll() is barrier
    factory.sealer.seal(epoch(1))

    whole = Run(reopen(), log_format)
    found = whole.polls()
    assert rows_of([item for item in found if isinstance(item, Chunk)]) == rows_of(numbered_chunk(0, 50))
    assert kinds([item for item in found if not isinstance(item, Chunk)]) == ["watermark 20"]
    whole.checkpoint()
    assert kinds(Run(reopen(), log_format).polls()) == []


def test_a_watermark_must_be_of_a_column_and_its_type(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format)
    for wrong in (
        watermark(1, "nothing"),
        Watermark("id", 5),
        Watermark("id", pa.scalar(5, pa.int32())),
        Watermark("id", pa.scalar(None, pa.int64())),
    ):
        with pytest.raises(ForeignSchema):
            run.synced.push(wrong)
    assert "5" not in repr(watermark(5))
    assert run.polls() == []


# -- owners, pause, stop, order --------------------------------------------------------------------------------------


def test_two_instances_share_a_log_and_are_one_after_a_restart(reopen: Reopen, log_format: int) -> None:
    store = reopen()
    factory = KvLogStoreFactory(store)
    runs = [
        Run(store, log_format, vnodes=half, factory=factory, owner=f"part {place}", max_rows=20, pause_seconds=0)
        for place, half in enumerate(HALVES)
    ]
    sent: list[Chunk] = []
    for number in range(4):
        chunk = numbered_chunk(100 * number, 40)
        sent.append(chunk)
        for place, run in enumerate(runs):
            run.synced.push(chunk.filter_vnodes(HALVES[place]))
            barrier = run.barrier()
            assert run.synced.poll() is barrier
            run.work(barrier)
        factory.sealer.seal(epoch(number + 1))
        item = runs[0].synced.poll()  # only the first one reads, and not all
        assert isinstance(item, Chunk)
        runs[0].got.append(item)
    whole = Run(reopen(), log_format)
    whole.drain()
    assert by_vnode(committed(whole.store)) == by_vnode(rows_in_order(sent))
    for _ in range(3):
        whole.drain()
    assert log_keys(whole.store) == 0


def test_an_instance_that_keeps_up_does_not_keep_the_rows_of_another(reopen: Reopen, log_format: int) -> None:
    store = reopen()
    factory = KvLogStoreFactory(store)
    first, second = (
        Run(store, log_format, vnodes=half, factory=factory, owner=f"part {place}", max_rows=max_rows)
        for place, (half, max_rows) in enumerate(zip(HALVES, (2048, 0), strict=True))
    )
    for number in range(6):
        if number == 0:
            second.synced.push(numbered_chunk(0, 40).filter_vnodes(HALVES[1]))
        for run in (first, second):
            barrier = run.barrier()
            while run.synced.poll() is not barrier:
                pass
        factory.sealer.seal(epoch(number + 1))
        second.polls()
    assert log_keys(store) == 0


def test_vnodes_and_columns_cannot_change_while_it_runs(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format, owner="join")
    move = UpdateVnodeBitmap.of({"join": HALVES[0], "other": HALVES[1]})
    for mutation, words in ((move, "vnodes"), (SchemaChange("orders", 2), "columns")):
        with pytest.raises(WrongCall, match=words):
            run.barrier(mutation=mutation)
    same = UpdateVnodeBitmap.of({"join": VnodeBitmap.full(256)})
    for mutation in (UpdateVnodeBitmap.of({"other": HALVES[1]}), same, SchemaChange("customers", 2)):
        run.checkpoint(mutation=mutation)
    run.synced.push(numbered_chunk(0, 10))
    assert kinds(run.polls()) == ["rows 0+10"]


def test_pause_stops_rows_and_not_barriers(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format)
    run.synced.push(numbered_chunk(0, 10))
    run.barrier(BarrierKind.BARRIER, Pause())
    run.synced.push(numbered_chunk(10, 10))
    run.synced.push(watermark(5))
    run.barrier()
    assert kinds(run.polls()) == ["barrier 1", "barrier 2"]  # the checkpoint is not held for rows that cannot come
    assert run.poll() is None
    run.barrier(BarrierKind.BARRIER, Resume())
    assert kinds(run.polls()) == ["barrier 3", "rows 0+10", "rows 10+10", "watermark 5"]
    again = Run(reopen(), log_format, mutation=Pause())
    assert again.poll() is None
    again.barrier(BarrierKind.BARRIER, Resume())
    assert kinds(again.polls()) == ["barrier 3", "rows 0+10", "rows 10+10", "watermark 5"]


@pytest.mark.parametrize("mutation", [Stop(), Stop(("join",))])
def test_nothing_comes_after_the_barrier_that_stops_it(mutation: Stop, reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format, owner="join", pause_seconds=0)
    run.synced.push(numbered_chunk(0, 10))
    run.barrier(mutation=Stop(("other",)))
    assert kinds(run.polls()) == ["barrier 1", "rows 0+10"]
    run.synced.push(numbered_chunk(10, 10))
    run.barrier(mutation=mutation)
    assert kinds(run.polls()) == ["barrier 2"]
    assert not run.synced.wants_input
    with pytest.raises(WrongCall):
        run.synced.push(numbered_chunk(20, 10))
    again = Run(reopen(), log_format)
    assert kinds(again.polls()) == ["rows 10+10"]


def test_messages_out_of_order_are_refused(reopen: Reopen, log_format: int) -> None:
    store = reopen()
    run = Run(store, log_format, begin=False)
    with pytest.raises(MessageOrderError):
        run.synced.push(numbered_chunk(0, 1))
    with pytest.raises(WrongCall):
        run.synced.push(watermark(1))
    run = Run(store, log_format, factory=run.factory, vnodes=HALVES[0])
    with pytest.raises(ForeignVnode):
        run.synced.push(numbered_chunk(0, 50))
    with pytest.raises(ForeignSchema):
        run.synced.push(Chunk.empty(SCHEMA.remove(1)))
    run.synced.push(Chunk.empty(SCHEMA))
    assert run.polls() == []
    run.checkpoint()
    late = Run(store, log_format, factory=run.factory, begin=False)
    with pytest.raises(InvalidOffset, match="is sealed"):
        late.synced.push(Barrier(EpochPair(epoch(1), epoch(0)), BarrierKind.INITIAL))


def test_a_checkpoint_is_sealed_before_the_next_one_comes(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format)
    first, second = run.barrier(), run.barrier()
    assert run.synced.poll() is first
    with pytest.raises(WrongCall, match="not sealed"):
        run.synced.poll()
    run.factory.sealer.seal(first.closes)
    assert run.poll() is second


def test_a_log_with_other_consumers_is_not_a_synced_one(reopen: Reopen, log_format: int) -> None:
    factory = KvLogStoreFactory(reopen())
    log = factory.log("orders", SCHEMA, KEY, log_format)
    factory.pair(log, "sink")
    with pytest.raises(WrongCall, match="sink"):
        factory.synced.store(log)


# -- aligned mode ----------------------------------------------------------------------------------------------------


def test_aligned_mode_emits_what_is_persisted_then_passes_everything_and_forgets_it(
    reopen: Reopen, log_format: int
) -> None:
    run = Run(reopen(), log_format, max_rows=10, pause_seconds=0)
    for message in (numbered_chunk(0, 10), watermark(3), numbered_chunk(10, 20)):
        run.synced.push(message)
    run.checkpoint()
    run = Run(reopen(), log_format, aligned=True, history_rows=8)
    with pytest.raises(WrongCall, match="poll"):
        run.synced.push(numbered_chunk(30, 10))
    assert kinds(joined(run.polls())) == ["rows 0+30", "watermark 3"]
    passed: list[SyncedMessage] = []
    for message in (numbered_chunk(30, 10), Chunk.empty(SCHEMA), watermark(20), watermark(20), numbered_chunk(40, 10)):
        assert run.synced.wants_input
        run.synced.push(message)
        passed += run.polls()
    assert kinds(passed) == ["rows 30+10", "watermark 20", "rows 40+10"]
    for _ in range(3):
        run.checkpoint()
        run.checkpoint(BarrierKind.BARRIER)
    assert log_keys(run.store) == 0
    assert by_vnode(committed(run.store)) == by_vnode(rows_in_order(numbered_chunk(0, 50)))
    again = Run(reopen(), log_format)
    assert again.polls() == []


def test_aligned_mode_crashes_before_its_first_checkpoint_and_begins_again(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format, pause_seconds=0)
    run.synced.push(numbered_chunk(0, 30))
    run.checkpoint()
    for _ in range(2):
        run = Run(reopen(), log_format, aligned=True)
        assert kinds(run.polls()) == ["rows 0+30"]
    run.checkpoint(mutation=Stop())
    assert run.poll() is None
    assert not run.synced.wants_input
    assert rows_in_order(numbered_chunk(0, 30)) == sorted(committed(run.store), key=lambda row: row[2])


# -- failures --------------------------------------------------------------------------------------------------------


def test_a_store_that_is_full_for_a_moment_loses_nothing(
    reopen: Reopen, log_format: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(reopen(), log_format, max_rows=10, pause_seconds=0)

    def full(*_: Any) -> None:
        raise StoreFull("For a moment.")

    run.synced.push(numbered_chunk(0, 10))
    with monkeypatch.context() as patch:
        patch.setattr(run.factory.sealer, "put_many", full)
        with pytest.raises(StoreFull):
            run.synced.push(numbered_chunk(10, 10))
        run.barrier()
        with pytest.raises(StoreFull):
            run.poll()
    assert kinds([run.poll() or watermark(0)]) == ["barrier 1"]
    run.synced.push(numbered_chunk(20, 10))
    assert kinds(run.polls()) == ["rows 0+10", "rows 20+10"]
    run.checkpoint()
    assert len(committed(run.store)) == 20


def test_rows_that_cannot_be_read_for_a_moment_come_later(
    reopen: Reopen, log_format: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(reopen(), log_format, max_rows=0, pause_seconds=0)
    run.synced.push(numbered_chunk(0, 10))

    def away(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("For a moment.")

    with monkeypatch.context() as patch:
        patch.setattr(run.synced.log.state, "read_spilled", away)
        with pytest.raises(StoreUnavailable):
            run.poll()
    run.checkpoint()
    again = Run(reopen(), log_format, history_rows=4)
    assert isinstance(again.poll(), Chunk)
    with monkeypatch.context() as patch:
        patch.setattr(again.synced.log, "_history", map(away, [1]))
        with pytest.raises(StoreUnavailable):
            again.poll()
    again.drain()
    assert by_vnode(committed(again.store)) == by_vnode(rows_in_order(numbered_chunk(0, 10)))


def test_seals_in_the_background_are_as_good(reopen: Reopen, log_format: int) -> None:
    run = Run(reopen(), log_format, max_rows=15, pause_seconds=0)
    for number in range(5):
        run.synced.push(numbered_chunk(100 * number, 10))
        run.synced.push(numbered_chunk(100 * number + 50, 10))
        barrier = run.barrier()
        while (item := run.synced.poll()) is not barrier:
            assert isinstance(item, Chunk)
            run.got.append(item)
        run.work(barrier)
        run.factory.sealer.seal_in_background(barrier.closes)
        item = run.synced.poll()
        assert isinstance(item, Chunk)
        run.got.append(item)
    run.factory.sealer.wait()
    again = Run(reopen(), log_format)
    again.drain()
    sent = [numbered_chunk(100 * number + more, 10) for number in range(5) for more in (0, 50)]
    assert by_vnode(committed(again.store)) == by_vnode(rows_in_order(sent))


# -- metrics ---------------------------------------------------------------------------------------------------------


def test_the_figures_of_a_synced_log(log_format: int) -> None:
    location = f"memory://{uuid.uuid4()}"
    with open_writer(location) as before:
        run = Run(before, log_format, pause_seconds=0)
        run.synced.push(numbered_chunk(0, 7))
        run.checkpoint()
        with open_writer(location, takeover=True) as store:
            run = Run(store, log_format, max_rows=20, owner="join")
            for place in range(3):
                run.synced.push(numbered_chunk(100 * place, 10))
            run.polls()
            run.clock.now += 0.5
            run.synced.push(numbered_chunk(0, 15))
            run.synced.push(watermark(1))
            run.synced.push(numbered_chunk(15, 15))
            metrics = synced_metrics(run.factory)
    values = {(metric.name, _more(metric)): metric.value for metric in metrics}
    labels = {"log": "orders", "owner": "join", "first_vnode": "0"}
    assert all(labels.items() <= dict(metric.labels).items() for metric in metrics)
    prefix = "sync_kv_log_store_"
    read = {kind: values[f"{prefix}read_count", kind] for kind in ("buffer", "persistent_log", "flushed_buffer")}
    assert read == {"buffer": 20, "persistent_log": 7, "flushed_buffer": 10}
    assert values[f"{prefix}read_count", "total"] == 37
    assert values[f"{prefix}read_size", "total"] > values[f"{prefix}read_size", "buffer"] > 0
    assert values[f"{prefix}state", "clean"] == 1
    assert values[f"{prefix}state", "dirty"] == 1
    assert values[f"{prefix}storage_write_count", ""] == 25
    assert values[f"{prefix}storage_write_size", ""] > 0
    assert values[f"{prefix}write_pause_duration_ns", ""] == 0
    assert values[f"{prefix}wait_next_poll_ns", ""] == 0
    assert values[f"{prefix}buffer_unconsumed_item_count", ""] == 3
    assert values[f"{prefix}buffer_unconsumed_row_count", ""] == 30
    assert values[f"{prefix}buffer_unconsumed_epoch_count", ""] == 1
    assert values[f"{prefix}buffer_unconsumed_min_epoch", ""] == epoch(2)
    assert values[f"{prefix}buffer_memory_bytes", ""] == numbered_chunk(0, 15).nbytes


def _more(metric: Metric) -> str:
    found = dict(metric.labels)
    return found.get("type", found.get("state", ""))

"""Vnodes are read side by side, in order within each, update pairs whole, and a look ahead loses nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest
from tests.unit.backfill.snapshot.memory_table import MemoryTable, Rows, batch_of, changes_of, position

from headwater.backfill.snapshot.errors import InvalidSnapshotOption
from headwater.backfill.snapshot.state import VnodeProgress
from headwater.backfill.snapshot.vnode_stream import StreamOptions, VnodeStream
from headwater.stream import Chunk, Op

EPOCH = 7
SYNC = StreamOptions(chunk_rows=3, readers=0)


class Fed:
    """Vnodes whose batches come when the test says so; ``None`` ends a vnode."""

    def __init__(self) -> None:
        self._given: dict[int, list[pa.RecordBatch | Exception | None]] = {}
        self._changed = threading.Condition()

    def give(self, vnode: int, batch: pa.RecordBatch | Exception | None) -> None:
        with self._changed:
            self._given.setdefault(vnode, []).append(batch)
            self._changed.notify_all()

    def read(self, vnode: int, start: bytes | None) -> Iterator[pa.RecordBatch]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._given.get(vnode), timeout=20)
                item = self._given[vnode].pop(0)
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item


def _ids(chunk: Chunk | None) -> list[int]:
    assert chunk is not None
    found: list[int] = chunk.rows.column("id").to_pylist()
    return found


def test_s3_no_chunk_until_it_is_full_and_progress_waits_for_a_look_at_the_next_row() -> None:
    fed = Fed()
    start = {0: VnodeProgress(EPOCH, 10, position(0)), 1: None}
    with VnodeStream(Rows(fed.read), EPOCH, start, StreamOptions(chunk_rows=3)) as stream:
        fed.give(0, batch_of(4))
        fed.give(1, batch_of(5))
        assert stream.next_chunk(timeout=0.2) is None  # two rows of three
        assert stream.progress(timeout=0.1) is None  # nobody knows the next rows yet
        fed.give(0, batch_of(8))
        fed.give(1, None)
        chunk = stream.next_chunk(timeout=10)
        assert sorted(_ids(chunk)) == [4, 5, 8]
        fed.give(0, batch_of(12))
        told = stream.progress(timeout=10)
        assert told == {0: VnodeProgress(EPOCH, 12, position(12)), 1: VnodeProgress(EPOCH, 1)}
        assert stream.next_chunk(timeout=0.1) is None
        assert _ids(stream.flush()) == [12]
        fed.give(0, None)
        assert stream.progress(timeout=10) == {0: VnodeProgress(EPOCH, 13), 1: VnodeProgress(EPOCH, 1)}
        assert stream.is_exhausted
        assert stream.flush() is None


def test_s4_an_update_that_finds_one_free_place_closes_the_chunk_and_comes_whole_in_the_next() -> None:
    batch = changes_of((1, Op.INSERT), (2, Op.DELETE), (3, Op.UPDATE_DELETE), (3, Op.UPDATE_INSERT))
    with VnodeStream(Rows(lambda vnode, start: iter([batch])), EPOCH, {0: None}, SYNC) as stream:
        assert _ids(stream.next_chunk()) == [1, 2]
        assert stream.next_chunk() is None
        last = stream.flush()
        assert _ids(last) == [3, 3]
        assert last is not None
        assert last.ops.to_pylist() == [Op.UPDATE_DELETE, Op.UPDATE_INSERT]
        assert stream.progress() == {0: VnodeProgress(EPOCH, 4)}


def test_s5_a_stream_without_rows_ends() -> None:
    with VnodeStream(Rows(lambda vnode, start: iter([])), EPOCH, {0: None, 1: None}) as stream:
        assert stream.next_chunk(timeout=10) is None
        assert stream.is_exhausted
        assert stream.progress() == {0: VnodeProgress(EPOCH, 0), 1: VnodeProgress(EPOCH, 0)}
    with VnodeStream(Rows(lambda vnode, start: iter([])), EPOCH, {}) as stream:
        assert stream.next_chunk() is None
        assert stream.progress() == {}


def _drain(stream: VnodeStream) -> None:
    while stream.progress(timeout=10) is not None:
        stream.next_chunk(timeout=0.05)


@pytest.mark.parametrize("readers", [0, 2])
def test_s6_what_a_read_raises_comes_out_of_reading_and_of_looking_at_progress(readers: int) -> None:
    def failing(vnode: int, start: bytes | None) -> Iterator[pa.RecordBatch]:
        yield batch_of(1)
        raise OSError("the disk is gone")

    options = StreamOptions(chunk_rows=3, readers=readers)
    with VnodeStream(Rows(failing), EPOCH, {0: None}, options) as stream, pytest.raises(OSError, match="disk"):
        stream.next_chunk(timeout=10)
    with VnodeStream(Rows(failing), EPOCH, {0: None}, options) as stream:
        for _ in range(2):
            with pytest.raises(OSError, match="disk"):
                _drain(stream)


def test_s7_a_look_at_the_next_row_loses_no_wake_up_of_who_waits_for_rows() -> None:
    for _ in range(50):
        fed = Fed()
        got: list[list[int]] = []
        with VnodeStream(Rows(fed.read), EPOCH, {0: None, 1: None}, StreamOptions(chunk_rows=2)) as stream:
            taker = threading.Thread(target=lambda stream=stream, got=got: got.append(_ids(stream.next_chunk(20))))
            taker.start()
            assert stream.progress(timeout=0.001) is None
            fed.give(0, batch_of(2))
            assert stream.progress(timeout=0.001) is None
            fed.give(1, batch_of(3))
            taker.join(20)
            assert [sorted(ids) for ids in got] == [[2, 3]]
            fed.give(0, None)
            fed.give(1, None)


def test_rows_of_a_vnode_come_in_key_order_and_each_once_however_many_are_open() -> None:
    table = MemoryTable(vnode_count=32)
    table.commit(EPOCH, {key: key for key in range(500)})
    source = Rows(lambda vnode, start: table.snapshot(EPOCH, (vnode, vnode + 1), start=start))
    seen: dict[int, list[int]] = {}
    options = StreamOptions(chunk_rows=50, readers=3, open_vnodes=4)
    with VnodeStream(source, EPOCH, dict.fromkeys(range(32)), options) as stream:
        while (chunk := stream.next_chunk(timeout=20) or stream.flush()) is not None:
            for key, vnode in zip(_ids(chunk), chunk.vnodes.to_pylist(), strict=True):
                seen.setdefault(vnode, []).append(key)
        assert stream.is_exhausted
    assert all(keys == sorted(keys) for keys in seen.values())
    assert sorted(key for keys in seen.values() for key in keys) == list(range(500))
    assert all(key % 32 == vnode for vnode, keys in seen.items() for key in keys)


def test_a_read_that_is_old_is_opened_anew_where_it_stands() -> None:
    table, now = MemoryTable(vnode_count=1, batch_rows=4), [0.0]
    table.commit(EPOCH, {key: key for key in range(20)})

    def slow(vnode: int, start: bytes | None) -> Iterator[pa.RecordBatch]:
        for batch in table.snapshot(EPOCH, (vnode, vnode + 1), start=start):
            now[0] += 6.0
            yield batch

    source = Rows(slow)
    options = StreamOptions(chunk_rows=5, readers=0, rebuild_seconds=10.0)
    found: list[int] = []
    with VnodeStream(source, EPOCH, {0: None}, options, clock=lambda: now[0]) as stream:
        while (chunk := stream.next_chunk() or stream.flush()) is not None:
            found += _ids(chunk)
    assert found == list(range(20))
    assert [start for _, start in source.opens] == [None, position(7), position(14), position(19)]


def test_an_update_pair_is_not_given_twice_by_a_read_that_is_opened_anew() -> None:
    pair = changes_of((1, Op.UPDATE_DELETE), (1, Op.UPDATE_INSERT))
    rest = changes_of((1, Op.UPDATE_DELETE), (1, Op.UPDATE_INSERT), (2, Op.INSERT))
    given = {None: pair, position(1): rest, position(2): changes_of((2, Op.INSERT))}
    source = Rows(lambda vnode, start: iter([given[start]]))
    options = StreamOptions(chunk_rows=10, readers=0, rebuild_seconds=0.001)
    now = iter(range(100))
    with VnodeStream(source, EPOCH, {0: None}, options, clock=lambda: float(next(now))) as stream:
        assert stream.next_chunk() is None
        assert _ids(stream.flush()) == [1, 1, 2]


def test_the_caller_who_reads_alone_gets_the_same_chunks_each_time() -> None:
    table = MemoryTable(vnode_count=8)
    table.commit(EPOCH, {key: key for key in range(100)})

    def once() -> list[list[int]]:
        source = Rows(lambda vnode, start: table.snapshot(EPOCH, (vnode, vnode + 1), start=start))
        with VnodeStream(source, EPOCH, dict.fromkeys(range(8)), StreamOptions(chunk_rows=7, readers=0)) as stream:
            made = []
            while (chunk := stream.next_chunk() or stream.flush()) is not None:
                made.append(_ids(chunk))
            return made

    assert once() == once()


def test_a_vnode_that_has_finished_the_epoch_gives_nothing() -> None:
    source = Rows(lambda vnode, start: iter([batch_of(vnode)]))
    with VnodeStream(source, EPOCH, {0: VnodeProgress(EPOCH, 5), 1: None}, SYNC) as stream:
        assert stream.next_chunk() is None
        assert _ids(stream.flush()) == [1]
        assert stream.progress() == {0: VnodeProgress(EPOCH, 5), 1: VnodeProgress(EPOCH, 1)}


@pytest.mark.parametrize("wrong", [{"chunk_rows": 0}, {"readers": -1}, {"open_vnodes": 0}, {"rebuild_seconds": 0.0}])
def test_options_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidSnapshotOption):
        StreamOptions(**wrong)

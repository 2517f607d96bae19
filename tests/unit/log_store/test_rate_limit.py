"""The rate-limited reader over a reader in memory, with a clock that stands until somebody waits."""

from __future__ import annotations

import threading
from collections import deque

import pyarrow as pa
import pytest

from headwater.log_store.errors import InvalidOffset
from headwater.log_store.item import BarrierItem, ChunkItem, LogItem
from headwater.log_store.offset import LogOffset
from headwater.log_store.rate_limit import RateLimitedReader, RowRate
from headwater.log_store.testing import epoch, numbered_chunk
from headwater.stream import Chunk, Epoch, Op
from headwater.stream.errors import BarrierError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float | None] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float | None) -> None:
        self.waits.append(seconds)
        assert seconds is not None, "it would wait for ever"
        self.now += seconds


class Items:
    """A reader of given items."""

    def __init__(self, *items: LogItem) -> None:
        self.items = deque(items)
        self.truncated: list[LogOffset] = []
        self.calls: list[str] = []

    def init(self, timeout: float | None = None) -> None:
        self.calls.append("init")

    def start_from(self, after: Epoch | None = None) -> None:
        self.calls.append("start_from")

    def next_item(self, timeout: float | None = None) -> LogItem | None:
        return self.items.popleft() if self.items else None

    def truncate(self, offset: LogOffset) -> None:
        self.truncated.append(offset)

    def rewind(self) -> float:
        self.calls.append("rewind")
        return 0.25

    def close(self) -> None:
        self.calls.append("close")


def limited(rate: int | None, *items: LogItem) -> tuple[RateLimitedReader, Items, Clock]:
    inner, clock = Items(*items), Clock()
    return RateLimitedReader(inner, rate, clock=clock, wait=clock.wait), inner, clock


def chunk_item(number: int, chunk_id: int, rows: int) -> ChunkItem:
    return ChunkItem(epoch(number), chunk_id, numbered_chunk(100 * chunk_id, rows))


def next_chunk(reader: RateLimitedReader) -> ChunkItem:
    item = reader.next_item()
    assert isinstance(item, ChunkItem)
    return item


def test_a_large_chunk_comes_in_pieces_with_ids_of_their_own() -> None:
    reader, inner, clock = limited(
        4, chunk_item(1, 0, 10), BarrierItem(epoch(1), True), chunk_item(2, 0, 3), BarrierItem(epoch(2), True)
    )
    pieces = [next_chunk(reader) for _ in range(3)]
    assert [piece.chunk.num_rows for piece in pieces] == [4, 4, 2]
    assert [piece.chunk_id for piece in pieces] == [0, 1, 2]
    assert Chunk.concat(piece.chunk for piece in pieces) == numbered_chunk(0, 10)
    assert clock.now == pytest.approx(102.0), "each piece waits for the one before"
    barrier = reader.next_item()
    assert isinstance(barrier, BarrierItem)
    assert clock.now == pytest.approx(102.0), "a barrier costs nothing"
    last = next_chunk(reader)
    assert (last.chunk_id, last.chunk.num_rows) == (3, 3), "ids go on over epochs"
    assert clock.now == pytest.approx(102.5)
    reader.truncate(pieces[0].offset)
    reader.truncate(pieces[1].offset)
    assert inner.truncated == [], "a part of a chunk is not the chunk"
    reader.truncate(pieces[2].offset)
    assert inner.truncated == [LogOffset(epoch(1), 0)]
    reader.truncate(barrier.offset)
    assert inner.truncated[1:] == [LogOffset(epoch(1))]


def test_25_26_a_later_piece_truncates_what_came_before_and_never_what_is_half_delivered() -> None:
    reader, inner, _ = limited(2, chunk_item(1, 0, 4), BarrierItem(epoch(1), True), chunk_item(2, 0, 4))
    for _ in range(3):
        reader.next_item()
    half = next_chunk(reader)
    reader.truncate(half.offset)
    assert inner.truncated == [LogOffset(epoch(1))], "the barrier before it, and not the chunk of which it is half"
    reader.truncate(next_chunk(reader).offset)
    assert inner.truncated[1:] == [LogOffset(epoch(2), 0)]


def test_update_pairs_are_never_split() -> None:
    ids = pa.array([1, 2, 2, 3, 3, 4], pa.int64())
    batch = pa.RecordBatch.from_arrays([ids, pa.array(["n"] * 6)], names=["id", "name"])
    pair = (Op.UPDATE_DELETE, Op.UPDATE_INSERT)
    chunk = Chunk.build(batch, (Op.INSERT, *pair, *pair, Op.DELETE), ("id",))
    reader, _, clock = limited(2, ChunkItem(epoch(1), 0, chunk))
    assert [next_chunk(reader).chunk.num_rows for _ in range(3)] == [3, 2, 1]
    assert clock.now == pytest.approx(102.5), "the row more is paid for"


def test_the_rate_can_be_changed_inside_a_chunk() -> None:
    reader, _, clock = limited(2, chunk_item(1, 0, 20))
    assert next_chunk(reader).chunk.num_rows == 2
    reader.set_rate(8)
    assert next_chunk(reader).chunk.num_rows == 8
    assert clock.now == pytest.approx(100.25), "2 rows at the new rate"
    reader.set_rate(None)
    assert reader.rows_per_second is None
    assert next_chunk(reader).chunk.num_rows == 10
    assert clock.now == pytest.approx(100.25)
    with pytest.raises(BarrierError):
        reader.set_rate(-1)


def test_a_time_limit_loses_nothing() -> None:
    reader, _, clock = limited(4, chunk_item(1, 0, 8))
    next_chunk(reader)
    assert reader.next_item(0.25) is None
    assert reader.next_item(0.5) is None
    assert clock.now == pytest.approx(100.75)
    assert next_chunk(reader).chunk == numbered_chunk(0, 8).slice(4)
    assert reader.next_item(0.0) is None, "and the inner reader has nothing more"


def test_at_0_nothing_comes_until_the_rate_is_changed() -> None:
    reader, inner, clock = limited(0, BarrierItem(epoch(1), True), chunk_item(2, 0, 2))
    assert reader.next_item(5) is None
    assert (clock.waits, len(inner.items)) == ([5.0], 2)
    reader.set_rate(None)
    assert isinstance(reader.next_item(5), BarrierItem)
    reader.set_rate(0)
    assert reader.next_item(5) is None
    reader.set_rate(1)
    assert next_chunk(reader).chunk.num_rows == 1
    reader.set_rate(0)
    assert reader.next_item(1) is None, "also inside a chunk"
    reader.set_rate(1)
    assert next_chunk(reader).chunk.num_rows == 1


def test_a_reader_that_stands_still_wakes_when_the_rate_is_changed() -> None:
    reader = RateLimitedReader(Items(chunk_item(1, 0, 2)), 0)
    timer = threading.Timer(0.02, reader.set_rate, (None,))
    timer.start()
    item = reader.next_item(30)
    timer.join()
    assert isinstance(item, ChunkItem)


@pytest.mark.parametrize("anew", ["rewind", "init"])
def test_m3_a_reader_that_begins_anew_forgets_the_pieces_of_before(anew: str) -> None:
    reader, inner, _ = limited(2, chunk_item(1, 0, 6))
    half = next_chunk(reader)
    inner.items.append(chunk_item(1, 7, 2))
    getattr(reader, anew)()
    reader.start_from()
    assert inner.calls == [anew, "start_from"]
    with pytest.raises(InvalidOffset):
        reader.truncate(half.offset)
    fresh = next_chunk(reader)
    assert fresh.chunk == numbered_chunk(700, 2), "not the rest of the chunk of before"
    with pytest.raises(InvalidOffset):
        reader.truncate(half.offset)
    reader.truncate(fresh.offset)
    assert inner.truncated == [LogOffset(epoch(1), 7)]
    with pytest.raises(InvalidOffset):
        reader.truncate(fresh.offset)
    reader.close()
    assert inner.calls[-1] == "close"


def test_a_rate_is_kept_over_any_time() -> None:
    rate = RowRate(10)
    assert rate.wait(5.0) == 0
    rate.take(30, 5.0)
    assert rate.wait(5.0) == 3.0
    assert rate.wait(7.5) == 0.5
    assert rate.wait(100.0) == 0
    rate.take(10, 100.0)
    assert rate.wait(100.0) == 1.0, "what was not used is not saved up"
    rate.change(0, 100.5)
    assert rate.wait(101.0) is None
    rate.change(5, 200.0)
    assert rate.wait(200.0) == 1.0, "what was owed before the pause is owed still"
    rate.change(None, 200.0)
    assert rate.wait(200.0) == 0

"""A rate-limited reader over a real log: pieces of chunks, moves, and barriers that a sink passes over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.store.sinks.tools import Pipe

from headwater.log_store import BarrierItem, ChunkItem, InvalidOffset
from headwater.log_store.rate_limit import RateLimitedReader
from headwater.log_store.testing import epoch, numbered_chunk, rows_of
from headwater.state import StateStore
from headwater.stream import VnodeBitmap

Reopen = Callable[[], StateStore]
EVEN = VnodeBitmap.of(range(0, 256, 2), 256)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float | None) -> None:
        assert seconds is not None
        self.now += seconds


def limited(pipe: Pipe, rate: int) -> RateLimitedReader:
    clock = Clock()
    reader = RateLimitedReader(pipe.reader, rate, clock=clock, wait=clock.wait)
    reader.init(5)
    reader.start_from()
    return reader


def next_chunk(reader: RateLimitedReader) -> ChunkItem:
    item = reader.next_item(10)
    assert isinstance(item, ChunkItem)
    return item


@pytest.mark.parametrize("max_rows", [0, 1000])
def test_m3_vnodes_move_while_a_chunk_is_handed_out_in_pieces(reopen: Reopen, log_format: int, max_rows: int) -> None:
    pipe = Pipe.open(reopen(), 1, log_format, max_rows=max_rows)
    whole = numbered_chunk(0, 60)
    pipe.writer.write_chunk(whole)
    reader = limited(pipe, 25)
    half = next_chunk(reader)
    reader.truncate(half.offset)
    stale = next_chunk(reader)
    pipe.write(2, new_vnode_bitmap=EVEN)
    reader.init(5)
    reader.start_from()
    with pytest.raises(InvalidOffset):
        reader.truncate(stale.offset)
    found = []
    while isinstance(item := reader.next_item(10), ChunkItem):
        found.append(item.chunk)
        assert item.chunk_id > stale.chunk_id
    assert rows_of(found) == rows_of(whole.filter_vnodes(EVEN)), "all of them: a part of a chunk was never done"
    assert isinstance(item, BarrierItem)
    reader.truncate(item.offset)
    pipe.write(3)
    pipe.write(4)
    again = limited(Pipe.open(reopen(), 4, log_format, vnodes=EVEN), 25)
    item = again.next_item(10)
    assert (type(item), item and item.epoch) == (BarrierItem, epoch(2))


def test_25_26_a_sink_that_truncates_later_pieces_only(reopen: Reopen, log_format: int) -> None:
    pipe = Pipe.open(reopen(), 1, log_format)
    for number in (1, 2):
        pipe.write(number + 1, numbered_chunk(100 * number, 10))
    reader = limited(pipe, 6)
    for _ in range(3):
        reader.next_item(10)
    half = next_chunk(reader)
    assert half.epoch == epoch(2)
    reader.truncate(half.offset)
    pipe.write(4)
    pipe.write(5)
    again = limited(Pipe.open(reopen(), 5, log_format), 6)
    found = [next_chunk(again), next_chunk(again)]
    assert [item.epoch for item in found] == [epoch(2)] * 2, "epoch 1 is done, with its barrier"
    assert rows_of([item.chunk for item in found]) == rows_of(numbered_chunk(200, 10)), "its chunk was half done"

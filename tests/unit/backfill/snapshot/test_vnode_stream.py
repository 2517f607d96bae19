"""A task reads vnodes in key order, each row once, from and to any key, and can be resumed after any batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import pyarrow as pa
import pytest
from tests.unit.backfill.snapshot.memory_table import MemoryTable, position

from headwater.backfill.snapshot.vnode_stream import VnodeStream

EPOCH = 7


def filled(rows: int = 40) -> MemoryTable:
    table = MemoryTable(4)
    table.commit(EPOCH, {key: key for key in range(rows)})
    table.commit(EPOCH + 1, {key: -key for key in range(rows)}, deletes=(0,))
    return table


def ids(batches: Iterator[pa.RecordBatch]) -> list[int]:
    return [key for batch in batches for key in batch.column("id").to_pylist()]


def by_vnode(*vnodes: int, rows: int = 40) -> list[int]:
    return [key for vnode in vnodes for key in range(vnode, rows, 4)]


def test_rows_come_by_vnode_and_key_as_they_were_at_the_epoch() -> None:
    table = filled()
    assert ids(iter(VnodeStream(table, EPOCH, (0, 4)))) == by_vnode(0, 1, 2, 3)
    assert ids(iter(VnodeStream(table, EPOCH, (1, 3)))) == by_vnode(1, 2)


def test_s5_a_stream_without_rows_ends() -> None:
    assert ids(iter(VnodeStream(filled(0), EPOCH, (0, 4)))) == []


def test_one_vnode_is_read_between_two_keys() -> None:
    stream = VnodeStream(filled(), EPOCH, (1, 2), start=position(9), end=position(21))
    assert ids(iter(stream)) == [9, 13, 17]


def test_one_batch_is_read_at_a_time() -> None:
    table = filled()
    rows = iter(VnodeStream(table, EPOCH, (0, 4)))
    for number in range(1, 4):
        next(rows)
        assert table.reads == number * table.batch_rows


@pytest.mark.parametrize("batches", range(17))
def test_a_stream_that_is_resumed_gives_the_rest_once(batches: int) -> None:
    table = filled()
    stream = VnodeStream(table, EPOCH, (0, 4))
    assert stream.next_key == (0, None)
    before = ids(islice(stream, batches))
    vnode, start = stream.next_key
    after = ids(iter(VnodeStream(table, EPOCH, (vnode, 4), start=start)))
    assert before + after == by_vnode(0, 1, 2, 3)


def test_s3_a_read_that_is_open_for_long_resumes_itself_where_it_is() -> None:
    table, seconds = filled(), count()
    opened: list[tuple[int, bytes | None]] = []
    snapshot = table.snapshot

    def watched(epoch: int, vnodes: tuple[int, int], **bounds: Any) -> Iterator[pa.RecordBatch]:
        opened.append((vnodes[0], bounds["start"]))
        return snapshot(epoch, vnodes, **bounds)

    table.snapshot = watched  # type: ignore[method-assign]
    stream = VnodeStream(table, EPOCH, (0, 4), end=position(31), reopen_seconds=3, clock=lambda: float(next(seconds)))
    assert ids(iter(stream)) == [key for key in by_vnode(0, 1, 2, 3) if key < 31 or key % 4 != 3]
    assert opened[:2] == [(0, None), (0, position(32) + b"\x00")]
    assert len(opened) > 3


def test_s6_what_a_read_raises_comes_out_of_the_stream() -> None:
    table = filled()
    table.base_epoch = EPOCH + 1
    with pytest.raises(AssertionError, match="gone"):
        ids(iter(VnodeStream(table, EPOCH, (0, 4))))

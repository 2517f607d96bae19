"""Batches made by another thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

from headwater.system.read_ahead import ahead


def numbered(count: int) -> Iterator[pa.RecordBatch]:
    for number in range(count):
        yield pa.record_batch({"n": [number]})


def test_batches_come_in_their_order() -> None:
    assert [batch.column(0)[0].as_py() for batch in ahead(numbered(50))] == list(range(50))


def test_nothing_is_an_end_at_once() -> None:
    assert list(ahead([])) == []


def test_an_error_comes_after_the_batches_before_it() -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield from numbered(3)
        raise ValueError("broken")

    batches = ahead(broken())
    assert [next(batches).column(0)[0].as_py() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="broken"):
        next(batches)


def test_no_more_is_made_than_may_be_held() -> None:
    made, asked = [], threading.Semaphore(0)

    def counted() -> Iterator[pa.RecordBatch]:
        for batch in numbered(20):
            made.append(batch)
            asked.release()
            yield batch

    batches = ahead(counted(), held=2)
    next(batches)
    for _ in range(4):  # one taken, two held, one that waits for room
        assert asked.acquire(timeout=10)
    assert not asked.acquire(timeout=0.3)
    assert len(made) == 4
    batches.close()


def test_given_up_early_the_batches_are_closed_by_the_thread_that_made_them() -> None:
    closed, by = threading.Event(), list[str]()

    def closing() -> Iterator[pa.RecordBatch]:
        try:
            yield from numbered(100)
        finally:
            by.append(threading.current_thread().name)
            closed.set()

    batches = ahead(closing())
    next(batches)
    batches.close()
    assert closed.wait(10)
    assert by == ["headwater-ahead"]

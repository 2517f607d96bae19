"""Deliveries that finish in any order (scenarios 21–24)."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from headwater.log_store.delivery import DeliveryFutures
from headwater.log_store.errors import InvalidOffset
from headwater.log_store.offset import LogOffset
from headwater.log_store.testing import epoch

CHUNKS = [LogOffset(epoch(1), number) for number in range(4)]
BARRIER = LogOffset(epoch(1))


def futures(count: int) -> list[Future[None]]:
    return [Future() for _ in range(count)]


def test_21_without_deliveries_there_is_nothing_to_truncate() -> None:
    assert DeliveryFutures(2).next_offset(0) is None


def test_22_a_chunk_is_truncated_once_it_is_delivered_and_then_its_barrier() -> None:
    deliveries, (only,) = DeliveryFutures(2), futures(1)
    deliveries.add(CHUNKS[0], only)
    assert deliveries.next_offset(0.01) is None
    threading.Timer(0.02, only.set_result, [None]).start()
    assert deliveries.next_offset(5) == CHUNKS[0]
    deliveries.add_barrier(BARRIER)
    assert deliveries.next_offset(0) == BARRIER
    assert deliveries.next_offset(0) is None


def test_23_finished_neighbours_are_one_offset_and_a_barrier_ends_them() -> None:
    deliveries, (first, second, third) = DeliveryFutures(9), futures(3)
    deliveries.add(CHUNKS[0], first)
    deliveries.add(CHUNKS[1], second)
    second.set_result(None)
    assert deliveries.next_offset(0) is None
    first.set_result(None)
    assert deliveries.next_offset(0) == CHUNKS[1]
    deliveries.add_barrier(BARRIER)
    deliveries.add(LogOffset(epoch(2), 0), third)
    third.set_result(None)
    assert deliveries.next_offset(0) == BARRIER
    assert deliveries.next_offset(0) == LogOffset(epoch(2), 0)


def test_24_one_delivery_too_many_waits_for_the_oldest() -> None:
    deliveries, under_way = DeliveryFutures(2), futures(4)
    assert [deliveries.add(CHUNKS[place], under_way[place]) for place in range(2)] == [False, False]
    assert deliveries.under_way == 2
    threading.Timer(0.02, under_way[0].set_result, [None]).start()
    assert deliveries.add(CHUNKS[2], under_way[2])
    assert deliveries.under_way == 2
    under_way[1].set_result(None)
    deliveries.await_one()
    assert deliveries.under_way == 1
    assert deliveries.next_offset(0) == CHUNKS[1], "what was waited for is still to be truncated"
    deliveries.clear()
    assert deliveries.next_offset(0) is None


@pytest.mark.parametrize("error", [OSError("down"), TimeoutError("the sink's own")])
def test_the_first_delivery_that_failed_is_raised_and_nothing_after_it_is_truncated(error: Exception) -> None:
    deliveries, (first, second) = DeliveryFutures(2), futures(2)
    deliveries.add(CHUNKS[0], first)
    deliveries.add(CHUNKS[1], second)
    second.set_result(None)
    first.set_exception(error)
    for _ in range(2):
        with pytest.raises(type(error)):
            deliveries.next_offset(0)
    with pytest.raises(type(error)):
        deliveries.add(CHUNKS[2], Future())


def test_what_is_out_of_order_is_refused() -> None:
    deliveries = DeliveryFutures(2)
    deliveries.add_barrier(BARRIER)
    with pytest.raises(InvalidOffset):
        deliveries.add(CHUNKS[0], Future())
    with pytest.raises(InvalidOffset):
        DeliveryFutures(0)

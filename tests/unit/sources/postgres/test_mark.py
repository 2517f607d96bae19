"""Marks: which transactions a snapshot contains, told from positions alone."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.sources.errors import InvalidOffset
from headwater.sources.postgres.mark import PostgresMark
from headwater.sources.postgres.offset import POSITION_TYPE, PostgresOffset, positions_of
from headwater.sources.snapshots import mark_from_json


def positions(xids: list[int], lsns: list[int] | None = None) -> pa.FixedSizeBinaryArray:
    wrapped = np.array([xid & 0xFFFFFFFF for xid in xids], np.uint32)
    return positions_of(np.array(lsns or [500] * len(xids), np.uint64), np.arange(len(xids), dtype=np.uint32), wrapped)


def test_what_had_ended_is_contained_and_what_ran_or_came_later_is_not() -> None:
    mark = PostgresMark.parse("100:110:100,103,104", 0, 1000)
    found = mark.contains(positions([3, 99, 100, 101, 102, 103, 104, 105, 109, 110, 111, 5000]))
    assert found.tolist() == [True, True, False, True, True, False, False, True, True, False, False, False]
    assert (mark.unseen(positions([99, 100, 110])) == [False, True, True]).all()


def test_the_place_in_the_log_decides_where_it_is_certain() -> None:
    mark = PostgresMark.parse("100:110:103", 400, 600)
    found = mark.contains(positions([103, 103, 101, 101, 5_000], [399, 400, 599, 600, 1]))
    assert found.tolist() == [True, False, True, False, True]
    assert mark.low == PostgresOffset.at(400)
    assert mark.high == PostgresOffset.at(600)


def test_the_marks_of_a_standby_go_by_the_log_alone() -> None:
    mark = PostgresMark.parse("100:110:", 500, 500)
    assert mark.contains(positions([50, 50, 500], [499, 500, 499])).tolist() == [True, False, True]


@given(
    st.integers(3, 2**40),
    st.lists(st.integers(0, 5000), max_size=50),
    st.lists(st.integers(-(2**31) + 6000, 2**31 - 6000), min_size=1, max_size=50),
)
def test_numbers_without_their_epoch_are_those_nearest(xmin: int, running: list[int], asked: list[int]) -> None:
    xip = tuple(sorted({xmin + distance for distance in running}))
    mark = PostgresMark(xmin, xmin + 5001, xip, PostgresOffset.at(0).lsn, PostgresOffset.at(1000).lsn)
    xids = [max(3, mark.xmax + distance) for distance in asked]
    expected = [xid < mark.xmax and xid not in xip for xid in xids]
    assert mark.contains(positions(xids)).tolist() == expected
    assert mark_from_json(mark.to_json()) == mark


def test_a_part_of_a_batch_is_asked_for_that_part() -> None:
    mark = PostgresMark.parse("100:110:103", 0, 1000)
    every = positions([101, 103, 105, 110])
    assert mark.contains(every.slice(1, 2)).tolist() == [False, True]
    assert mark.contains(every.slice(4)).tolist() == []
    assert mark.contains(pa.array([], POSITION_TYPE)).tolist() == []


def test_a_mark_with_thousands_of_running_transactions_is_quick_and_can_be_sent() -> None:
    xmin = 10**12
    mark = PostgresMark(
        xmin, xmin + 40_000, tuple(range(xmin, xmin + 40_000, 2)), PostgresOffset.at(0).lsn, PostgresOffset.at(9).lsn
    )
    found = mark.contains(positions(list(range(xmin, xmin + 40_000)), [1] * 40_000))
    assert found.tolist() == [False, True] * 20_000
    assert pickle.loads(pickle.dumps(mark)) == mark
    assert mark_from_json(mark.to_json()) == mark
    assert len(mark.to_json()) < 8 * 20_000


@pytest.mark.parametrize("text", ['{"Postgres":{}}', '{"Postgres":{"xmin":"a"}}', '{"Oracle":{}}', "{}"])
def test_what_is_no_mark_is_refused(text: str) -> None:
    with pytest.raises(InvalidOffset):
        mark_from_json(text)

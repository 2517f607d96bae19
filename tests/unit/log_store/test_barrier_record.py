"""Barrier records, one by one and many at once."""

from __future__ import annotations

import pytest

from headwater.log_store.errors import LogCorrupt, UnknownVersion
from headwater.log_store.serde import BarrierRecord
from headwater.stream import VnodeBitmap

HALVES = VnodeBitmap.full(256).split(2)


def record(number: int) -> BarrierRecord:
    """Records that differ in every field, now and then also in their vnodes."""
    odd = number % 2 == 1
    return BarrierRecord(
        odd, number, number * 100, 1, 1 + number, HALVES[number // 3 % 2], number * 1000, 1 + number % 2, odd, not odd
    )


def test_many_records_are_the_same_as_one_by_one() -> None:
    made = [record(number) for number in range(9)]
    stored = [one.to_bytes() for one in made]
    assert list(BarrierRecord.from_many(stored)) == made == [BarrierRecord.from_bytes(data) for data in stored]
    assert list(BarrierRecord.from_many([])) == []


@pytest.mark.parametrize("damaged", [b"", b"{", b"1", b"[]", b'{"v":1}', b"{},{}", b"\xff", record(1).to_bytes()[:-1]])
def test_the_records_before_a_damaged_one_are_read(damaged: bytes) -> None:
    first, second = record(1), record(2)
    found = BarrierRecord.from_many([first.to_bytes(), second.to_bytes(), damaged, first.to_bytes()])
    assert [next(found), next(found)] == [first, second]
    with pytest.raises(LogCorrupt):
        next(found)
    with pytest.raises(LogCorrupt):
        BarrierRecord.from_bytes(damaged)


def test_vnodes_that_do_not_fit_are_called_corrupt() -> None:
    data = record(1).to_bytes().replace(b"[[0,128]]", b"[[0,257]]")
    with pytest.raises(LogCorrupt):
        BarrierRecord.from_bytes(data)


def test_a_record_of_a_later_release_asks_for_an_upgrade() -> None:
    later = record(1).to_bytes().replace(b'"v":1', b'"v":2')
    with pytest.raises(UnknownVersion, match="Upgrade"):
        list(BarrierRecord.from_many([record(1).to_bytes(), later]))

"""Positions of SQL Server: their order, their JSON, and the bytes of rows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from headwater.sources.errors import CommitsCameLate, ForeignOffset, InvalidOffset
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import mark_from_json
from headwater.sources.sqlserver.offset import Lsn, SqlServerMark, SqlServerOffset, positions_of
from headwater.sources.written import WrittenOffset

COMMIT = Lsn.parse("00000027:00000758:0005")
LATER = Lsn.parse("00000027:00000760:0001")
TOLD = Lsn.parse("00000027:00000740:0003")
WRITTEN = Path(__file__).parents[3] / "fixtures/positions/sqlserver.jsonl"


def test_a_number_is_read_in_every_form_that_the_server_writes() -> None:
    assert Lsn.parse("0x00000027000007580005") == Lsn.parse("00000027:00000758:0005") == COMMIT
    assert Lsn.parse(bytes.fromhex("00000027000007580005")) == COMMIT
    assert COMMIT.hex == "0x00000027000007580005"
    assert Lsn.parse("00000027:00000758:FFFF").following == Lsn.parse("00000027:00000759:0000")
    assert Lsn.parse("00000027:00000759:0000").preceding == Lsn.parse("00000027:00000758:FFFF")


@pytest.mark.parametrize("text", ["", "0x27", "00000027:00000758", "zz000027:00000758:0005", b"\0" * 9])
def test_what_is_no_number_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidOffset):
        Lsn.parse(text)


def test_c19_changes_are_ordered_by_commit_then_change_then_serial_then_operation() -> None:
    change, other = Lsn.parse("00000027:00000750:0001"), Lsn.parse("00000027:00000750:0002")
    ordered = [
        SqlServerOffset(COMMIT, change, 0, 1),
        SqlServerOffset(COMMIT, change, 0, 2),
        SqlServerOffset(COMMIT, change, 1, 3),
        SqlServerOffset(COMMIT, change, 1, 4),
        SqlServerOffset(COMMIT, other, 0, 2),
        SqlServerOffset(COMMIT),
        SqlServerOffset(LATER, change, 0, 1),
        SqlServerOffset(LATER),
    ]
    assert all(one < other for one, other in pairwise(ordered))
    assert len({offset.to_json() for offset in ordered}) == len(ordered)
    assert [CdcOffset.from_json(offset.to_json()) for offset in ordered] == ordered
    assert ordered[-1].has_passed(ordered[0])
    assert not ordered[4].has_passed(ordered[5])


def test_the_json_is_the_servers_text_and_reads_colons() -> None:
    assert SqlServerOffset(COMMIT).to_json() == '{"SqlServer":{"commit_lsn":"0x00000027000007580005"}}'
    assert CdcOffset.from_json('{"SqlServer":{"commit_lsn":"00000027:00000758:0005"}}') == SqlServerOffset(COMMIT)


@pytest.mark.parametrize("text", WRITTEN.read_text().splitlines())
def test_what_was_written_once_is_read_and_written_the_same(text: str) -> None:
    read = mark_from_json(text) if '"at"' in text else CdcOffset.from_json(text)
    assert read.to_json() == text


def test_the_last_commit_that_was_told_is_kept_and_is_no_part_of_the_order() -> None:
    idle = SqlServerOffset(COMMIT, told_lsn=TOLD)
    assert idle == SqlServerOffset(COMMIT)
    assert idle.has_passed(SqlServerOffset(COMMIT))
    read = CdcOffset.from_json(idle.to_json())
    assert isinstance(read, SqlServerOffset)
    assert read.told == TOLD
    assert SqlServerOffset(COMMIT).told == COMMIT
    assert SqlServerOffset(COMMIT, told_lsn=COMMIT).to_json() == SqlServerOffset(COMMIT).to_json()


def test_the_decimal_form_is_the_same_number() -> None:
    assert Lsn.of_decimal(39_0000001880_00005) == COMMIT


@pytest.mark.parametrize(
    "fields",
    [
        "{}",
        '{"commit_lsn":"0x00000027000007580005","told_lsn":7}',
        '{"commit_lsn":"0x00000027000007580005","told_lsn":"0x00000027000007580006"}',
        '{"commit_lsn":5}',
        '{"commit_lsn":"0x00000027000007580005","change_lsn":3}',
        '{"commit_lsn":"0x00000027000007580005","change_lsn":"0x00000027000007580005","operation":9}',
        '{"commit_lsn":"0x00000027000007580005","change_lsn":"0x00000027000007580005","event_serial_no":-1}',
        '{"commit_lsn":"0xFF000027000007580005"}',
    ],
)
def test_c17_a_field_that_is_missing_or_no_number_is_refused(fields: str) -> None:
    with pytest.raises(InvalidOffset):
        CdcOffset.from_json(f'{{"SqlServer":{fields}}}')


def test_positions_of_another_kind_have_no_order() -> None:
    with pytest.raises(ForeignOffset):
        assert SqlServerOffset(COMMIT) < WrittenOffset(1)


def test_places_keep_the_order_of_the_numbers() -> None:
    numbers = sorted(
        Lsn.parse(f"{file:08X}:{block:08X}:{record:04X}")
        for file in (1, 2, 0xFFFFFF)
        for block in (0, 1, 0x3FFFFFF)
        for record in (0, 1, 0xFFF)
    )
    places = [number.place for number in numbers]
    assert places == sorted(set(places))
    assert all(place % 2 == 0 and place < 1 << 63 for place in places)


def test_rows_of_history_lie_after_the_changes_that_they_have_and_before_the_later_ones() -> None:
    of_rows = positions_of(np.array([COMMIT.place, LATER.place], np.uint64), np.array([7, 0], np.uint32)).to_pylist()
    here = SqlServerOffset(COMMIT)
    assert of_rows[0] < here.position_after(None) < of_rows[1]
    assert of_rows[0] < here.position_after(of_rows[0]) < of_rows[1]


def test_a_mark_contains_what_committed_up_to_its_place() -> None:
    mark = SqlServerMark(SqlServerOffset(COMMIT))
    positions = positions_of(
        np.array([COMMIT.preceding.place, COMMIT.place, LATER.place], np.uint64), np.zeros(3, np.uint32)
    )
    assert mark.contains(positions).tolist() == [True, True, False]
    assert mark.unseen(positions).tolist() == [False, False, True]
    assert mark.contains(pa.array([], pa.binary(16))).tolist() == []
    read = mark_from_json(mark.to_json())
    assert isinstance(read, SqlServerMark)
    assert read.at == mark.at
    with pytest.raises(InvalidOffset):
        mark_from_json('{"SqlServer":{}}')


def test_a_mark_before_whose_place_a_commit_is_shown_late_is_an_error() -> None:
    mark = mark_from_json(SqlServerMark(SqlServerOffset(COMMIT, told_lsn=TOLD)).to_json())
    at = [TOLD.preceding.place, TOLD.place, LATER.place]
    assert mark.contains(positions_of(np.array(at, np.uint64), np.zeros(3, np.uint32))).tolist() == [True, True, False]
    late = positions_of(np.array([TOLD.following.place], np.uint64), np.zeros(1, np.uint32))
    with pytest.raises(CommitsCameLate) as caught:
        mark.contains(late)
    assert caught.value.next_step == "Run: headwater resnapshot"

"""Where a stream is: over files, over 4 GiB, and transaction by transaction."""

from __future__ import annotations

from uuid import UUID

import pytest

from headwater.sources.errors import SourceMisconfigured, SourceProtocolError, SourceUnreachable
from headwater.sources.mysql.binlog.events import FLAG_ARTIFICIAL, EventHeader, Gtid, MariaDbGtid, Rotate
from headwater.sources.mysql.changes import LogPlace
from headwater.sources.mysql.gtid import MariaDbGtids, MySqlGtids
from headwater.sources.mysql.offset import MySqlOffset

A = UUID(int=7)


def header(end: int, size: int = 50, flags: int = 0) -> EventHeader:
    return EventHeader(1000, 33, 1, size, end % (1 << 32), flags)


def gtid(number: int, end: int) -> Gtid:
    anonymous = number == 0
    return Gtid(header(end), A, "", number, anonymous, 0, 0, 5_000_000, 5_000_000, None)


def maria(number: int, end: int) -> MariaDbGtid:
    return MariaDbGtid(header(end), 0, 1, number, None, False, True, False, False, False)


def transact(log: LogPlace, event: Gtid | MariaDbGtid, end: int) -> int:
    """One whole transaction, to *end*; its place."""
    log.pass_event(event.header)
    log.begin(event)
    place = log.place
    log.pass_event(header(end))
    log.end()
    return place


def test_a_file_that_rolls_over_at_999999_goes_on() -> None:
    log = LogPlace(MySqlOffset("binlog.999999", 1000, None, "s"), "s")
    first = transact(log, gtid(0, 1050), 1200)
    before = log.boundary
    log.rotate(Rotate(header(1250), "binlog.1000000", 4))
    log.pass_event(header(127))
    second = transact(log, gtid(0, 177), 300)
    assert before < log.boundary
    assert first < before.place < second < log.boundary.place
    assert (log.boundary.filename, log.boundary.position) == ("binlog.1000000", 300)


def test_positions_that_wrap_at_4_gib_go_on() -> None:
    log = LogPlace(MySqlOffset("binlog.000001", 1000, None, "s"), "s")
    log.pass_event(gtid(0, 1050).header)
    log.begin(gtid(0, 1050))
    for end in range(1 << 30, 5 << 30, 1 << 30):
        log.pass_event(header(end + 10, 1 << 30))
    log.end()
    large = log.boundary
    assert large.position == (4 << 30) + 10
    transact(log, gtid(0, (4 << 30) + 60), (4 << 30) + 200)
    assert log.boundary.position == (4 << 30) + 200
    assert large < log.boundary


def test_places_by_number_are_the_same_whatever_the_files_are() -> None:
    start = MySqlOffset("binlog.000009", 1000, MySqlGtids.parse(f"{A}:1-5"), "one")
    stays, moves = LogPlace(start, "one"), LogPlace(start, "two")
    moves.rotate(Rotate(header(0, flags=FLAG_ARTIFICIAL), "other.000001", 4))
    assert transact(stays, gtid(6, 1050), 1200) == transact(moves, gtid(6, 300), 400) == start.place
    assert stays.boundary == moves.boundary
    assert moves.boundary.filename == "other.000001"
    assert start < stays.boundary


def test_events_that_are_in_no_file_move_nothing() -> None:
    log = LogPlace(MySqlOffset("binlog.000001", 1000, None, "s"), "s")
    log.pass_event(header(0))
    log.pass_event(header(400, flags=FLAG_ARTIFICIAL))
    assert log.boundary.position == 1000
    log.heartbeat("binlog.000001", 1100)
    assert log.boundary.position == 1100


def test_a_transaction_of_mariadb_moves_its_domain() -> None:
    log = LogPlace(MySqlOffset("b.1", 4, MariaDbGtids.parse("0-1-5,3-1-2"), "s"), "s")
    transact(log, maria(6, 100), 200)
    assert str(log.boundary.gtids) == "0-1-6,3-1-2"


def test_a_transaction_without_its_number_ends_a_capture_by_numbers() -> None:
    log = LogPlace(MySqlOffset("b.1", 4, MySqlGtids(), "s"), "s")
    with pytest.raises(SourceMisconfigured, match="gtid_mode"):
        log.begin(gtid(0, 100))


def test_a_log_that_breaks_off_within_a_transaction_is_read_again() -> None:
    log = LogPlace(MySqlOffset("b.1", 4, MySqlGtids(), "s"), "s")
    log.begin(gtid(1, 100))
    with pytest.raises(SourceProtocolError):
        log.begin(gtid(2, 200))
    with pytest.raises(SourceUnreachable):
        log.rotate(Rotate(header(250), "b.2", 4))

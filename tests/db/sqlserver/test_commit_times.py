"""``_commit_timestamp`` of servers whose clocks are put on and back: on the double alone, whose clock can be set."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.db.sqlserver.running import SqlServerCapture
from tests.servers.sqlserver import track
from tests.servers.sqlserver_double.server import SqlServerDouble

from headwater.sources.diagnosis import Level
from headwater.sources.errors import SourceMisconfigured
from headwater.sources.sqlserver.connection import Dsn
from headwater.sources.sqlserver.doctor import examine

BERLIN = "W. Europe Standard Time"
OPTION = "?time_zone=W.+Europe+Standard+Time"
TICKS = "shop.ticks"
AUTUMN = [dt.datetime(2025, 10, 25, 23, 50, tzinfo=dt.UTC) + dt.timedelta(minutes=5 * n) for n in range(34)]
"""From 01:50 over 02:00 to 03:00, twice, to 03:35."""


def create_ticks(double: SqlServerDouble, zone: str = BERLIN) -> None:
    double.engine.zone = zone
    double.execute("CREATE TABLE shop.ticks (id int NOT NULL PRIMARY KEY)")
    track(double, "ticks")


def commit(double: SqlServerDouble, first: int, times: Sequence[dt.datetime]) -> None:
    """A row at each of *times*, shown all at once."""
    double.engine.agent_runs = False
    double.execute(*(f"INSERT INTO shop.ticks VALUES ({first + n})" for n in range(len(times))))
    for one, time in zip(double.engine.commits[-len(times) :], times, strict=True):
        one.time = time
    double.engine.agent_runs = True


def begun(double: SqlServerDouble, folder: Path, options: str = "") -> SqlServerCapture:
    """A capture that has a position, and does not run."""
    capture = SqlServerCapture(double, folder, [TICKS], dsn=double.dsn_of("sa", options))
    capture.start()
    capture.stop()
    return capture


def told(capture: SqlServerCapture) -> list[dt.datetime]:
    return [row["_commit_timestamp"] for row in capture.rows(TICKS)]


@pytest.mark.parametrize(
    ("says_zone", "options"), [(True, ""), (False, OPTION)], ids=["the server says its zone", "the address says it"]
)
def test_commits_have_their_instant_also_in_the_hour_that_comes_twice_and_after_a_restart_in_it(
    double: SqlServerDouble, tmp_path: Path, says_zone: bool, options: str
) -> None:
    create_ticks(double)
    double.engine.says_zone = says_zone
    capture = begun(double, tmp_path, options)
    for first, last in ((0, 8), (8, 16), (16, 22), (22, 34)):  # three of the starts are in the hour that comes twice
        commit(double, first, AUTUMN[first:last])
        capture.start()
        capture.catch_up()
        capture.stop()
    assert told(capture) == AUTUMN


def test_commits_of_last_summer_are_no_hour_off_in_winter(double: SqlServerDouble, tmp_path: Path) -> None:
    times = [dt.datetime(2025, month, 1, 12, tzinfo=dt.UTC) for month in (1, 4, 7, 11)]
    create_ticks(double)
    capture = begun(double, tmp_path)
    commit(double, 0, times)
    capture.start()
    capture.catch_up()
    capture.stop()
    assert told(capture) == times


def test_without_a_zone_the_offset_of_now_is_taken(double: SqlServerDouble, tmp_path: Path) -> None:
    create_ticks(double)
    double.engine.says_zone = False
    capture = begun(double, tmp_path)
    now = dt.datetime.now(dt.UTC).replace(microsecond=0)
    commit(double, 0, [now])
    capture.start()
    capture.catch_up()
    capture.stop()
    assert told(capture) == [now]


@pytest.mark.parametrize("zone", ["Lord Howe Standard Time", "Nowhere Standard Time"])
def test_a_zone_that_is_not_that_of_the_server_is_refused(double: SqlServerDouble, tmp_path: Path, zone: str) -> None:
    create_ticks(double)
    capture = SqlServerCapture(double, tmp_path, [TICKS], dsn=double.dsn_of("sa", f"?time_zone={zone}"))
    capture.start()
    commit(double, 0, AUTUMN[:1])
    failure = capture.wait_for_end()
    assert isinstance(failure, SourceMisconfigured)
    assert "sys.time_zone_info" in str(failure)
    assert capture.rows(TICKS) == []


def test_the_doctor_tells_whether_times_are_exact(double: SqlServerDouble) -> None:
    def level(options: str = "") -> Level:
        diagnosis = examine(Dsn(double.dsn_of("sa", options)))
        (finding,) = [one for one in diagnosis.findings if one.check == "time zone"]
        return finding.level

    double.engine.zone = BERLIN
    assert level() is Level.OK
    double.engine.says_zone = False
    assert level() is Level.NOTE
    assert level(OPTION) is Level.OK
    assert level("?time_zone=UTC") is Level.PROBLEM

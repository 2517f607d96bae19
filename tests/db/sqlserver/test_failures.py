"""What ends a capture of SQL Server, and what it says then: mostly on the double, which can be made to do it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.db.sqlserver.running import TABLE, SqlServerCapture, create, running
from tests.servers.sqlserver import AnySqlServer
from tests.servers.sqlserver_double.server import PASSWORD, SqlServerDouble

from headwater.errors import HeadwaterError
from headwater.sources.errors import (
    AccessDenied,
    InvalidDsn,
    LogPurged,
    ServerReplaced,
    SnapshotExpired,
    SourceBusy,
    SourceError,
    SourceMisconfigured,
    SourceNotFound,
    SourceUnreachable,
    SourceWentBack,
    UnsupportedTable,
)
from headwater.sources.open import open_source
from headwater.sources.sqlserver.changes import read_stretch
from headwater.sources.sqlserver.connection import Dsn, Session


def test_changes_that_were_cleaned_up_before_they_were_read_end_the_capture(
    double: SqlServerDouble, tmp_path: Path
) -> None:
    create(double)
    capture = SqlServerCapture(double, tmp_path, [TABLE])
    capture.start()
    double.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
    capture.catch_up()
    capture.stop()
    double.execute(
        "INSERT INTO shop.orders VALUES (2, 'a', 1, NULL)", "INSERT INTO shop.orders VALUES (3, 'a', 1, NULL)"
    )
    double.wait_for_scan()
    double.engine.purge(double.last_change())
    failure = capture.fails_to_start()
    assert isinstance(failure, LogPurged)
    assert failure.next_step == "Run: headwater resnapshot"
    assert [row["id"] for row in capture.rows(TABLE)] == [1]


def test_what_was_read_may_be_cleaned_up(double: SqlServerDouble, tmp_path: Path) -> None:
    create(double)
    with running(double, tmp_path, TABLE) as capture:
        double.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
        capture.catch_up()
        double.engine.purge(double.last_change())
        double.execute("INSERT INTO shop.orders VALUES (2, 'a', 1, NULL)")
        capture.assert_equal(TABLE)


def test_rows_that_are_cleaned_up_while_they_are_read_end_the_capture(
    double: SqlServerDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(double)

    def read_and_purged(*given: Any) -> Iterator[Any]:
        yield from read_stretch(*given)
        double.engine.purge(double.engine.scanned + 1)

    monkeypatch.setattr("headwater.sources.sqlserver.changes.read_stretch", read_and_purged)
    capture = SqlServerCapture(double, tmp_path, [TABLE])
    capture.start()
    double.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
    assert isinstance(capture.wait_for_end(), LogPurged)


def test_a_restored_database_and_another_one_are_noticed(double: SqlServerDouble, tmp_path: Path) -> None:
    create(double)
    capture = SqlServerCapture(double, tmp_path, [TABLE])
    capture.start()
    double.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
    capture.catch_up()
    capture.stop()
    broker, double.engine.broker = double.engine.broker, "another"
    assert isinstance(capture.fails_to_start(), ServerReplaced)
    double.engine.broker = broker
    fork, double.engine.fork = double.engine.fork, "another"
    assert isinstance(capture.fails_to_start(), SourceWentBack)
    double.engine.fork = fork
    double.engine.commits.clear()
    double.engine.scanned = double.engine.instances[0].start
    double.engine._block = 0x110
    failure = capture.fails_to_start()
    assert isinstance(failure, SourceWentBack)
    assert failure.next_step == "Run: headwater resnapshot"


def test_a_server_that_is_away_is_waited_for(double: SqlServerDouble, tmp_path: Path) -> None:
    create(double)
    with running(double, tmp_path, TABLE) as capture:
        for _ in range(3):
            double.inject("sys.databases", "drop")
        double.drop_connections()
        double.execute("INSERT INTO shop.orders VALUES (1, 'a', 1, NULL)")
        capture.catch_up()
        assert double.has_injected
        capture.assert_equal(TABLE)


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("sqlserver://sa:wrong@127.0.0.1:{port}/shop", AccessDenied),
        ("sqlserver://nobody:x@127.0.0.1:{port}/shop", AccessDenied),
        ("sqlserver://sa:{password}@127.0.0.1:{port}/elsewhere?connect_timeout=0.5", SourceNotFound),
        ("sqlserver://sa:{password}@127.0.0.1:1/shop", SourceUnreachable),
    ],
)
def test_an_address_that_cannot_be_used_says_why_and_never_the_password(
    double: SqlServerDouble, tmp_path: Path, address: str, error: type[HeadwaterError]
) -> None:
    given = address.format(port=double.port, password="se%20cret%2F1")
    source = open_source(given, spill=tmp_path)
    with pytest.raises(error) as caught:
        source.tables([TABLE])
    assert caught.value.next_step
    assert PASSWORD not in str(caught.value)
    assert "wrong" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["sqlserver://host", "sqlserver://host/db?ticks=maybe", "sqlserver://h/d?x=1", "mssql://h:x/d"]
)
def test_a_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidDsn) as caught:
        Dsn(text)
    assert text not in str(caught.value)


def test_tables_that_cannot_be_captured_name_the_statement_that_helps(server: AnySqlServer, tmp_path: Path) -> None:
    server.execute(
        "CREATE TABLE shop.keyless (name nvarchar(9))", "CREATE TABLE shop.off (id int NOT NULL PRIMARY KEY)"
    )
    source = open_source(server.dsn, spill=tmp_path)
    with pytest.raises(UnsupportedTable, match="ADD PRIMARY KEY"):
        source.tables(["shop.keyless"])
    with pytest.raises(UnsupportedTable, match=r"EXEC sys\.sp_cdc_enable_table @source_schema = N'shop'"):
        source.tables(["shop.off"])
    with pytest.raises(SourceNotFound, match=r"Did you mean shop\.off"):
        source.tables(["dbo.off"])
    source.close()


def test_a_database_without_change_data_capture_is_told(double: SqlServerDouble, tmp_path: Path) -> None:
    create(double)
    double.engine.has_cdc = False
    source = open_source(double.dsn, spill=tmp_path)
    with pytest.raises(SourceMisconfigured, match=r"EXEC sys\.sp_cdc_enable_db"):
        source.tables([TABLE])
    source.close()


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (208, SourceNotFound),
        (229, AccessDenied),
        (596, SourceUnreachable),
        (1205, SourceBusy),
        (3952, SourceMisconfigured),
        (3961, SnapshotExpired),
        (8134, SourceError),
        (22901, SourceMisconfigured),
        (40613, SourceUnreachable),
    ],
)
def test_errors_of_the_server_say_what_to_do(double: SqlServerDouble, number: int, error: type[HeadwaterError]) -> None:
    with Session(Dsn(double.dsn)) as session:
        double.inject("SELECT 1", number)
        with pytest.raises(error) as caught:
            session.ask("SELECT 1 AS [one]")
        assert caught.value.next_step
        if error is not SourceUnreachable:
            assert session.ask("SELECT 1 AS [one]") == [{"one": 1}]


def test_who_takes_only_some_rows_leaves_no_half_read_session(double: SqlServerDouble) -> None:
    create(double, 500)
    session = Session(Dsn(double.dsn))
    taken = session.columns("SELECT id FROM shop.orders ORDER BY id", 10)
    assert len(next(taken)[0]) == 10
    taken.close()  # type: ignore[attr-defined]
    assert not session.is_open

"""What happens to a capture when its server fails, moves, forgets, or is set up in another way."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.db.conftest import StartServer
from tests.db.mysql.running import MySqlCapture, running
from tests.db.mysql.test_capture import LOG, ORDERS, fill
from tests.servers.mariadb import MariaDbServer
from tests.servers.mysql_family import FAMILY, FILES

from headwater.capture import renewal
from headwater.databases.secret_files import in_file
from headwater.sources.errors import (
    LogPurged,
    ServerReplaced,
    SourceMisconfigured,
    SourceWentBack,
)
from headwater.sources.mysql.connection import Dsn, connect
from headwater.sources.mysql.doctor import examine
from headwater.sources.open import open_source

IMAGES = ["MINIMAL", pytest.param("NOBLOB", marks=pytest.mark.soak)]


def prepared(server: MariaDbServer) -> MariaDbServer:
    server.execute("CREATE DATABASE shop", ORDERS)
    return server


def captured(server: MariaDbServer, folder: Path, last: int = 10) -> MySqlCapture:
    """A capture of the orders that runs and has those up to *last*."""
    capture = MySqlCapture(server, folder, [LOG])
    capture.start()
    fill(server, 1, last)
    capture.catch_up()
    return capture


def assert_goes_on(replica: MariaDbServer, folder: Path, first: int, last: int) -> None:
    """A capture of *replica* over the store goes on with orders from *first* on, and has each up to *last* once."""
    moved = MySqlCapture(replica, folder, [])
    moved.start()
    fill(replica, first, last)
    moved.assert_equal(LOG)
    moved.stop()
    assert len(moved.rows(LOG)) == last
    moved.assert_once(LOG)


def replicate(replica: MariaDbServer, primary: MariaDbServer) -> None:
    """*replica* has no writes of its own yet."""
    credentials = f"MASTER_HOST='127.0.0.1', MASTER_PORT={primary.port}, MASTER_USER='headwater', "
    replica.execute(
        "STOP SLAVE",
        "RESET MASTER",
        "SET GLOBAL gtid_slave_pos = ''",
        f"CHANGE MASTER TO {credentials} MASTER_PASSWORD='{primary.password}', MASTER_USE_GTID=slave_pos",
        "START SLAVE",
    )


def wait_for_replica(replica: MariaDbServer, primary: MariaDbServer) -> None:
    (position,) = primary.execute("SELECT @@GLOBAL.gtid_binlog_pos")[0]
    assert replica.execute(f"SELECT MASTER_GTID_WAIT('{position}', 30)") == [(0,)]


def replicate_mysql(replica: MariaDbServer, primary: MariaDbServer) -> None:
    """Neither has writes of its own that count."""
    for one in (primary, replica):
        one.execute("RESET BINARY LOGS AND GTIDS")
    address = f"SOURCE_HOST='127.0.0.1', SOURCE_PORT={primary.port}, SOURCE_USER='headwater', SOURCE_AUTO_POSITION=1, "
    address += f"SOURCE_PASSWORD='{primary.password}', GET_SOURCE_PUBLIC_KEY=1"
    replica.execute(f"CHANGE REPLICATION SOURCE TO {address}", "START REPLICA")


def wait_for_mysql_replica(replica: MariaDbServer, primary: MariaDbServer) -> None:
    (executed,) = primary.execute("SELECT @@GLOBAL.gtid_executed")[0]
    assert replica.execute(f"SELECT WAIT_FOR_EXECUTED_GTID_SET('{executed}', 30)") == [(0,)]


def test_m23_a_replica_takes_over_by_transaction_numbers_without_gap_or_repeat(
    start_mysql: StartServer, tmp_path: Path
) -> None:
    primary = start_mysql("mariadb", {"server-id": "1"})
    replica = start_mysql("mariadb", {"server-id": "2", "log-bin": "other-name"})
    primary.execute("RESET MASTER")  # what made the server is not for the replica
    replicate(replica, primary)
    prepared(primary)
    wait_for_replica(replica, primary)
    replica.execute("STOP SLAVE")
    capture = MySqlCapture(primary, tmp_path, [LOG])
    capture.start()
    fill(primary, 1, 100)
    primary.execute("FLUSH LOGS")
    fill(primary, 101, 150)
    capture.catch_up()
    capture.stop()
    behind = MySqlCapture(replica, tmp_path, []).fails_to_start()
    assert isinstance(behind, SourceWentBack)
    assert "headwater resnapshot" in str(behind.next_step)
    replica.execute("START SLAVE")
    fill(primary, 151, 200)  # not captured when the primary is gone
    wait_for_replica(replica, primary)
    primary.stop()
    replica.execute("STOP SLAVE")
    assert_goes_on(replica, tmp_path, 201, 250)


@pytest.mark.skipif(os.environ.get("HEADWATER_SOAK") != "1", reason="two more servers; MariaDB shows the same")
def test_m23_a_replica_of_mysql_takes_over_too(start_mysql: StartServer, tmp_path: Path) -> None:
    primary = start_mysql("mysql", {"server-id": "1"})
    replica = start_mysql("mysql", {"server-id": "2", "log-bin": "other-name"})
    replicate_mysql(replica, primary)
    prepared(primary)
    capture = captured(primary, tmp_path, 100)
    capture.stop()
    fill(primary, 101, 150)
    wait_for_mysql_replica(replica, primary)
    primary.stop()
    replica.execute("STOP REPLICA")
    assert_goes_on(replica, tmp_path, 151, 200)


def test_another_server_is_refused_whatever_its_files_and_its_number(
    mariadb: MariaDbServer, start_mysql: StartServer, tmp_path: Path
) -> None:
    mariadb.execute(ORDERS)
    other = prepared(start_mysql("mariadb"))
    capture = captured(other, tmp_path)
    capture.stop()
    assert isinstance(MySqlCapture(mariadb, tmp_path, []).fails_to_start(), ServerReplaced)


def test_a_server_of_the_other_family_is_refused(
    mysql_servers: Callable[[str], MariaDbServer], mariadb: MariaDbServer, tmp_path: Path
) -> None:
    mariadb.execute(ORDERS)
    with running(mariadb, tmp_path, LOG) as capture:
        capture.catch_up()
    assert isinstance(MySqlCapture(mysql_servers("mysql"), tmp_path, []).fails_to_start(), ServerReplaced)


def purge(server: MariaDbServer) -> None:
    """All files but the newest; one that somebody still reads stays."""
    newest = server.execute("SHOW BINARY LOGS")[-1][0]
    end = time.monotonic() + 30
    while len(server.execute("SHOW BINARY LOGS")) > 1:
        assert time.monotonic() < end
        server.execute(f"PURGE BINARY LOGS TO '{newest}'")
        time.sleep(0.1)


def test_m22_a_purged_log_ends_the_capture_and_a_resnapshot_goes_on(server: MariaDbServer, tmp_path: Path) -> None:
    server.execute(ORDERS)
    capture = captured(server, tmp_path)
    capture.stop()
    fill(server, 11, 20)
    server.execute("FLUSH LOGS")
    fill(server, 21, 30)
    purge(server)
    failure = capture.fails_to_start()
    assert isinstance(failure, LogPurged)
    assert "headwater resnapshot" in str(failure.next_step)
    assert renewal.renew(capture.store, None) is not None
    capture.start()
    fill(server, 31, 40)
    capture.catch_up()
    assert [row["id"] for row in capture.rows(LOG)] == [*range(1, 11), *range(31, 41)]
    capture.stop()


def test_transactions_that_count_as_executed_and_are_in_no_log_end_the_capture(
    mysql_servers: Callable[[str], MariaDbServer], tmp_path: Path
) -> None:
    """As after a dump of another server was restored here while the capture ran."""
    server = mysql_servers("mysql")
    with server.fresh():
        prepared(server)
        capture = captured(server, tmp_path)
        server.execute(f"SET GLOBAL gtid_purged = '+{uuid.uuid4()}:1-5'")
        fill(server, 11, 12)
        failure = capture.wait_for_end()
        assert isinstance(failure, LogPurged)
        assert "gtid_purged was set" in str(failure)
        assert "headwater resnapshot" in str(failure.next_step)
        assert renewal.renew(capture.store, None) is not None
        capture.start()
        fill(server, 13, 14)
        capture.catch_up()
        assert [row["id"] for row in capture.rows(LOG)][-2:] == [13, 14]
        capture.stop()


def test_a_log_that_was_reset_ends_the_capture(server: MariaDbServer, tmp_path: Path) -> None:
    server.execute(ORDERS)
    capture = captured(server, tmp_path)
    capture.stop()
    server.execute("RESET MASTER" if server.kind == "MariaDB" else "RESET BINARY LOGS AND GTIDS")
    fill(server, 11, 20)
    assert isinstance(capture.fails_to_start(), SourceWentBack | ServerReplaced)


def test_a_server_without_transaction_numbers_is_followed_by_file_and_position(
    start_mysql: StartServer, tmp_path: Path
) -> None:
    server = prepared(start_mysql("mysql", FILES))
    capture = MySqlCapture(server, tmp_path, [LOG])
    capture.start()
    fill(server, 1, 10)
    server.execute("FLUSH LOGS")
    fill(server, 11, 20)
    capture.catch_up()
    capture.stop()
    fill(server, 21, 30)
    capture.start()
    server.execute("ALTER TABLE shop.orders ADD COLUMN extra int", "TRUNCATE TABLE shop.orders")
    fill(server, 31, 40)
    capture.assert_equal(LOG)
    capture.assert_once(LOG)
    offset = capture.offset()
    assert offset is not None
    assert offset.gtids is None
    capture.stop()
    fill(server, 41, 42)
    server.execute("FLUSH LOGS")
    purge(server)
    assert isinstance(capture.fails_to_start(), LogPurged)
    server.execute(
        f"CREATE USER reader@'%' IDENTIFIED BY '{server.password}'",
        "GRANT SELECT, REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO reader@'%'",
    )
    reader = Dsn(server.dsn.replace("//headwater:", "//reader:"))
    (found,) = (one for one in examine(reader, [LOG]).findings if one.check == "commits")
    server.execute(str(found.fix))
    assert not [one for one in examine(reader, [LOG]).findings if one.check == "commits"]


def test_m21_a_server_that_is_killed_comes_back_and_the_capture_goes_on(server: MariaDbServer, tmp_path: Path) -> None:
    server.execute(ORDERS, "SET GLOBAL sync_binlog = 1", "SET GLOBAL innodb_flush_log_at_trx_commit = 1")
    with running(server, tmp_path, LOG) as capture:
        fill(server, 1, 10)
        capture.catch_up()
        server.kill9()
        server.start()
        fill(server, 11, 20)
        capture.assert_equal(LOG)
        capture.assert_once(LOG)
        assert capture.capture.statistics.restarts > 0


def test_a_rotated_password_is_read_from_its_file_by_a_running_capture(mariadb: MariaDbServer, tmp_path: Path) -> None:
    server, file = mariadb, tmp_path / "shop.dsn"
    server.execute(
        ORDERS, f"CREATE USER rotated@'%' IDENTIFIED BY '{server.password}'", "GRANT ALL ON *.* TO rotated@'%'"
    )
    file.write_text(server.dsn.replace("//headwater:", "//rotated:"))
    try:
        with running(server, tmp_path, LOG, dsn=in_file(file)) as capture:
            fill(server, 1, 10)
            capture.catch_up()
            server.execute("ALTER USER rotated@'%' IDENTIFIED BY 'another'", "KILL USER rotated")
            capture.wait_for(lambda: "refused the user 'rotated'" in capture.capture.statistics.last_error)
            fill(server, 11, 20)
            file.write_text(file.read_text().replace(server.password, "another"))
            capture.assert_equal(LOG)
            capture.assert_once(LOG)
    finally:
        server.execute("DROP USER rotated@'%'")


@pytest.mark.parametrize(
    ("setting", "value", "fix"),
    [
        ("binlog_format", "MIXED", "binlog_format = ROW"),
        ("binlog_row_metadata", "MINIMAL", "binlog_row_metadata = FULL"),
    ],
)
def test_a_server_that_logs_too_little_is_refused_with_the_statement_that_mends_it(
    setting: str, value: str, fix: str, mariadb: MariaDbServer, tmp_path: Path
) -> None:
    mariadb.execute(ORDERS, f"SET GLOBAL {setting} = {value}")
    try:
        failure = MySqlCapture(mariadb, tmp_path, [LOG]).fails_to_start()
    finally:
        mariadb.execute(f"SET GLOBAL {setting} = {'ROW' if setting == 'binlog_format' else 'FULL'}")
    assert isinstance(failure, SourceMisconfigured)
    assert fix in str(failure.next_step)


def test_a_connection_notices_a_server_that_is_gone_without_a_word(mariadb: MariaDbServer) -> None:
    session = connect(Dsn(mariadb.dsn))
    try:
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert [session._sock.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [30, 10, 3]
    finally:
        session.close()


@pytest.mark.parametrize("server", FAMILY, indirect=True)
@pytest.mark.parametrize("image", IMAGES)
def test_a_server_that_logs_parts_of_rows_is_refused(server: MariaDbServer, image: str, tmp_path: Path) -> None:
    server.execute(ORDERS, f"SET GLOBAL binlog_row_image = {image}")
    try:
        failure = MySqlCapture(server, tmp_path, [LOG]).fails_to_start()
    finally:
        server.execute("SET GLOBAL binlog_row_image = FULL")
    assert isinstance(failure, SourceMisconfigured)
    assert f"binlog_row_image is {image}" in str(failure)
    assert "binlog_row_image = FULL" in str(failure.next_step)


@pytest.mark.parametrize("server", FAMILY, indirect=True)
@pytest.mark.parametrize("image", IMAGES)
def test_rows_that_a_session_logged_in_part_stop_the_table_before_their_transaction(
    server: MariaDbServer, image: str, tmp_path: Path
) -> None:
    """What was whole before them is told, nothing of their transaction is; a neighbour goes on."""
    server.execute(
        "CREATE TABLE shop.orders (id INT PRIMARY KEY, a INT, note TEXT)",
        "CREATE TABLE shop.other (id INT PRIMARY KEY, a INT)",
    )
    with running(server, tmp_path, LOG, "shop.other") as capture:
        server.execute("INSERT INTO shop.orders VALUES (1, 1, 'x'), (2, 2, 'y'), (3, 3, 'z')")
        server.execute(f"SET SESSION binlog_row_image = {image}", "DELETE FROM shop.orders WHERE id = 3")
        capture.assert_equal(LOG)
        unknown = "a,note" if image == "MINIMAL" else "note"
        assert [row["_unavailable"] for row in capture.rows(LOG)] == [None, None, None, unknown]
        with server.connect(autocommit=False) as session, session.cursor() as cursor:
            cursor.execute("INSERT INTO shop.orders VALUES (4, 4, 'whole')")
            session.commit()
            cursor.execute("INSERT INTO shop.orders VALUES (5, 5, 'not told')")
            cursor.execute(f"SET SESSION binlog_row_image = {image}")
            cursor.execute("UPDATE shop.orders SET a = 7 WHERE id = 1")
            cursor.execute("INSERT INTO shop.other VALUES (1, 1)")
            session.commit()
        told = capture.wait_until_stopped(LOG)
        capture.assert_equal("shop.other")
        assert [row["id"] for row in capture.rows(LOG)] == [1, 2, 3, 3, 4]
        assert "binlog_row_image = FULL" in told
        assert f"headwater resnapshot {LOG}" in told
        assert renewal.renew(capture.store, [LOG]) is None
        server.execute("INSERT INTO shop.orders VALUES (6, 6, 'again')")
        capture.catch_up()
        assert capture.rows(LOG)[-1]["id"] == 6


def test_rows_without_the_names_of_their_columns_stop_the_table(mariadb: MariaDbServer, tmp_path: Path) -> None:
    mariadb.execute(ORDERS)
    with running(mariadb, tmp_path, LOG) as capture:
        fill(mariadb, 1, 10)
        capture.catch_up()
        mariadb.execute("SET GLOBAL binlog_row_metadata = NO_LOG", "FLUSH TABLES")
        try:
            fill(mariadb, 11, 12)
            told = capture.wait_until_stopped(LOG)
        finally:
            mariadb.execute("SET GLOBAL binlog_row_metadata = FULL", "FLUSH TABLES")
    assert "binlog_row_metadata = FULL" in told


def test_a_resnapshot_of_one_table_goes_on_from_now_on_an_idle_server(server: MariaDbServer, tmp_path: Path) -> None:
    server.execute(ORDERS)
    with running(server, tmp_path, LOG) as capture:
        capture.catch_up()
        before = capture.tables()[LOG].since.to_json()
        assert renewal.renew(capture.store, [LOG]) is None
        assert capture.tables()[LOG].since.to_json() != before
        fill(server, 1, 5)
        capture.assert_equal(LOG)


def test_a_stopped_table_is_captured_anew_after_a_resnapshot(mariadb: MariaDbServer, tmp_path: Path) -> None:
    mariadb.execute(ORDERS)
    with running(mariadb, tmp_path, LOG) as capture:
        fill(mariadb, 1, 3)
        mariadb.execute("DROP TABLE shop.orders", ORDERS.replace("note varchar(200)", "note int, extra json"))
        capture.wait_until_stopped(LOG)
        renewal.renew(capture.store, [LOG])
        mariadb.execute("INSERT INTO shop.orders (id, note, extra) VALUES (7, 8, '{}')")
        capture.catch_up()
        assert capture.rows(LOG)[-1]["note"] == 8


def test_the_second_of_two_captures_of_one_server_does_not_end_the_first(
    mariadb: MariaDbServer, tmp_path: Path
) -> None:
    mariadb.execute(ORDERS)
    with running(mariadb, tmp_path / "a", LOG) as one, running(mariadb, tmp_path / "b", LOG) as other:
        fill(mariadb, 1, 50)
        one.assert_equal(LOG)
        other.assert_equal(LOG)
        assert one.capture.statistics.restarts == other.capture.statistics.restarts == 0


def test_m33_a_table_that_stops_takes_nothing_from_its_neighbour(mariadb: MariaDbServer, tmp_path: Path) -> None:
    mariadb.execute(ORDERS, ORDERS.replace("shop.orders", "shop.other"))
    with running(mariadb, tmp_path, LOG, "shop.other") as capture:
        with mariadb.connect(autocommit=False) as session, session.cursor() as cursor:
            for number in range(1, 40):
                cursor.execute(f"INSERT INTO shop.other (id) VALUES ({number})")
                cursor.execute(f"INSERT INTO shop.orders (id) VALUES ({number})")
                session.commit()
                if number == 20:
                    cursor.execute("ALTER TABLE shop.orders MODIFY amount int")
        capture.wait_until_stopped(LOG)
        capture.assert_equal("shop.other")


def test_the_source_names_itself_without_its_password(mariadb: MariaDbServer) -> None:
    source: Any = open_source(mariadb.dsn, spill=Path())
    assert mariadb.password not in source.name
    assert source.name.startswith("mysql://headwater@127.0.0.1:")


def test_tagged_transactions_of_mysql_are_resumed_too(
    mysql_servers: Callable[[str], MariaDbServer], tmp_path: Path
) -> None:
    server = mysql_servers("mysql")
    with server.fresh():
        prepared(server)
        capture = MySqlCapture(server, tmp_path, [LOG])
        capture.start()
        tagged = "SET gtid_next = 'AUTOMATIC:blue'"
        server.execute(tagged, "INSERT INTO shop.orders (id) VALUES (1)", "INSERT INTO shop.orders (id) VALUES (2)")
        fill(server, 3, 4)
        capture.catch_up()
        capture.stop()
        server.execute(tagged, "INSERT INTO shop.orders (id) VALUES (5)")
        fill(server, 6, 7)
        capture.start()
        capture.assert_equal(LOG)
        capture.assert_once(LOG)
        capture.stop()
    assert len(capture.rows(LOG)) == 7
    offset = capture.offset()
    assert offset is not None
    assert ":blue:1-3" in str(offset.gtids)


@pytest.mark.soak
def test_a_locked_table_holds_up_no_other(mariadb: MariaDbServer, tmp_path: Path) -> None:
    server = mariadb
    server.execute(ORDERS, "CREATE TABLE shop.locked LIKE shop.orders")
    with running(server, tmp_path, LOG, "shop.locked") as capture, server.connect() as holder:
        fill(server, 1, 10, "shop.locked")
        fill(server, 1, 10)
        capture.catch_up()
        with holder.cursor() as cursor:
            cursor.execute("LOCK TABLES shop.locked WRITE")
        capture.stop()
        capture.start()
        fill(server, 11, 20)
        capture.wait_for(lambda: len(capture.rows(LOG)) == 20)
        with holder.cursor() as cursor:
            cursor.execute("UNLOCK TABLES")
        fill(server, 11, 20, "shop.locked")
        capture.assert_equal(LOG, "shop.locked")

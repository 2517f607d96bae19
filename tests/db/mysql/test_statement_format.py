"""Statements that a session logs instead of rows: the tables that they may have written are read again, no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pymysql
import pytest
from tests.db.backfill.delivering import Delivering
from tests.db.backfill.test_schema_changes import difference
from tests.db.capture.running import OPTIONS
from tests.db.mysql.running import MySqlCapture, end_of_log, running
from tests.sampled import share
from tests.servers.mariadb import MariaDbServer

from headwater.capture import TableState, renewal
from headwater.capture.options import OnRewrite

CREATE = "CREATE TABLE {} (id int PRIMARY KEY, v varchar(20))"
TABLES = ("shop.a", "shop.b", "shop.c", "shop.d", "shop.e", "shop.bystander", "shop.last")
WRITTEN = {
    "shop.a": "INSERT INTO shop.a VALUES (2, 'x')",
    "shop.b": "UPDATE `b` SET v = 'x'",
    "shop.c": "DELETE FROM c",
    "shop.d": "REPLACE INTO shop.d SELECT id, 'x' FROM shop.bystander",
    "shop.e": "UPDATE uncaptured u JOIN shop.e x ON u.id = x.id SET x.v = 'x', u.v = 'y'",
}
HARMLESS = (
    "INSERT INTO shop.uncaptured SELECT * FROM shop.bystander ON DUPLICATE KEY UPDATE v = 'again'",
    "DELETE FROM uncaptured",
    "INSERT INTO other.uncaptured VALUES (1, 'x')",
    "CREATE TEMPORARY TABLE scratch (id int PRIMARY KEY)",
    "INSERT INTO scratch SELECT id FROM shop.bystander",
    "DROP TEMPORARY TABLE scratch",
)


@contextmanager
def session(server: MariaDbServer, **options: Any) -> Iterator[Any]:
    """A cursor of a session that logs statements, in the database ``shop``."""
    with server.connect(**options) as connection, connection.cursor() as cursor:
        cursor.execute("SET SESSION binlog_format = STATEMENT")
        cursor.execute("USE shop")
        yield cursor


def create(server: MariaDbServer, *tables: str) -> None:
    server.execute(*(CREATE.format(table) for table in tables))


def stopped(capture: MySqlCapture) -> dict[str, str]:
    return {name: str(table.reason) for name, table in capture.tables().items() if table.state is not TableState.ACTIVE}


def test_a_statement_stops_the_tables_that_it_writes_and_no_others(server: MariaDbServer, tmp_path: Path) -> None:
    create(server, *TABLES, "shop.uncaptured")
    server.execute("CREATE DATABASE other", CREATE.format("other.uncaptured"))
    with running(server, tmp_path, *TABLES) as capture:
        server.execute(*(f"INSERT INTO {table} VALUES (1, 'old')" for table in TABLES))
        with session(server) as cursor:
            for statement in (*HARMLESS, *WRITTEN.values()):
                cursor.execute(statement)
        server.execute("INSERT INTO shop.last VALUES (2, 'x')")
        capture.catch_up()
        reasons = stopped(capture)
        assert set(reasons) == set(WRITTEN)
        for table, statement in WRITTEN.items():
            assert f"has a statement ({statement.split()[0]}) instead of the rows" in reasons[table]
            assert "Run: SET GLOBAL binlog_format = ROW;" in reasons[table]
            assert reasons[table].endswith(f"Then run: headwater resnapshot {table}")
        capture.assert_equal("shop.bystander", "shop.last")
        assert renewal.renew(capture.store, ["shop.a"]) is None
        server.execute("INSERT INTO shop.a VALUES (3, 'y')")
        capture.catch_up()
        assert capture.rows("shop.a")[-1]["id"] == 3


def test_load_data_in_statement_format_stops_its_table_alone(server: MariaDbServer, tmp_path: Path) -> None:
    create(server, "shop.loaded", "shop.local", "shop.bystander", "shop.uncaptured")
    lines = tmp_path / "lines"
    lines.write_text("".join(f"{number}\tx\n" for number in range(50_000)))
    server.execute("SET GLOBAL local_infile = ON")
    with running(server, tmp_path / "store", "shop.loaded", "shop.local", "shop.bystander") as capture:
        with session(server, local_infile=True) as cursor:
            cursor.execute(f"LOAD DATA LOCAL INFILE '{lines}' INTO TABLE uncaptured")
            server.execute("INSERT INTO shop.bystander VALUES (1, 'x')")
            capture.catch_up()
            assert stopped(capture) == {}
            cursor.execute(f"LOAD DATA LOCAL INFILE '{lines}' REPLACE INTO TABLE shop.local")
            try:
                cursor.execute(f"LOAD DATA INFILE '{lines}' INTO TABLE shop.loaded")
                expected = {"shop.local", "shop.loaded"}
            except pymysql.err.OperationalError:  # this MySQL reads no files of its own (secure_file_priv)
                expected = {"shop.local"}
        server.execute("INSERT INTO shop.bystander VALUES (2, 'x')")
        capture.catch_up()
        assert set(stopped(capture)) == expected
        capture.assert_equal("shop.bystander")


def test_a_table_is_read_again_by_itself_after_a_statement(server: MariaDbServer, tmp_path: Path) -> None:
    """Also after a statement in a prepared XA transaction, once it is committed, and not if it is rolled back."""
    tables = ["shop.a", "shop.prepared", "shop.bystander"]
    create(server, *tables)
    server.execute(*(f"INSERT INTO {table} VALUES (1, 'old'), (2, 'old')" for table in tables))
    capture = MySqlCapture(server, tmp_path, tables)
    capture.options = replace(OPTIONS, on_rewrite=OnRewrite.REREAD)
    capture.start()
    query = Delivering(capture, *tables, keyed=True)
    try:
        query.finish()
        since = {name: table.since for name, table in capture.tables().items()}
        with session(server) as cursor:
            for table, end in (("shop.bystander", "ROLLBACK"), ("shop.prepared", "COMMIT")):
                cursor.execute("XA START 'x'")
                cursor.execute(f"INSERT INTO {table} VALUES (3, 'new')")
                cursor.execute("XA END 'x'")
                cursor.execute("XA PREPARE 'x'")
                decided = end_of_log(server.dsn)
                cursor.execute(f"XA {end} 'x'")
            cursor.execute("DELETE FROM shop.a WHERE id = 1")
            cursor.execute("UPDATE shop.a SET v = 'new'")
        server.execute("INSERT INTO shop.bystander VALUES (4, 'new')")

        def are_captured_again() -> bool:
            found = capture.tables()
            changed = [name for name in tables if found[name].since != since[name]]
            return len(changed) == 2 and all(found[name].state is TableState.ACTIVE for name in changed)

        query.run_until(are_captured_again)
        capture.catch_up()
        query.finish()
        assert {name: difference(capture, query, name) for name in tables} == dict.fromkeys(tables)
        assert capture.tables()["shop.bystander"].since == since["shop.bystander"]
        assert capture.tables()["shop.prepared"].since > decided
    finally:
        query.close()
        capture.stop()


INDIRECT = {
    "trigger": (
        ("CREATE TRIGGER shop.audit AFTER INSERT ON shop.uncaptured FOR EACH ROW INSERT INTO shop.a VALUES (1, 'x')",),
        "INSERT INTO shop.uncaptured VALUES (1, 'x')",
    ),
    "view": (("CREATE VIEW shop.seen AS SELECT * FROM shop.a",), "INSERT INTO shop.seen VALUES (1, 'x')"),
    "function": (
        (
            "SET GLOBAL log_bin_trust_function_creators = ON",
            "CREATE FUNCTION shop.f() RETURNS int BEGIN INSERT INTO shop.a VALUES (1, 'x'); RETURN 1; END",
        ),
        "SELECT shop.f()",
    ),
    "cascade": (
        (
            "CREATE TABLE shop.child (id int PRIMARY KEY, v int,"
            " FOREIGN KEY (v) REFERENCES shop.uncaptured (id) ON DELETE CASCADE)",
        ),
        "DELETE FROM shop.uncaptured",
    ),
}


@pytest.mark.parametrize("way", share(list(INDIRECT), 0, 2))
def test_a_statement_that_may_write_other_tables_stops_all_that_it_may_reach(
    way: str, server: MariaDbServer, tmp_path: Path
) -> None:
    create(server, "shop.a", "shop.uncaptured", "shop.bystander")
    definitions, statement = INDIRECT[way]
    server.execute(*definitions)
    with running(server, tmp_path, "shop.a", "shop.bystander") as capture:
        with session(server) as cursor:
            cursor.execute(statement)
        capture.catch_up()
        assert set(stopped(capture)) == {"shop.a", "shop.bystander"}
        assert "may have changed this table" in stopped(capture)["shop.a"]


def test_a_user_who_cannot_see_triggers_has_all_tables_read_again(server: MariaDbServer, tmp_path: Path) -> None:
    create(server, "shop.a", "shop.uncaptured", "shop.bystander")
    right = "BINLOG MONITOR" if server.kind == "MariaDB" else "REPLICATION CLIENT"
    server.execute(
        "DROP USER IF EXISTS reader@'%'",
        f"CREATE USER reader@'%' IDENTIFIED BY '{server.password}'",
        f"GRANT REPLICATION SLAVE, {right} ON *.* TO reader@'%'",
        "GRANT SELECT ON shop.* TO reader@'%'",
    )
    dsn = server.dsn.replace("//headwater:", "//reader:")
    with running(server, tmp_path, "shop.a", "shop.bystander", dsn=dsn) as capture:
        with session(server) as cursor:
            cursor.execute("CREATE TEMPORARY TABLE scratch (id int PRIMARY KEY)")
            cursor.execute("INSERT INTO scratch SELECT id FROM shop.bystander")
        capture.catch_up()
        assert stopped(capture) == {}
        with session(server) as cursor:
            cursor.execute("INSERT INTO shop.a VALUES (1, 'x')")
        capture.catch_up()
        assert set(stopped(capture)) == {"shop.a", "shop.bystander"}
        server.execute("GRANT TRIGGER ON shop.* TO reader@'%'")
        assert renewal.renew(capture.store, ["shop.a", "shop.bystander"]) is None
        with session(server) as cursor:
            cursor.execute("INSERT INTO shop.a VALUES (2, 'x')")
        capture.catch_up()
        assert set(stopped(capture)) == {"shop.a"}


def test_a_temporary_table_that_has_the_name_of_a_captured_one_does_not_empty_it(
    server: MariaDbServer, tmp_path: Path
) -> None:
    create(server, "shop.a", "shop.bystander")
    with running(server, tmp_path, "shop.a", "shop.bystander") as capture:
        server.execute("INSERT INTO shop.a VALUES (1, 'x')", "INSERT INTO shop.bystander VALUES (1, 'x')")
        with session(server) as cursor:
            cursor.execute("CREATE TEMPORARY TABLE a (id int PRIMARY KEY)")
            cursor.execute("TRUNCATE TABLE a")
        capture.assert_equal("shop.bystander")
        assert "a temporary table of the same name" in stopped(capture)["shop.a"]
        assert [row["id"] for row in capture.rows("shop.a")] == [1]


def test_rows_that_a_savepoint_took_back_stop_the_tables_of_their_transaction(
    mariadb: MariaDbServer, tmp_path: Path
) -> None:
    """A table without transactions makes MariaDB log the rows and that they were rolled back."""
    create(mariadb, "shop.a", "shop.bystander")
    mariadb.execute("CREATE TABLE shop.uncaptured (id int) ENGINE = MyISAM", "CREATE DATABASE other")
    with running(mariadb, tmp_path, "shop.a", "shop.bystander") as capture:
        with mariadb.connect(autocommit=False) as connection, connection.cursor() as cursor:
            cursor.execute("USE other")
            cursor.execute("INSERT INTO shop.a VALUES (1, 'x')")
            cursor.execute("SAVEPOINT s")
            cursor.execute("INSERT INTO shop.a VALUES (2, 'rolled back')")
            cursor.execute("INSERT INTO shop.uncaptured VALUES (1)")
            cursor.execute("ROLLBACK TO s")
            connection.commit()
        mariadb.execute("INSERT INTO shop.bystander VALUES (1, 'x')")
        capture.assert_equal("shop.bystander")
        assert "rolled back in part" in stopped(capture)["shop.a"]

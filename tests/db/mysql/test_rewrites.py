"""Schema changes of MariaDB and MySQL: what keeps all values is followed, what may not is read again.

Each case is a table with an older row, a statement and a newer row; all of them are captured at once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.db.capture.running import OPTIONS
from tests.db.mysql.running import MySqlCapture, running
from tests.servers.mariadb import MariaDbServer

from headwater.capture import TableState
from headwater.capture.options import OnRewrite
from headwater.log_store import LogView
from headwater.sources.open import open_source
from headwater.state import open_reader

KEPT = [
    ("varchar(10)", "'a '", "MODIFY {c} varchar(40)", "'0123456789abc'"),
    ("varchar(10) NOT NULL", "'a '", "MODIFY {c} varchar(10) NULL", "NULL"),
    ("char(5)", "'ab'", "MODIFY {c} varchar(9)", "'abc  '"),
    ("varchar(9)", "'ab '", "MODIFY {c} text", "'ab '"),
    ("varchar(9) CHARACTER SET latin1", "'é'", "MODIFY {c} varchar(9) CHARACTER SET utf8mb4", "'漢'"),
    ("int NOT NULL", "7", "MODIFY {c} bigint NOT NULL COMMENT 'NULL'", "5000000000"),
    ("int unsigned", "7", "CHANGE {c} {c} bigint", "-5"),
    ("decimal(8,2)", "1.25", "MODIFY {c} decimal(12,4)", "1.2345"),
    ("float", "1.5", "MODIFY {c} double", "1.1"),
    (
        "datetime",
        "'2026-01-02 03:04:05'",
        "MODIFY {c} datetime(6) DEFAULT CURRENT_TIMESTAMP(6)",
        "'2026-01-02 03:04:05.6'",
    ),
    ("enum('a','b','c')", "'c'", "MODIFY {c} enum('c','b','a','d')", "'d'"),
    ("set('a','b')", "'a,b'", "MODIFY {c} set('a','b','c')", "'b,c'"),
    ("binary(3)", "'ab'", "MODIFY {c} varbinary(9)", "'abcdef'"),
]

HARMLESS = [
    "ALTER TABLE {t} ADD INDEX (v), COMMENT 'x', ALTER COLUMN v SET DEFAULT 5, FORCE",
    "ALTER TABLE {t} ADD COLUMN w int NULL, ALGORITHM=INSTANT",
    "ALTER TABLE {t} CONVERT TO CHARACTER SET utf8mb4",
    "ALTER TABLE {t} RENAME COLUMN v TO y",
    "OPTIMIZE TABLE {t}",
    "ANALYZE TABLE {t}",
    "CREATE INDEX i ON {t} (y)",
]

ADDED = [
    "int",
    "int NOT NULL",
    "int DEFAULT -5",
    "bit(4) DEFAULT b'101'",
    "bit(1) NOT NULL",
    "bit(12) NOT NULL",
    "binary(3) DEFAULT 'a'",
    "varbinary(3) NOT NULL",
    "char(5) DEFAULT 'ab '",
    "varchar(20) DEFAULT 'it''s'",
    "text NOT NULL",
    "decimal(8,2) DEFAULT 1.5",
    "double DEFAULT 1e-5",
    "float DEFAULT 0.1",
    "date DEFAULT '2026-01-02'",
    "datetime(3) DEFAULT '2026-01-02 03:04:05.5'",
    "time NOT NULL DEFAULT '12:34:56'",
    "enum('x','y') NOT NULL",
    "set('x','y') NOT NULL DEFAULT 'y'",
    "year DEFAULT 2020",
    "bool DEFAULT TRUE",
    "bigint unsigned DEFAULT 18446744073709551615",
    "json",
    "timestamp NULL",
]

REWRITTEN = [
    ("varchar(10)", "'abcdef'", "MODIFY v varchar(3)"),
    ("varchar(10)", "'ab '", "MODIFY v char(10)"),
    ("varchar(10)", "NULL", "MODIFY v varchar(10) NOT NULL"),
    ("varchar(10) CHARACTER SET utf8mb4", "'漢'", "MODIFY v varchar(10) CHARACTER SET latin1"),
    ("varchar(10) CHARACTER SET utf8mb4", "'漢'", "CONVERT TO CHARACTER SET latin1"),
    ("varchar(20)", "'a'", "MODIFY v varchar(40); INSERT {t} VALUES (9, repeat('x', 30)); MODIFY v varchar(20)"),
    ("datetime(6)", "'2026-01-01 00:00:00.7'", "MODIFY v datetime"),
    ("time(3)", "'01:02:03.7'", "MODIFY v time"),
    ("decimal(10,4)", "1.2345", "MODIFY v decimal(10,1)"),
    ("double", "1.23456", "MODIFY v float"),
    ("int", "-5", "MODIFY v int unsigned"),
    ("bigint", "5000000000", "MODIFY v int"),
    ("int", "-7", "MODIFY COLUMN v varchar(20)"),
    ("enum('a','b','c')", "'c'", "MODIFY v enum('a','b')"),
    ("set('a','b','c')", "'a,c'", "MODIFY v set('c','b','a')"),
    ("varbinary(9)", "'ab'", "MODIFY v binary(5)"),
    ("binary(3)", "'ab'", "MODIFY v binary(5)"),
    ("bit(9)", "b'111111111'", "MODIFY v bit(4)"),
    ("bit(4)", "b'1111'", "MODIFY v bit(12)"),
    ("int", "1", "ADD COLUMN w int AUTO_INCREMENT UNIQUE"),
    ("int", "1", "ADD COLUMN w timestamp NOT NULL DEFAULT '2026-01-01 00:00:00'"),
    ("int", "1", "ADD COLUMN w datetime DEFAULT CURRENT_TIMESTAMP"),
    ("int", "1", "ADD COLUMN w char(36) DEFAULT (upper('ab'))"),
    ("int", "1", "ADD COLUMN w int AS (v + 1) STORED"),
    ("int", "1", "ADD COLUMN w int AS (v + 1) VIRTUAL"),
    ("int NOT NULL", "1", "DROP PRIMARY KEY, ADD PRIMARY KEY (id, v)"),
    ("int NOT NULL", "1", "ADD UNIQUE (v), DROP PRIMARY KEY"),
    ("int", "1", "CREATE TABLE {t}x LIKE {t}; RENAME TABLE {t} TO {t}y, {t}x TO {t}"),
    ("int", "1", "DROP TABLE {t}; CREATE TABLE {t} (id int PRIMARY KEY, v int)"),
    ("varchar(10)", "'abcdef'", "SET sql_log_bin = 0; MODIFY v varchar(3)"),
    ("int", "1", "SET sql_log_bin = 0; ADD COLUMN w int DEFAULT 7"),
    ("int", "1", "SET sql_log_bin = 0; TRUNCATE TABLE {t}"),
    ("int", "1", "SET sql_log_bin = 0; DROP TABLE {t}; CREATE TABLE {t} (id int PRIMARY KEY, v int)"),
]


def statements(text: str, table: str) -> list[str]:
    """Clauses alone are those of ``ALTER TABLE``."""
    whole = ("CREATE", "TRUNCATE TABLE", "RENAME TABLE", "DROP TABLE", "SET ", "INSERT")
    parts = [part.replace("{t}", table) for part in text.split("; ")]
    return [part if part.startswith(whole) else f"ALTER TABLE {table} {part}" for part in parts]


def test_changes_that_keep_all_values_are_followed_without_reading_again(server: MariaDbServer, tmp_path: Path) -> None:
    kinds = ", ".join(f"c{number} {kind}" for number, (kind, *_) in enumerate(KEPT))
    server.execute(
        f"CREATE TABLE shop.kept (id int PRIMARY KEY, {kinds})",
        "CREATE TABLE shop.harmless (id int PRIMARY KEY, v varchar(9)) CHARACTER SET utf8mb3",
        "CREATE TABLE shop.grown (id int PRIMARY KEY)",
        "CREATE TABLE shop.emptied (id int PRIMARY KEY)",
    )
    tables = ("shop.kept", "shop.harmless", "shop.grown", "shop.emptied")
    with running(server, tmp_path, *tables) as capture:
        since = {name: table.since for name, table in capture.tables().items()}
        server.execute(
            f"INSERT INTO shop.kept VALUES (1, {', '.join(old for _, old, *_ in KEPT)})",
            "INSERT INTO shop.harmless VALUES (1, 'é')",
            "INSERT INTO shop.grown VALUES (1)",
            "INSERT INTO shop.emptied VALUES (1)",
            *(f"ALTER TABLE shop.kept {change.replace('{c}', f'c{n}')}" for n, (*_, change, _) in enumerate(KEPT)),
            *(statement.replace("{t}", "shop.harmless") for statement in HARMLESS),
            *(f"ALTER TABLE shop.grown ADD COLUMN w{n} {added}" for n, added in enumerate(ADDED)),
            "ALTER TABLE shop.grown ADD COLUMN w int DEFAULT 5",
            "ALTER TABLE shop.grown ALTER COLUMN w SET DEFAULT 6",
            "TRUNCATE TABLE shop.emptied",
            "SET sql_mode = ''",
            f"INSERT INTO shop.kept VALUES (2, {', '.join(new for *_, new in KEPT)})",
            "INSERT INTO shop.harmless VALUES (2, 'ü', 3)",
            "INSERT INTO shop.grown (id) VALUES (2)",
            "INSERT INTO shop.emptied VALUES (2)",
        )
        capture.catch_up()
        assert {name: table.reason for name, table in capture.tables().items() if table.reason} == {}
        capture.assert_equal(*tables)
        checked = capture.capture.statistics.checked_time or 0
        capture.wait_for(lambda: (capture.capture.statistics.checked_time or 0) > checked + 1)
        after = capture.tables()
    assert {name: table.reason for name, table in after.items() if table.state is not TableState.ACTIVE} == {}
    assert {name: table.since for name, table in after.items()} == since


def test_changes_that_may_rewrite_values_are_read_again(server: MariaDbServer, tmp_path: Path) -> None:
    tables = [f"shop.r{number}" for number in range(len(REWRITTEN))]
    for table, (kind, *_) in zip(tables, REWRITTEN, strict=True):
        server.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v {kind})")
    capture = MySqlCapture(server, tmp_path, tables)
    capture.options = replace(OPTIONS, on_rewrite=OnRewrite.REREAD)
    capture.start()
    since = {name: table.since for name, table in capture.tables().items()}
    for table, (_, old, change) in zip(tables, REWRITTEN, strict=True):
        server.execute("SET sql_mode = ''", f"INSERT INTO {table} VALUES (1, {old})", *statements(change, table))

    def unread() -> dict[str, str]:
        return {
            name: f"{cases[name]} {table.state} {table.reason}"
            for name, table in capture.tables().items()
            if table.state is not TableState.ACTIVE or table.since == since[name]
        }

    cases = {table: change for table, (*_, change) in zip(tables, REWRITTEN, strict=True)}
    try:
        capture.wait_for(lambda: capture.failure is not None or not unread(), 30)
    except AssertionError:
        raise AssertionError(unread()) from None
    capture.stop()
    source = open_source(server.dsn, spill=tmp_path / "unused")
    described = source.tables(tables)
    source.close()
    with open_reader(capture.store) as reader, reader.snapshot() as view:
        for found in described:
            log = LogView.open(view, found.full_name).log
            expected = found.log_schema(source.position_type)
            assert (log.schema, log.key_columns) == (expected, found.key_columns), cases[found.full_name]


@pytest.mark.parametrize("statement", ["DROP TABLE shop.gone", "RENAME TABLE shop.gone TO shop.kept"])
def test_a_table_that_is_not_there_any_more_stops_and_its_advice_works(
    statement: str, mariadb: MariaDbServer, tmp_path: Path
) -> None:
    mariadb.execute("CREATE TABLE shop.gone (id int PRIMARY KEY)")
    capture = MySqlCapture(mariadb, tmp_path, ["shop.gone"])
    capture.options = replace(OPTIONS, on_rewrite=OnRewrite.REREAD)
    capture.start()
    mariadb.execute(statement)
    reason = capture.wait_until_stopped("shop.gone")
    capture.stop()
    assert reason.lower().endswith("then run: headwater resnapshot shop.gone")


def test_a_table_that_is_created_again_after_its_drop_was_read_is_read_again(
    mariadb: MariaDbServer, tmp_path: Path
) -> None:
    mariadb.execute("CREATE TABLE shop.replaced (id int PRIMARY KEY)")
    capture = MySqlCapture(mariadb, tmp_path, ["shop.replaced"])
    capture.options = replace(OPTIONS, on_rewrite=OnRewrite.REREAD)
    capture.start()
    mariadb.execute("DROP TABLE shop.replaced")
    capture.wait_for(lambda: capture.tables()["shop.replaced"].state is not TableState.ACTIVE)
    mariadb.execute("CREATE TABLE shop.replaced (id int PRIMARY KEY)")
    capture.wait_for(lambda: capture.tables()["shop.replaced"].state is TableState.ACTIVE)
    capture.stop()


def test_what_happened_while_no_capture_ran_is_found_at_its_start(mariadb: MariaDbServer, tmp_path: Path) -> None:
    mariadb.execute("CREATE TABLE shop.a (id int PRIMARY KEY, v varchar(9))", "CREATE TABLE shop.b LIKE shop.a")
    with running(mariadb, tmp_path, "shop.a", "shop.b") as capture:
        mariadb.execute("INSERT INTO shop.a VALUES (1, 'abcdef')", "ALTER TABLE shop.b MODIFY v varchar(40)")
        capture.catch_up()
    mariadb.execute("SET sql_mode = ''", "SET sql_log_bin = 0", "ALTER TABLE shop.a MODIFY v varchar(3)")
    with running(mariadb, tmp_path, "shop.a", "shop.b") as capture:
        reason = capture.wait_until_stopped("shop.a")
        assert "changed from varchar(9)" in reason
        assert "the log does not have the statement" in reason
        mariadb.execute("INSERT INTO shop.b VALUES (1, 'x')")
        capture.assert_equal("shop.b")
        mariadb.execute("ALTER TABLE shop.b MODIFY v varchar(20)")
        assert "changed from varchar(40)" in capture.wait_until_stopped("shop.b")

"""The order of changes: of transactions that interleave, of keys that move, of tables that change under load."""

from __future__ import annotations

import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tests.db.capture.captured import make_tables
from tests.db.capture.running import RunningCapture, running
from tests.servers.postgres import Database

from headwater.capture import CaptureState
from headwater.log_store.log_events import SCHEMA, TRUNCATE
from headwater.sources.postgres.offset import PostgresOffset
from headwater.stream import Op

# -- long and interleaved transactions ---------------------------------------------------------------------------------


def test_m15_a_transaction_open_at_the_start_is_whole_before_it_or_whole_after_it(
    postgres: Database, tmp_path: Path
) -> None:
    make_tables(postgres)
    capture = RunningCapture(postgres, tmp_path, ["t"])
    with postgres.connect() as early, postgres.connect() as late:
        early.autocommit = late.autocommit = False
        early.execute("INSERT INTO t VALUES (1, 'early')")
        starter = threading.Thread(target=capture.start)
        starter.start()
        waiting = "SELECT count(*) FROM pg_replication_slots WHERE confirmed_flush_lsn IS NULL"
        while not postgres.value(waiting):
            assert starter.is_alive()
        late.execute("INSERT INTO t VALUES (2, 'late')")
        assert capture.capture.state is CaptureState.STARTING
        early.execute("INSERT INTO t VALUES (3, 'early')")
        early.commit()
        late.execute("INSERT INTO t VALUES (4, 'late')")
        late.commit()
        starter.join(60)
    postgres.execute("INSERT INTO t VALUES (5, 'after')")
    capture.catch_up()
    capture.stop()
    told: dict[str, list[int]] = defaultdict(list)
    for row in capture.rows("public.t"):
        told[row["v"]].append(row["id"])
    assert told["after"] == [5]
    assert told["early"] in ([], [1, 3])
    assert told["late"] in ([], [2, 4])


def test_m24_interleaved_transactions_come_in_the_order_of_their_commits(postgres: Database, tmp_path: Path) -> None:
    make_tables(postgres, "a", "b")
    with running(postgres, tmp_path, "a", "b") as capture:
        with postgres.connect() as one, postgres.connect() as two, postgres.connect() as three:
            for session in (one, two, three):
                session.autocommit = False
            one.execute("INSERT INTO a VALUES (1, 'one')")
            two.execute("INSERT INTO a VALUES (2, 'two')")
            three.execute("INSERT INTO b VALUES (3, 'three')")
            one.execute("INSERT INTO b VALUES (1, 'one')")
            two.execute("INSERT INTO b VALUES (2, 'two')")
            three.execute("INSERT INTO a VALUES (3, 'three')")
            two.commit()
            three.commit()
            one.execute("UPDATE a SET v = 'two, then one' WHERE id = 2")
            one.commit()
        capture.assert_equal("a", "b")
        capture.assert_once("public.a", "public.b")
        rows = capture.rows("public.a")
        assert [row["v"] for row in rows] == ["two", "three", "one", "two, then one"]
        assert [row["v"] for row in capture.rows("public.b")] == ["two", "three", "one"]
        commits = [PostgresOffset.from_position(row["_position"]).commit_lsn for row in rows]
        assert commits == sorted(commits)
        assert len(set(commits)) == 3
        times = [row["_commit_timestamp"] for row in rows]
        assert times == sorted(times)


def test_m24_many_sessions_at_once(newest_postgres: Database, tmp_path: Path) -> None:
    make_tables(newest_postgres, "a", "b")
    newest_postgres.execute("INSERT INTO a SELECT i, '' FROM generate_series(1, 20) i")
    with running(newest_postgres, tmp_path, "a", "b") as capture:
        newest_postgres.execute("UPDATE a SET v = 'begin'")
        writers = [threading.Thread(target=write_both, args=(newest_postgres, number)) for number in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        capture.assert_equal("a", "b")
        capture.assert_once("public.a", "public.b")
        epochs: dict[str, set[int]] = defaultdict(set)
        for log in ("public.a", "public.b"):
            for row in capture.rows(log):
                epochs[row["v"]].add(row["_epoch"])
    assert all(len(of_transaction) == 1 for of_transaction in epochs.values())


def write_both(database: Database, number: int) -> None:
    with database.connect() as session:
        for turn in range(50):
            with session.transaction():
                label = f"{number}/{turn}"
                session.execute("UPDATE a SET v = %s WHERE id = %s", [label, (number * 7 + turn) % 20 + 1])
                session.execute("INSERT INTO b VALUES (%s, %s)", [number * 1000 + turn, label])


# -- keys --------------------------------------------------------------------------------------------------------------


def test_m16_a_key_that_moves_is_a_delete_and_an_insert(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute(
        "CREATE TABLE c (note text, b text, a int, PRIMARY KEY (a, b))", "CREATE TABLE s (id int PRIMARY KEY, v text)"
    )
    with running(newest_postgres, tmp_path, "c", "s") as capture:
        newest_postgres.execute(
            "INSERT INTO c SELECT 'n' || i, 'b' || i % 3, i FROM generate_series(1, 9) i",
            "UPDATE c SET b = 'moved' WHERE a = 1",
            "UPDATE c SET a = a + 100 WHERE a > 5",
            "UPDATE c SET note = 'kept' WHERE a = 2",
            "INSERT INTO s VALUES (1, 'one'), (2, 'two')",
        )
        with newest_postgres.connect() as session, session.transaction():  # two keys change places
            session.execute("UPDATE s SET id = -1 WHERE id = 1")
            session.execute("UPDATE s SET id = 1 WHERE id = 2")
            session.execute("UPDATE s SET id = 2 WHERE id = -1")
        capture.assert_equal("c", "s")
        capture.assert_once("public.c", "public.s")
        moved = [row for row in capture.rows("public.c") if row["a"] == 1]
        assert [(row["_op"], row["b"], row["note"]) for row in moved] == [
            (Op.INSERT, "b1", "n1"),
            (Op.DELETE, "b1", None),
            (Op.INSERT, "moved", "n1"),
        ]
        assert {row["_op"] for row in capture.rows("public.c") if row["note"] == "kept"} == {Op.UPDATE_INSERT}


# -- tables that change ------------------------------------------------------------------------------------------------


def test_m25_columns_change_under_load_and_no_row_is_lost(postgres: Database, tmp_path: Path) -> None:
    postgres.execute("CREATE TABLE t (id bigint PRIMARY KEY, n numeric(9), v text)")
    with running(postgres, tmp_path, "t") as capture:
        ended = threading.Event()
        writer = threading.Thread(target=write_until, args=(postgres, ended))
        writer.start()
        try:
            for statement in (
                "ALTER TABLE t ADD COLUMN x text DEFAULT 'dx'",
                "ALTER TABLE t ALTER COLUMN n TYPE numeric(12)",
                "ALTER TABLE t DROP COLUMN v",
                "ALTER TABLE t RENAME COLUMN x TO y",
                "ALTER TABLE t ADD COLUMN v int",
            ):
                rows = capture.capture.statistics.rows
                postgres.execute(statement)
                capture.wait_for(lambda before=rows: capture.capture.statistics.rows > before + 20)
        finally:
            ended.set()
            writer.join()
        capture.assert_equal("t")
        capture.assert_once("public.t")
        changes = [event.detail for event in capture.events("public.t") if event.kind == SCHEMA]
        assert [change["added"] for change in changes if change["added"]] == [["x"], ["v"]]
        assert {"x": "y"} in [change["renamed"] for change in changes]


def write_until(database: Database, ended: threading.Event) -> None:
    with database.connect() as session:
        number = 0
        while not ended.wait(0.002):
            number += 1
            session.execute("INSERT INTO t (id, n) VALUES (%s, %s)", [number, number])
            session.execute("UPDATE t SET n = n + 1 WHERE id = %s", [number - 5])


@pytest.mark.parametrize("while_running", [True, False])
def test_m26_a_table_made_anew_under_its_name_is_another_one(
    newest_postgres: Database, tmp_path: Path, while_running: bool
) -> None:
    make_tables(newest_postgres, "t", "other")
    capture = RunningCapture(newest_postgres, tmp_path, ["t", "other"])
    capture.start()
    newest_postgres.execute("INSERT INTO t VALUES (1, 'old')")
    capture.catch_up()
    if not while_running:
        capture.stop()
    newest_postgres.execute(
        "INSERT INTO t VALUES (2, 'last')",
        "DROP TABLE t",
        "CREATE TABLE t (id bigint PRIMARY KEY, w int)",
        "INSERT INTO t VALUES (1, 1)",
        "INSERT INTO other VALUES (1, 'x')",
    )
    if not while_running:
        capture.start(["other"])
    assert "dropped and created again" in capture.wait_until_stopped("public.t")
    capture.assert_equal("other")
    capture.stop()
    assert [row["v"] for row in capture.rows("public.t")] == ["old", "last"]
    assert "headwater resnapshot public.t" in capture.tables()["public.t"].reason


def test_m26_a_type_that_went_with_its_table_stops_the_table_alone(newest_postgres: Database, tmp_path: Path) -> None:
    make_tables(newest_postgres, "other")
    newest_postgres.execute("CREATE TYPE mood AS ENUM ('sad', 'ok')", "CREATE TABLE t (id int PRIMARY KEY, m mood)")
    capture = RunningCapture(newest_postgres, tmp_path, ["t", "other"])
    capture.start()
    capture.catch_up()
    capture.stop()
    newest_postgres.execute(
        "INSERT INTO t VALUES (1, 'ok')",
        "DROP TABLE t",
        "DROP TYPE mood",
        "INSERT INTO other VALUES (1, 'x')",
    )
    capture.start(["other"])
    capture.wait_until_stopped("public.t")
    capture.assert_equal("other")
    capture.stop()


def test_a_renamed_table_is_stopped_and_its_toast_is_never_read_from_another(
    newest_postgres: Database, tmp_path: Path
) -> None:
    database = newest_postgres
    make_tables(database)
    database.execute(
        "ALTER TABLE t ALTER COLUMN v SET STORAGE EXTERNAL",
        "ALTER TABLE t ADD COLUMN n int",
        "INSERT INTO t SELECT i, repeat('old', 2000), 0 FROM generate_series(1, 3) i",
    )
    capture = RunningCapture(database, tmp_path, ["t"])
    capture.start()
    capture.catch_up()
    capture.stop()
    database.execute(
        "UPDATE t SET n = 1",
        "ALTER TABLE t RENAME TO t_old",
        "ALTER TABLE t_old RENAME COLUMN v TO w",
        "CREATE TABLE t (id bigint PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, 'of another table' FROM generate_series(1, 3) i",
    )
    capture.start([])
    assert "Another table took its name" in capture.wait_until_stopped("public.t")
    capture.stop()
    updates = [row for row in capture.rows("public.t") if row["_op"] == Op.UPDATE_INSERT]
    assert [row["v"] for row in updates] == ["old" * 2000] * 3
    assert [row["_unavailable"] for row in updates] == [None] * 3


def test_toast_of_a_table_with_children_is_its_own(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute(
        "CREATE TABLE parent (id int PRIMARY KEY, v text, n int)",
        "ALTER TABLE parent ALTER COLUMN v SET STORAGE EXTERNAL",
        "CREATE TABLE child () INHERITS (parent)",
        "INSERT INTO parent SELECT i, repeat('p' || i, 3000), 0 FROM generate_series(1, 5) i",
        "INSERT INTO child SELECT i, repeat('c' || i, 3000), 0 FROM generate_series(1, 5) i",
    )
    with running(newest_postgres, tmp_path, "parent") as capture:
        newest_postgres.execute("UPDATE ONLY parent SET n = 1")
        capture.catch_up()
        rows = capture.rows("public.parent")
    assert {row["id"]: row["v"] for row in rows} == {number: f"p{number}" * 3000 for number in range(1, 6)}


def test_m32_truncations_of_several_tables_with_their_dependents(postgres: Database, tmp_path: Path) -> None:
    postgres.execute(
        "CREATE TABLE a (id bigint PRIMARY KEY GENERATED BY DEFAULT AS IDENTITY, v text)",
        "CREATE TABLE b (id bigint PRIMARY KEY REFERENCES a, v text)",
    )
    make_tables(postgres, "c", "d")
    with running(postgres, tmp_path, "a", "b", "c", "d") as capture:
        for name in "abcd":
            postgres.execute(f"INSERT INTO {name} SELECT i, '{name}' FROM generate_series(1, 10) i")
        postgres.execute("TRUNCATE a RESTART IDENTITY CASCADE")
        with postgres.connect() as session:
            with session.transaction(force_rollback=True):
                session.execute("TRUNCATE d")
            with session.transaction():
                session.execute("INSERT INTO c VALUES (20, 'gone')")
                session.execute("TRUNCATE c, b")
                session.execute("INSERT INTO c VALUES (20, 'here')")
        postgres.execute("INSERT INTO a (v) VALUES ('first again')")
        capture.assert_equal("a", "b", "c", "d")
        capture.assert_once("public.a", "public.b", "public.c", "public.d")
        kinds = {name: [event.kind for event in capture.events(f"public.{name}")] for name in "abcd"}
    assert kinds == {"a": [TRUNCATE], "b": [TRUNCATE, TRUNCATE], "c": [TRUNCATE], "d": []}


def test_m33_a_huge_transaction_of_one_table_loses_nothing_of_the_other(
    newest_postgres: Database, tmp_path: Path
) -> None:
    database = newest_postgres
    make_tables(database, "huge", "small")
    database.execute(f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'")
    with running(database, tmp_path, "huge", "small") as capture:
        with database.connect() as session, session.transaction():
            for part in range(4):
                session.execute(
                    f"INSERT INTO huge SELECT i, repeat('x', 200) FROM generate_series({part * 10000}, {part}9999) i"
                )
                database.execute(f"INSERT INTO small SELECT i, 'x' FROM generate_series({part * 100}, {part}99) i")
                capture.catch_up()
                assert len(capture.rows("public.small")) == (part + 1) * 100  # while the huge one is open
        database.execute("UPDATE small SET v = 'y'")
        capture.assert_equal("huge", "small")
        capture.assert_once("public.huge", "public.small")


def test_c1_a_row_of_every_common_type_is_exact(newest_postgres: Database, tmp_path: Path) -> None:
    columns = {
        "i2": ("smallint", "-32768", "'7'"),
        "i4": ("integer", "2147483647", "NULL"),
        "i8": ("bigint", "-9223372036854775808", "'7'"),
        "d": ("numeric(38,10)", "1234567890123456789012345678.0123456789", "0"),
        "n": ("numeric", "0.1000000000000000000000000000000000000000000001", "'NaN'"),
        "f4": ("real", "'-Infinity'", "0.1"),
        "f8": ("double precision", "0.1", "'NaN'"),
        "b": ("boolean", "true", "false"),
        "t": ("text", "E'tab\\t\"quote\"\\n\\\\ ünïcode 🙂'", "''"),
        "c": ("character(5)", "'ab'", "NULL"),
        "bin": ("bytea", "'\\x00ff10'", "''"),
        "day": ("date", "'0001-01-01'", "'9999-12-31'"),
        "ts": ("timestamp", "'1969-12-31 23:59:59.999999'", "NULL"),
        "tz": ("timestamptz", "'2024-02-29 12:00:00.000001+05:30'", "'1900-01-01'"),
        "tm": ("time", "'23:59:59.999999'", "'00:00'"),
        "u": ("uuid", "'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'", "NULL"),
        "j": ("jsonb", "'{\"a\": [1, 2.50, null]}'", "'[]'"),
        "ar": ("integer[]", "'{1,NULL,3}'", "'{}'"),
        "ip": ("inet", "'10.0.0.1/8'", "'::1'"),
    }
    names = ", ".join(columns)
    newest_postgres.execute(
        f"CREATE TABLE t (id int PRIMARY KEY, {', '.join(f'{name} {kind}' for name, (kind, *_) in columns.items())})"
    )
    with running(newest_postgres, tmp_path, "t") as capture:
        for number, values in enumerate(zip(*(rest for _, *rest in columns.values()), strict=True), 1):
            newest_postgres.execute(f"INSERT INTO t (id, {names}) VALUES ({number}, {', '.join(values)})")
        newest_postgres.execute("INSERT INTO t (id) VALUES (3)")
        capture.catch_up()
        rows: list[dict[str, Any]] = capture.rows("public.t")
        found = {row["id"]: row for row in rows}
        shown = newest_postgres.execute(
            f"SELECT id, {', '.join(f'{name}::text' for name in columns)} FROM t ORDER BY id"
        )
    assert [row[0] for row in shown] == [1, 2, 3]
    for name in ("n", "t", "u", "j"):
        place = 1 + list(columns).index(name)
        assert [found[row[0]][name] for row in shown] == [row[place] for row in shown], name
    one = found[1]
    assert (one["i2"], one["i4"], one["i8"]) == (-32768, 2147483647, -9223372036854775808)
    assert str(one["d"]) == "1234567890123456789012345678.0123456789"
    assert (one["f4"], one["f8"], one["b"], one["c"]) == (float("-inf"), 0.1, True, "ab   ")
    assert one["bin"] == b"\x00\xff\x10"
    assert one["day"].isoformat() == "0001-01-01"
    assert one["ts"].isoformat() == "1969-12-31T23:59:59.999999"
    assert one["tz"].isoformat() == "2024-02-29T06:30:00.000001+00:00"
    assert one["tm"].isoformat() == "23:59:59.999999"
    assert one["ar"] == [1, None, 3]
    assert (one["ip"], found[2]["ip"]) == ("10.0.0.1/8", "::1")
    assert found[2]["f8"] != found[2]["f8"]
    assert all(found[3][name] is None for name in columns)

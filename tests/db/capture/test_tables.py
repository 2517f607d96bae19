"""Which tables are captured: whatever they are called and keyed by, added while the others go on, stopped alone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.db.capture.captured import fill, make_tables
from tests.db.capture.running import RunningCapture, running
from tests.servers.postgres import Database, PostgresServer

from headwater.capture import TableState
from headwater.control.command import AddTables
from headwater.control.request import ask_capture
from headwater.errors import HeadwaterError
from headwater.sources.events import Registered
from headwater.sources.open import open_source
from headwater.sources.postgres import source
from headwater.sources.postgres.offset import PostgresOffset
from headwater.state.errors import StoreNotFound

# -- names and keys ----------------------------------------------------------------------------------------------------

NAMES = (
    '"Orders"',
    '"a.b"',
    '"say ""hi"""',
    '"Ünï cöde"',
    '"%s {0} $1"',
    f'"{"n" * 63}"',
    '"My.Schema"."My.Table"',
    'two."Orders"',
)


def test_names_of_every_kind_in_several_schemas(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute('CREATE SCHEMA "My.Schema"', "CREATE SCHEMA two")
    for name in NAMES:
        newest_postgres.execute(f'CREATE TABLE {name} ("Id" int PRIMARY KEY, "a.b" text, "q""q" text)')
        newest_postgres.execute(f'ALTER TABLE {name} ALTER COLUMN "a.b" SET STORAGE EXTERNAL')
    with running(newest_postgres, tmp_path, *NAMES) as capture:
        for place, name in enumerate(NAMES):
            newest_postgres.execute(
                f"INSERT INTO {name} SELECT i, repeat('x', 5000), 'y' FROM generate_series(1, {place + 3}) i",
                f'UPDATE {name} SET "q""q" = \'z\' WHERE "Id" = 1',  # "a.b" is unchanged and stored apart
                f'DELETE FROM {name} WHERE "Id" = 2',
            )
        capture.assert_equal(*NAMES)
        assert len(capture.tables()) == len(NAMES)
    capture.start([])  # known by the store alone
    newest_postgres.execute(*(f'UPDATE {name} SET "Id" = 1000 WHERE "Id" = 1' for name in NAMES))
    capture.assert_equal(*NAMES)
    capture.stop()


KEYS = {
    "reversed": ("b text, a int, v text, PRIMARY KEY (a, b)", "'b' || i, i, 'v'"),
    "collated": (
        'a text COLLATE "en-x-icu", v text, PRIMARY KEY (a)',
        "(ARRAY['a','B','ä','Z ','z'])[i], 'v'",
    ),
    "blind": ("a text COLLATE blind, v text, PRIMARY KEY (a)", "(ARRAY['a','B','ä','Z ','y'])[i], 'v'"),
    "uuid": ("a uuid PRIMARY KEY, v text", "md5(i::text)::uuid, 'v'"),
    "enum": ("a mood PRIMARY KEY, v text", "(enum_range(NULL::mood))[i], 'v'"),
    "numeric": ("a numeric(20,5) PRIMARY KEY, v text", "i * -1.5, 'v'"),
    "unconstrained": ("a numeric PRIMARY KEY, v text", "i / 3.0, 'v'"),
    "time": ("a timestamptz PRIMARY KEY, v text", "'2024-01-01 00:00+03'::timestamptz + i * interval '1 us', 'v'"),
    "padded": ("a char(4) PRIMARY KEY, v text", "i::text, 'v'"),
    "bytes": ("a bytea PRIMARY KEY, v text", "decode(lpad(i::text, 4, '0'), 'hex'), 'v'"),
    "domain": ("a positive PRIMARY KEY, v text", "i, 'v'"),
}


def test_m17_keys_of_every_kind_find_their_rows(
    postgres_servers: Callable[[int], PostgresServer], tmp_path: Path
) -> None:
    with postgres_servers(15).database() as database:  # the one that has ICU
        _find_their_rows(database, tmp_path)


def _find_their_rows(database: Database, tmp_path: Path) -> None:
    database.execute(
        "CREATE TYPE mood AS ENUM ('z', 'A', 'a b', 'it''s', 'ok')",
        "CREATE DOMAIN positive AS int CHECK (value > 0)",
        "CREATE COLLATION blind (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
    )
    for name, (columns, values) in KEYS.items():
        database.execute(
            f"CREATE TABLE k_{name} ({columns}, n int)",
            f"ALTER TABLE k_{name} ALTER COLUMN v SET STORAGE EXTERNAL",
            f"INSERT INTO k_{name} SELECT {values}, i FROM generate_series(1, 5) i",
            f"UPDATE k_{name} SET v = repeat('large', 2000)",
        )
    names = [f"k_{name}" for name in KEYS]
    with running(database, tmp_path, *names) as capture:
        for name in names:
            database.execute(f"UPDATE {name} SET n = n + 10")  # v is read again by the key
            database.execute(f"DELETE FROM {name} WHERE n = 13")
        capture.catch_up()
        for name in names:
            rows = [row for row in capture.rows(f"public.{name}") if row["_op"] != 2]
            unknown = [row["n"] for row in rows if row["_unavailable"]]
            assert unknown in ([], [13]), name  # it may be deleted before it is read
            assert {row["v"] for row in rows if row["n"] != 13} == {"large" * 2000}, name
        database.execute(*(f"UPDATE {name} SET v = 'short'" for name in names))
        capture.catch_up()
        for name in names:
            replayed = capture.replayed(f"public.{name}")
            assert sorted(replayed.column("n").to_pylist()) == [11, 12, 14, 15], name


def test_a_replica_identity_index_is_the_key(newest_postgres: Database, tmp_path: Path) -> None:
    newest_postgres.execute(
        "CREATE TABLE t (id int PRIMARY KEY, code text NOT NULL, region int NOT NULL, v text)",
        "CREATE UNIQUE INDEX t_code ON t (region, code)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX t_code",
    )
    with running(newest_postgres, tmp_path, "t") as capture:
        newest_postgres.execute(
            "INSERT INTO t SELECT i, 'c' || i, i % 3, 'v' FROM generate_series(1, 20) i",
            "UPDATE t SET id = id + 100 WHERE id < 5",
            "UPDATE t SET code = 'moved' || id WHERE region = 1",
            "DELETE FROM t WHERE region = 2",
        )
        capture.assert_equal("t")
        newest_postgres.execute("ALTER TABLE t REPLICA IDENTITY DEFAULT", "UPDATE t SET v = 'w'")
        assert "key changed" in capture.wait_until_stopped("public.t")


def test_a_key_that_is_dropped_stops_the_table_alone(newest_postgres: Database, tmp_path: Path) -> None:
    make_tables(newest_postgres, "t", "other")
    with running(newest_postgres, tmp_path, "t", "other") as capture:
        fill(newest_postgres, 1, 10)
        newest_postgres.execute("ALTER TABLE t DROP CONSTRAINT t_pkey")
        fill(newest_postgres, 11, 20)
        assert (
            "no primary key" in capture.wait_until_stopped("public.t")
            or "no key" in capture.tables()["public.t"].reason
        )
        fill(newest_postgres, 1, 10, "other")
        capture.assert_equal("other")


GONE = {"dropped": ("DROP TABLE t", "dropped"), "without a key": ("ALTER TABLE t DROP CONSTRAINT t_pkey", "key")}


@pytest.mark.parametrize("what", GONE)
def test_a_table_that_goes_while_no_capture_runs_stops_alone(
    newest_postgres: Database, tmp_path: Path, what: str
) -> None:
    make_tables(newest_postgres, "t", "other")
    with running(newest_postgres, tmp_path, "t", "other"):
        fill(newest_postgres, 1, 10)
    statement, reason = GONE[what]
    newest_postgres.execute(statement)
    with running(newest_postgres, tmp_path, "t", "public.other") as capture:
        fill(newest_postgres, 1, 10, "other")
        if what != "dropped":
            fill(newest_postgres, 11, 20)
        assert reason in capture.wait_until_stopped("public.t")
        capture.assert_equal("other")
        assert capture.failure is None


# -- adding ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def under_load(newest_postgres: Database) -> Iterator[None]:
    """A table ``busy`` that is written all the while."""
    make_tables(newest_postgres, "busy")
    ended = threading.Event()

    def write() -> None:
        with newest_postgres.connect() as session:
            number = 0
            while not ended.wait(0.001):
                number += 1
                session.execute("INSERT INTO busy VALUES (%s, 'x')", [number])

    writer = threading.Thread(target=write)
    writer.start()
    yield
    ended.set()
    writer.join()


def headwater(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headwater.cli.main", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)


@pytest.mark.usefixtures("under_load")
def test_tables_are_added_under_load_by_request_and_by_command(newest_postgres: Database, tmp_path: Path) -> None:
    database = newest_postgres
    make_tables(database, "a", "b", '"C d"')
    capture = RunningCapture(database, tmp_path, ["busy"])
    capture.start()
    ask_capture(capture.store, AddTables(("a",)))
    fill(database, 1, 100, "a")
    added = headwater("add-table", str(capture.store), "b", '"C d"')
    assert added.returncode == 0, added.stderr
    fill(database, 1, 100, "b")
    fill(database, 1, 100, '"C d"')
    capture.assert_equal("a", "b", '"C d"')
    unknown = headwater("add-table", str(capture.store), "nowhere")
    assert unknown.returncode != 0
    assert "no table public.nowhere" in unknown.stderr
    fill(database, 101, 200, "a")
    capture.assert_equal("a", "b")
    capture.assert_once("public.a", "public.b", "public.busy")
    capture.stop()
    fill(database, 201, 300, "a")
    capture.start([])
    capture.assert_equal("a", "b", '"C d"')
    capture.stop()
    busy = [row["id"] for row in capture.rows("public.busy")]
    assert busy == list(range(busy[0], busy[0] + len(busy)))


def test_a_table_that_cannot_be_captured_is_told_to_who_asks_and_the_capture_goes_on(
    newest_postgres: Database, tmp_path: Path
) -> None:
    make_tables(newest_postgres, "t", "good")
    newest_postgres.execute("CREATE TABLE keyless (a int)", "CREATE VIEW seen AS SELECT 1 AS a")
    with running(newest_postgres, tmp_path, "t") as capture:
        for name, expected in (
            ("nowhere", "no table"),
            ("keyless", "REPLICA IDENTITY FULL"),
            ("seen", "a view"),
            ("a.b.c", "not the name of a table"),
        ):
            with pytest.raises(HeadwaterError, match=expected):
                ask_capture(capture.store, AddTables(("good", name)))
        assert set(capture.tables()) == {"public.t"}
        ask_capture(capture.store, AddTables(("good", "t")))
        fill(newest_postgres, 1, 10)
        fill(newest_postgres, 1, 10, "good")
        capture.assert_equal("t", "good")
        assert capture.capture.statistics.restarts == 0
    with pytest.raises(StoreNotFound):
        ask_capture(tmp_path / "no store", AddTables(("t",)))
    assert not (tmp_path / "no store").exists()


@pytest.mark.parametrize("altered", [False, True])
def test_a_table_that_the_server_has_described_before_it_was_added_is_captured(
    newest_postgres: Database, tmp_path: Path, altered: bool
) -> None:
    """A publication of all tables sends every table: the server describes each once, before anybody wants it."""
    make_tables(newest_postgres, "t", "later")
    newest_postgres.execute("CREATE PUBLICATION headwater FOR ALL TABLES WITH (publish_via_partition_root = true)")
    with running(newest_postgres, tmp_path, "t") as capture:
        fill(newest_postgres, 1, 10)
        fill(newest_postgres, 1, 10, "later")
        capture.catch_up()
        if altered:
            newest_postgres.execute("ALTER TABLE later ADD COLUMN n int")
        ask_capture(capture.store, AddTables(("later",)))
        fill(newest_postgres, 11, 12, "later")
        if altered:
            newest_postgres.execute("INSERT INTO later VALUES (13, 'thirteen', 13)")
        capture.catch_up()
        rows = [(row["id"], row["v"], row.get("n")) for row in capture.rows("public.later")]
        assert rows == [(11, "v11", None), (12, "v12", None)] + ([(13, "thirteen", 13)] if altered else [])
        capture.assert_equal("t")


def test_m15_a_transaction_that_had_written_to_an_added_table_is_waited_for(
    newest_postgres: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "WRITERS_SECONDS", 0.2)
    database = newest_postgres
    make_tables(database, "t", "later")
    with running(database, tmp_path, "t") as capture:
        with database.connect() as session, session.transaction():
            session.execute("INSERT INTO later VALUES (1, 'before')")
            with pytest.raises(HeadwaterError, match="still open"):
                ask_capture(capture.store, AddTables(("later",)))
            assert "public.later" not in capture.tables()
            session.execute("INSERT INTO later VALUES (2, 'after')")
            fill(database, 1, 10)
            capture.assert_equal("t")
        ask_capture(capture.store, AddTables(("later",)))
        fill(database, 10, 20, "later")
        capture.catch_up()
        assert capture.capture.statistics.restarts == 0
        since = capture.tables()["public.later"].since
        rows = capture.rows("public.later")
    whole = [row["id"] for row in rows if PostgresOffset.from_position(row["_position"]) > since]
    assert whole == list(range(10, 21))


def test_two_who_ask_at_once_are_both_answered(newest_postgres: Database, tmp_path: Path) -> None:
    names = [f"t{number}" for number in range(4)]
    make_tables(newest_postgres, "t", *names)
    with running(newest_postgres, tmp_path, "t") as capture:
        failures: list[BaseException] = []

        def add(name: str) -> None:
            try:
                ask_capture(capture.store, AddTables((name,)))
            except HeadwaterError as error:
                failures.append(error)

        askers = [threading.Thread(target=add, args=(name,)) for name in names]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        assert failures == []
        assert set(capture.tables()) == {"public.t", *(f"public.{name}" for name in names)}


# -- stopping ----------------------------------------------------------------------------------------------------------


def test_a_stopped_table_is_not_added_again_and_does_not_keep_others_from_starting(
    newest_postgres: Database, tmp_path: Path
) -> None:
    make_tables(newest_postgres, "t", "other")
    capture = RunningCapture(newest_postgres, tmp_path, ["t", "other"])
    capture.start()
    fill(newest_postgres, 1, 10)
    newest_postgres.execute("ALTER TABLE t ALTER COLUMN v TYPE int USING 0")
    fill_int = "INSERT INTO t SELECT i, i FROM generate_series(11, 20) i"
    newest_postgres.execute(fill_int)
    capture.wait_until_stopped("public.t")
    with pytest.raises(HeadwaterError, match=r"headwater resnapshot public\.t"):
        ask_capture(capture.store, AddTables(("t",)))
    capture.stop()
    capture.start()
    fill(newest_postgres, 1, 10, "other")
    newest_postgres.execute("DELETE FROM t")
    capture.assert_equal("other")
    capture.stop()
    assert capture.tables()["public.t"].state is TableState.STOPPED
    assert [row["id"] for row in capture.rows("public.t")] == list(range(1, 11))


def test_a_column_that_changes_before_its_table_is_registered_is_seen_once_the_stream_has_passed_it(
    newest_postgres: Database, tmp_path: Path
) -> None:
    newest_postgres.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    database = open_source(newest_postgres.dsn, spill=tmp_path)
    (table,) = database.tables(["t"])
    position, identity = database.begin([table], resumed=False)
    newest_postgres.execute("ALTER TABLE t RENAME COLUMN v TO w")
    entry = Registered(table, database.register([table])[table.full_name])
    stream = database.open([table], position, identity)
    try:
        checked = database.check([entry])
        assert (checked.findings, checked.time) == ([], None)  # rows of before may follow
        for _ in range(40):
            for _ in range(3):  # the heartbeat of the check, and then nothing
                stream.poll(0.25, stop_at_boundary=False)
            checked = database.check([entry])
            if checked.findings:
                break
        (finding,) = checked.findings
        assert finding.change is not None
        assert finding.change.renamed == (("v", "w"),)
        assert checked.time is not None
    finally:
        stream.close()
        database.close()

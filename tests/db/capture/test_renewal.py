"""A capture that goes on after a gap: tables that had stopped, slots and servers that are gone. Never a silent gap."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.db.capture.captured import SLOT, captured, drop_slot, fill, make_tables, write_much_wal
from tests.db.capture.running import RunningCapture, running
from tests.db.conftest import StartPostgres
from tests.servers.postgres import Database, PostgresServer

from headwater.capture import TableState
from headwater.capture.renewal import renew
from headwater.control.command import AddTables, CaptureCommand, RecaptureSource, RecaptureTables
from headwater.control.request import Request, ask_capture, leave
from headwater.errors import HeadwaterError
from headwater.log_store import LogView
from headwater.log_store.log_events import FORMER_KEY, FORMER_VERSION, RENEWED, RESHAPED, SCHEMA
from headwater.sources.errors import (
    SchemaStopped,
    ServerReplaced,
    SlotInvalidated,
    SlotLost,
    SlotMoved,
    SourceError,
    SourceMisconfigured,
    SourceNotFound,
    SourceWentBack,
)
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.postgres import slot as slots
from headwater.sources.postgres import source
from headwater.sources.postgres.connection import Dsn
from headwater.sources.postgres.offset import PostgresOffset
from headwater.sources.postgres.stream import ReplicationStream
from headwater.state import open_reader
from headwater.state.errors import StoreNotFound


def since(capture: RunningCapture, log: str = "public.t") -> PostgresOffset:
    found = capture.tables()[log].since
    assert isinstance(found, PostgresOffset)
    return found


def rows_since(capture: RunningCapture, log: str = "public.t") -> list[dict[str, Any]]:
    """The rows of a log that its ``since`` speaks for."""
    begin = since(capture, log)
    return [row for row in capture.rows(log) if PostgresOffset.from_position(row["_position"]) >= begin]


def ids(rows: list[dict[str, Any]]) -> list[int]:
    return [row["id"] for row in rows]


def assert_active(capture: RunningCapture, *logs: str) -> None:
    for log in logs:
        known = capture.tables()[log]
        assert (known.state, known.reason) == (TableState.ACTIVE, ""), known


# -- tables ------------------------------------------------------------------------------------------------------------

STOPS = {
    "key changed": (
        "ALTER TABLE t ADD COLUMN n int; UPDATE t SET n = id; ALTER TABLE t DROP CONSTRAINT t_pkey; "
        "ALTER TABLE t ADD PRIMARY KEY (n)",
        "INSERT INTO t (id, v, n) SELECT i, 'v', i FROM generate_series({0}, {1}) i",
        ("n",),
    ),
    "out of the publication": (
        "ALTER PUBLICATION headwater DROP TABLE t",
        "INSERT INTO t (id, v) SELECT i, 'v' FROM generate_series({0}, {1}) i",
        ("id",),
    ),
    "made anew": (
        "DROP TABLE t; CREATE TABLE t (w int NOT NULL, id text PRIMARY KEY)",
        "INSERT INTO t (w, id) SELECT i, i FROM generate_series({0}, {1}) i",
        ("id",),
    ),
    "retyped": (
        "ALTER TABLE t ALTER COLUMN v TYPE int USING 0",
        "INSERT INTO t (id, v) SELECT i, i FROM generate_series({0}, {1}) i",
        ("id",),
    ),
}


@pytest.mark.parametrize("poll", [False, True])
@pytest.mark.parametrize("how", STOPS)
def test_a_table_that_had_stopped_is_captured_anew_while_the_others_go_on(
    newest_postgres: Database, tmp_path: Path, how: str, poll: bool
) -> None:
    database = newest_postgres
    change, insert, key = STOPS[how]
    make_tables(database, "t", "other")
    with running(database, tmp_path, "t", "other", poll=poll) as capture:
        fill(database, 1, 10)
        capture.catch_up()
        first = since(capture)
        database.execute(*change.split("; "), insert.format(11, 20))
        capture.wait_until_stopped("public.t")
        fill(database, 1, 10, "other")
        assert not renew(capture.store, ["t"])
        assert_active(capture, "public.t", "public.other")
        assert since(capture) > first
        database.execute(insert.format(21, 30))
        fill(database, 11, 20, "other")
        capture.assert_equal("other")
        assert [int(row["id"]) for row in rows_since(capture)] == list(range(21, 31))
        assert capture.capture.statistics.stopped_tables == {}
        changed = [event.detail for event in capture.events("public.t") if event.kind == SCHEMA]
        assert changed  # the place of the gap is told, whether the columns are others or not
        assert capture.capture.statistics.restarts == 0
    capture.start([])
    database.execute(insert.format(31, 40))
    capture.catch_up()
    rows = rows_since(capture)
    assert [int(row["id"]) for row in rows] == list(range(21, 41))
    columns = database.execute("SELECT column_name FROM information_schema.columns WHERE table_name = 't'")
    expected = {name for (name,) in columns}
    assert {name for name in rows[-1] if not name.startswith("_")} == expected
    assert_active(capture, "public.t")
    capture.assert_once("public.other", "public.t")
    assert capture.tables()["public.t"].source_id == database.value("SELECT 't'::regclass::oid::bigint")
    assert key == key_of(capture, "public.t")
    capture.stop()


def key_of(capture: RunningCapture, log: str) -> tuple[str, ...]:
    with open_reader(capture.store) as reader, reader.snapshot() as view:
        return LogView.open(view, log).log.key_columns


def test_what_a_renewal_changes_is_told_by_an_event(newest_postgres: Database, tmp_path: Path) -> None:
    database = newest_postgres
    database.execute("CREATE TABLE t (id int PRIMARY KEY, a text, b text, c text)")
    with running(database, tmp_path, "t") as capture:
        database.execute("INSERT INTO t VALUES (1, 'a', 'b', 'c')")
        capture.catch_up()
        database.execute(
            "ALTER TABLE t RENAME a TO z",
            "ALTER TABLE t DROP COLUMN b",
            "ALTER TABLE t ALTER COLUMN c TYPE int USING 3",
            "ALTER TABLE t ADD COLUMN d int",
        )
        assert not renew(capture.store, ["t"])
        (event,) = [event for event in capture.events("public.t") if event.kind == SCHEMA]
        told = {"added": ["d"], "dropped": ["b"], "renamed": {"a": "z"}, "retyped": ["c"], "defaults": None}
        shape = {RESHAPED: "columns", FORMER_KEY: ["id"], FORMER_VERSION: 1}
        assert event.detail == told | {RENEWED: since(capture).to_json()} | shape
        database.execute("INSERT INTO t VALUES (2, 'z', 5, 6)")
        capture.catch_up()
        (row,) = rows_since(capture)
        assert (row["id"], row["z"], row["c"], row["d"]) == (2, "z", 5, 6)
        assert "b" not in row


def test_an_active_table_gets_another_since_each_time_also_in_an_idle_database(
    newest_postgres: Database, tmp_path: Path
) -> None:
    make_tables(newest_postgres)
    with running(newest_postgres, tmp_path, "t") as capture:
        fill(newest_postgres, 1, 10)
        capture.catch_up()
        seen = [since(capture).to_json()]
        for _ in range(3):
            assert not renew(capture.store, ["t"])
            seen.append(since(capture).to_json())
        assert len(set(seen)) == 4
        assert_active(capture, "public.t")
        assert rows_since(capture) == []
        fill(newest_postgres, 11, 20)
        capture.assert_equal("t")
        capture.assert_once("public.t")


def test_an_active_table_is_renewed_under_load_with_no_change_missing_after_since(
    newest_postgres: Database, tmp_path: Path
) -> None:
    database = newest_postgres
    make_tables(database)
    ended = threading.Event()

    def write() -> None:
        with database.connect() as session:
            number = 0
            while not ended.is_set():
                with session.transaction():
                    for _ in range(5):
                        number += 1
                        session.execute("INSERT INTO t VALUES (%s, 'x')", [number])

    writer = threading.Thread(target=write)
    with running(database, tmp_path, "t") as capture:
        writer.start()
        try:
            for _ in range(3):
                assert not renew(capture.store, ["t"])
            begun = database.value("SELECT max(id) FROM t")
            capture.wait_for(lambda: database.value("SELECT max(id) FROM t") > begun)
        finally:
            ended.set()
            writer.join()
        capture.catch_up()
        found = ids(rows_since(capture))
        capture.assert_once("public.t")
    last = database.value("SELECT max(id) FROM t")
    assert found == list(range(found[0], last + 1))
    assert found[0] % 5 == 1, "a transaction is told whole"


def test_rows_of_former_shapes_before_the_renewal_do_not_stop_it_again(
    newest_postgres: Database, tmp_path: Path
) -> None:
    """The stream has not come to the change yet when the table is renewed."""
    database = newest_postgres
    make_tables(database, "t", "other")
    capture = captured(database, tmp_path, "t", "other")
    capture.stop()
    fill(database, 11, 20)
    change, insert, _ = STOPS["key changed"]
    database.execute(*change.split("; "), insert.format(21, 30), "ALTER TABLE t DROP COLUMN v")
    fill(database, 1, 10, "other")
    assert renew(capture.store, ["t"])
    capture.start()
    capture.wait_for(lambda: capture.failure is not None or key_of(capture, "public.t") == ("n",))
    assert_active(capture, "public.t")
    database.execute("INSERT INTO t (id, n) VALUES (31, 31)")
    capture.assert_equal("other")
    assert ids(rows_since(capture)) == [31]
    capture.stop()


@pytest.mark.parametrize("policy", [SchemaPolicy.STOP, SchemaPolicy.EVOLVE])
def test_a_renewal_that_was_asked_for_while_nothing_ran_is_done_at_the_start(
    newest_postgres: Database, tmp_path: Path, policy: SchemaPolicy
) -> None:
    database = newest_postgres
    make_tables(database, "t", "other")
    capture = captured(database, tmp_path, "t", "other", schema_policy=policy)
    change, insert, _ = STOPS["key changed"]
    database.execute(*change.split("; "), insert.format(11, 20))
    if policy is SchemaPolicy.STOP:
        assert isinstance(capture.wait_for_end(), SchemaStopped)
        assert isinstance(capture.fails_to_start(), SchemaStopped)
    else:
        capture.wait_until_stopped("public.t")
        capture.stop()
        capture.start()  # names the table that is stopped: it stays so, and the others go on
        fill(database, 11, 12, "other")
        capture.assert_equal("other")
        capture.wait_until_stopped("public.t")
        capture.stop()
    assert renew(capture.store, ["public.t"])
    capture.start()  # names the table that is stopped
    capture.wait_for(lambda: capture.failure is not None or key_of(capture, "public.t") == ("n",))
    assert capture.failure is None
    database.execute(insert.format(21, 30))
    fill(database, 1, 10, "other")
    capture.assert_equal("other")
    assert ids(rows_since(capture)) == list(range(21, 31))
    begun = since(capture)
    capture.stop()
    capture.start()
    capture.catch_up()
    assert since(capture) == begun, "it is done once"
    capture.stop()


def test_what_cannot_be_renewed_is_told_to_who_asks_and_the_capture_goes_on(
    newest_postgres: Database, tmp_path: Path
) -> None:
    database = newest_postgres
    make_tables(database, "t", "never", "keyless", "filtered")
    with running(database, tmp_path, "t", "keyless", "filtered") as capture:
        capture.catch_up()
        before = {name: known.since for name, known in capture.tables().items()}
        database.execute(
            "ALTER TABLE keyless DROP CONSTRAINT keyless_pkey",
            "ALTER PUBLICATION headwater SET TABLE t, keyless, filtered WHERE (id > 5)",
        )
        for name, expected in (
            ("nowhere", "no table"),
            ("never", r"not captured into this store. Run: headwater add-table … public\.never"),
            ("keyless", "ALTER TABLE"),
            ("filtered", "row filter"),
        ):
            with pytest.raises(HeadwaterError, match=expected):
                renew(capture.store, ["t", name])
        fill(database, 1, 10)
        capture.assert_equal("t")
        assert_active(capture, "public.t")
        assert since(capture) == before["public.t"]
    with pytest.raises(StoreNotFound):
        renew(tmp_path / "no store", ["t"])
    assert not (tmp_path / "no store").exists()


def test_a_transaction_that_has_written_to_the_table_is_named_to_who_asks(
    newest_postgres: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "WRITERS_SECONDS", 0.2)
    make_tables(newest_postgres)
    with running(newest_postgres, tmp_path, "t") as capture:
        with newest_postgres.connect() as session, session.transaction():
            session.execute("INSERT INTO t VALUES (1, 'open')")
            with pytest.raises(HeadwaterError, match=f"still open .*{session.info.backend_pid}"):
                renew(capture.store, ["t"])
            assert_active(capture, "public.t")
        capture.assert_equal("t")


def test_a_renewal_that_nobody_waits_for_waits_for_open_transactions_while_the_others_go_on(
    newest_postgres: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "WRITERS_SECONDS", 0.2)
    database = newest_postgres
    make_tables(database, "t", "other")
    capture = RunningCapture(database, tmp_path, ["t", "other"])
    capture.start()
    capture.catch_up()
    database.execute("ALTER PUBLICATION headwater DROP TABLE t")
    capture.wait_until_stopped("public.t")
    capture.stop()
    assert renew(capture.store, ["t"])
    with database.connect() as session, session.transaction():
        session.execute("INSERT INTO t VALUES (1, 'open')")
        capture.start()
        fill(database, 1, 10, "other")
        capture.assert_equal("other")
        assert capture.tables()["public.t"].state is TableState.STOPPED
        session.execute("INSERT INTO t VALUES (2, 'open')")
    capture.wait_for(lambda: capture.tables()["public.t"].state is TableState.ACTIVE)
    fill(database, 3, 10)
    capture.catch_up()
    assert ids(rows_since(capture)) == list(range(3, 11))
    capture.stop()


def test_requests_for_one_table_at_once_are_all_answered(newest_postgres: Database, tmp_path: Path) -> None:
    make_tables(newest_postgres, "t", "u")
    with running(newest_postgres, tmp_path, "t", "u") as capture:
        failures: list[BaseException] = []

        def ask_for(command: CaptureCommand) -> None:
            try:
                ask_capture(capture.store, command, seconds=60)
            except HeadwaterError as error:
                failures.append(error)

        wanted = [
            RecaptureTables(("t",)),
            RecaptureTables(("t", "u")),
            AddTables(("u",)),
            RecaptureTables(("u",)),
        ]
        askers = [threading.Thread(target=ask_for, args=(command,)) for command in wanted]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        assert failures == []
        assert_active(capture, "public.t", "public.u")
        fill(newest_postgres, 1, 10)
        fill(newest_postgres, 1, 10, "u")
        capture.assert_equal("t", "u")


# -- the source --------------------------------------------------------------------------------------------------------


def give_up_slot(database: Database) -> None:
    """Make the server give up the slot: it holds more log than it may."""
    database.server.reload(max_slot_wal_keep_size="1MB")
    try:
        write_much_wal(database.server)
    finally:
        database.server.reload(max_slot_wal_keep_size="-1")


def move_slot(database: Database) -> None:
    database.execute(f"SELECT pg_replication_slot_advance('{SLOT}', pg_current_wal_lsn())")


def drop_publication(database: Database) -> None:
    database.execute("DROP PUBLICATION headwater")


GAPS: dict[str, tuple[Callable[[Database], None], type[SourceError]]] = {
    "slot dropped": (drop_slot, SlotLost),
    "slot given up": (give_up_slot, SlotInvalidated),
    "slot moved": (move_slot, SlotMoved),
    "publication dropped": (drop_publication, SourceNotFound),
}


@pytest.mark.parametrize("how", GAPS)
def test_a_gap_at_the_source_ends_with_a_new_slot_and_since(postgres: Database, tmp_path: Path, how: str) -> None:
    database = postgres
    make_gap, expected = GAPS[how]
    make_tables(database, "t", "other")
    capture = captured(database, tmp_path, "t", "other")
    capture.stop()
    fill(database, 11, 20)
    make_gap(database)
    assert isinstance(capture.fails_to_start(), expected)
    before = since(capture)
    assert renew(capture.store, None)
    capture.start()
    assert capture.failure is None, capture.failure
    assert since(capture) == since(capture, "public.other") > before
    fill(database, 21, 30)
    fill(database, 1, 10, "other")
    capture.catch_up()
    assert ids(rows_since(capture)) == list(range(21, 31))
    capture.assert_equal("other")
    begun = since(capture)
    capture.stop()
    fill(database, 31, 40)
    capture.start()
    capture.catch_up()
    assert since(capture) == begun, "it is done once"
    assert ids(rows_since(capture)) == list(range(21, 41))
    assert database.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 1
    capture.assert_once("public.t", "public.other")
    capture.stop()


@pytest.mark.parametrize("poll", [False, True])
def test_a_running_capture_prepares_its_source_anew_in_its_next_session(
    newest_postgres: Database, tmp_path: Path, poll: bool
) -> None:
    database = newest_postgres
    make_tables(database, "t", "gone", "keyless", "stopped")
    with running(database, tmp_path, "t", "gone", "keyless", "stopped", poll=poll) as capture:
        fill(database, 1, 10)
        database.execute("ALTER PUBLICATION headwater DROP TABLE stopped")
        capture.wait_until_stopped("public.stopped")
        capture.catch_up()
        before = since(capture)
        database.execute(
            "ALTER TABLE keyless DROP CONSTRAINT keyless_pkey", "DROP TABLE gone", "ALTER TABLE t ADD COLUMN n int"
        )
        assert not renew(capture.store, None)
        assert_active(capture, "public.t", "public.stopped")
        assert since(capture) == since(capture, "public.stopped") > before
        tables = capture.tables()
        assert {name for name, known in tables.items() if known.state is TableState.STOPPED} == {
            "public.gone",
            "public.keyless",
        }
        assert "no table public.gone" in tables["public.gone"].reason
        assert "ALTER TABLE" in tables["public.keyless"].reason
        assert set(capture.capture.statistics.stopped_tables) == {"public.gone", "public.keyless"}
        database.execute("INSERT INTO t VALUES (11, 'eleven', 11)")
        fill(database, 1, 10, "stopped")
        capture.catch_up()
        (row,) = rows_since(capture)
        assert (row["id"], row["n"]) == (11, 11)
        capture.assert_equal("stopped")
        assert capture.capture.statistics.restarts == 0
        assert capture.failure is None


def test_a_table_that_became_a_part_of_another_stops_and_the_root_goes_on(
    newest_postgres: Database, tmp_path: Path
) -> None:
    database = newest_postgres
    database.execute("CREATE TABLE root (id bigint PRIMARY KEY, v text) PARTITION BY RANGE (id)")
    make_tables(database, "leaf")
    with running(database, tmp_path, "root", "leaf") as capture:
        capture.catch_up()
        database.execute("ALTER TABLE root ATTACH PARTITION leaf FOR VALUES FROM (0) TO (1000)")
        assert not renew(capture.store, None)
        assert "partition of public.root" in capture.tables()["public.leaf"].reason
        assert_active(capture, "public.root")


@pytest.fixture
def two_servers(start_postgres: StartPostgres) -> Iterator[tuple[Database, Database]]:
    with contextlib.ExitStack() as made_databases:
        yield tuple(made_databases.enter_context(start_postgres().database()) for _ in range(2))  # type: ignore[misc]


def test_another_server_is_taken_only_when_somebody_asks_and_a_slot_of_others_there_is_left_alone(
    two_servers: tuple[Database, Database], tmp_path: Path
) -> None:
    old, new = two_servers
    for database in two_servers:
        make_tables(database)
    old.execute("CREATE TABLE only_there (id int PRIMARY KEY)")
    capture = captured(old, tmp_path, "t", "only_there")
    capture.stop()
    moved = RunningCapture(new, tmp_path, [])
    assert isinstance(moved.fails_to_start(), ServerReplaced)
    new.execute(f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')")
    before = since(moved)
    for _ in range(2):  # what was refused does not make it ours
        assert renew(moved.store, None)
        error = moved.fails_to_start()
        assert isinstance(error, SourceMisconfigured)
        assert "this store does not know it" in str(error)
    assert new.value("SELECT count(*) FROM pg_publication") == 0
    assert isinstance(moved.fails_to_start(), ServerReplaced), "a request that was refused is not done later"
    assert since(moved) == before
    drop_slot(new)
    fill(new, 1, 5)
    assert renew(moved.store, None)
    moved.start()
    assert moved.failure is None, moved.failure
    assert "only_there" in moved.tables()["public.only_there"].reason
    assert since(moved).to_json() != before.to_json()
    fill(new, 11, 20)
    moved.catch_up()
    assert ids(moved.rows("public.t"))[-10:] == list(range(11, 21))
    moved.stop()
    moved.start()
    fill(new, 21, 30)
    moved.catch_up()
    assert ids(moved.rows("public.t")) == [*range(1, 11), *range(11, 31)]
    moved.stop()
    assert old.value("SELECT count(*) FROM pg_replication_slots") == 1


def test_a_server_that_was_restored_from_a_backup_goes_on(start_postgres: StartPostgres, tmp_path: Path) -> None:
    server = start_postgres()
    with server.database() as database:
        make_tables(database)
        capture = captured(database, tmp_path)
        server.stop()
        backup = server.base / "backup"
        subprocess.run(["cp", "-a", str(server.data), str(backup)], check=True)
        server.start()
        fill(database, 11, 5000)
        capture.catch_up()
        capture.stop()
        restore(server, backup)
        assert isinstance(capture.fails_to_start(), SourceWentBack)
        assert renew(capture.store, None)
        capture.start()
        assert capture.failure is None, capture.failure
        fill(database, 11, 20)
        capture.catch_up()
        assert ids(capture.rows("public.t"))[-10:] == list(range(11, 21))
        assert database.value("SELECT count(*) FROM pg_replication_slots") == 1
        capture.stop()


def restore(server: PostgresServer, backup: Path) -> None:
    server.stop()
    subprocess.run(["rm", "-rf", str(server.data)], check=True)
    subprocess.run(["mv", str(backup), str(server.data)], check=True)
    server.start()


def test_a_slot_that_another_process_reads_is_refused_with_its_pid_and_stays(
    newest_postgres: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "RELEASE_SECONDS", 0.3)
    database = newest_postgres
    make_tables(database)
    capture = captured(database, tmp_path)
    capture.stop()
    before = since(capture)
    assert renew(capture.store, None)
    reader = ReplicationStream.open(Dsn(database.dsn), SLOT, ["headwater"], 0)
    try:
        pid = database.value(f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{SLOT}'")
        error = capture.fails_to_start()
        assert isinstance(error, SourceMisconfigured)
        assert f"read by the server process {pid}" in str(error)
    finally:
        reader.close()
    capture.start()
    fill(database, 11, 20)
    capture.assert_equal("t")
    assert since(capture) == before
    capture.assert_once("public.t")
    capture.stop()


def test_a_new_slot_waits_for_open_transactions_and_is_made_when_they_have_ended(
    newest_postgres: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "CREATE_TIMEOUT_SECONDS", 1)
    database = newest_postgres
    make_tables(database, "t", "u")
    capture = captured(database, tmp_path)
    before = since(capture)
    with database.connect() as session, session.transaction():
        session.execute("INSERT INTO u VALUES (1, 'open')")
        session.execute("INSERT INTO t VALUES (11, 'open')")
        leave(capture.store, Request(RecaptureSource()))
        capture.wait_for(lambda: str(session.info.backend_pid) in capture.capture.statistics.last_error)
        assert since(capture) == before
    capture.wait_for(lambda: capture.failure is not None or since(capture) != before)
    fill(database, 21, 30)
    capture.catch_up()
    assert ids(rows_since(capture)) == list(range(21, 31))
    capture.stop()


def test_another_slot_name_is_another_slot(newest_postgres: Database, tmp_path: Path) -> None:
    """Somebody else reads the slot of ours: the way out is one of our own, and theirs is not touched."""
    database = newest_postgres
    make_tables(database)
    capture = captured(database, tmp_path)
    capture.stop()
    database.execute("SELECT pg_create_logical_replication_slot('theirs', 'pgoutput')")
    theirs = RunningCapture(database, tmp_path, [], slot="theirs")
    assert renew(theirs.store, None)
    assert "this store does not know it" in str(theirs.fails_to_start())
    ours = RunningCapture(database, tmp_path, [], slot="ours")
    leave(ours.store, Request(RecaptureSource()))
    ours.start()
    fill(database, 11, 20)
    ours.catch_up()
    assert ids(rows_since(ours)) == list(range(11, 21))
    ours.stop()
    names = database.execute("SELECT slot_name FROM pg_replication_slots ORDER BY 1")
    assert [name for (name,) in names] == [SLOT, "ours", "theirs"]


def test_a_new_store_leaves_the_slot_of_another_alone_however_often_it_is_started(
    newest_postgres: Database, tmp_path: Path
) -> None:
    """Whoever starts it again after the refusal must not get what the refusal kept from it."""
    make_tables(newest_postgres)
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first = RunningCapture(newest_postgres, tmp_path / "first", ["t"])
    first.start()
    first.stop()
    second = RunningCapture(newest_postgres, tmp_path / "second", ["t"])
    for _ in range(2):
        assert "this store does not know it" in str(second.fails_to_start())
    fill(newest_postgres, 1, 10)
    first.start()
    first.assert_equal("t")
    first.stop()


def test_a_new_store_begins_as_ever_when_it_is_asked_to_renew(newest_postgres: Database, tmp_path: Path) -> None:
    make_tables(newest_postgres)
    capture = RunningCapture(newest_postgres, tmp_path, ["t"])
    newest_postgres.execute(f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')")
    leave(capture.store, Request(RecaptureSource()))
    assert "this store does not know it" in str(capture.fails_to_start())
    drop_slot(newest_postgres)
    capture.start()
    fill(newest_postgres, 1, 10)
    capture.assert_equal("t")
    begun = since(capture)
    capture.stop()
    capture.start()
    capture.catch_up()
    assert since(capture) == begun
    capture.stop()

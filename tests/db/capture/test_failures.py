"""Capture while the server, the network, the disk or somebody else fails: never a silent gap, never a row twice."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from tests.db.capture.captured import SLOT, captured, drop_slot, end_walsenders, fill, make_tables, write_much_wal
from tests.db.capture.running import RunningCapture, running
from tests.db.conftest import StartPostgres
from tests.servers.postgres import Database, PostgresServer
from tests.servers.proxy import TcpProxy

from headwater.capture import CaptureState, TableState, statistics
from headwater.capture import capture as capture_module
from headwater.databases.secret_files import in_file
from headwater.errors import FencedError
from headwater.sources.errors import (
    LoginRefused,
    ServerReplaced,
    SlotInvalidated,
    SlotLost,
    SlotMoved,
    SourceNotFound,
)
from headwater.state import open_writer
from headwater.state.errors import StoreOwned
from headwater.stream import Epoch


@contextlib.contextmanager
def proxied(database: Database) -> Iterator[tuple[TcpProxy, str]]:
    """A proxy before the server, and the database's address through it."""
    with TcpProxy("127.0.0.1", database.server.port) as proxy:
        yield proxy, database.dsn.replace(f":{database.server.port}/", f":{proxy.port}/")


def confirmed(database: Database) -> int:
    query = f"SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_name = '{SLOT}'"
    return int(database.value(query))


# -- the slot ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("while_running", [True, False])
def test_a_dropped_slot_ends_the_capture_and_is_never_made_anew_in_silence(
    newest_postgres: Database, tmp_path: Path, while_running: bool
) -> None:
    make_tables(newest_postgres)
    capture = captured(newest_postgres, tmp_path)
    if not while_running:
        capture.stop()
    drop_slot(newest_postgres)
    error = capture.wait_for_end() if while_running else capture.fails_to_start()
    assert isinstance(error, SlotLost)
    assert "headwater resnapshot" in str(error)
    assert isinstance(capture.fails_to_start(), SlotLost)
    assert newest_postgres.value("SELECT count(*) FROM pg_replication_slots") == 0


@pytest.fixture
def small_wal(request: pytest.FixtureRequest) -> Iterator[Callable[[PostgresServer], None]]:
    """Makes a server give up slots that hold more than a megabyte, until the end of the test."""
    changed: list[PostgresServer] = []

    def limit(server: PostgresServer) -> None:
        changed.append(server)
        server.reload(max_slot_wal_keep_size="1MB")

    yield limit
    for server in changed:
        server.reload(max_slot_wal_keep_size="-1")


def test_m22_a_slot_that_the_server_gave_up_while_the_capture_was_down(
    postgres: Database, tmp_path: Path, small_wal: Callable[[PostgresServer], None]
) -> None:
    make_tables(postgres)
    capture = captured(postgres, tmp_path)
    capture.stop()
    small_wal(postgres.server)
    write_much_wal(postgres.server)
    error = capture.fails_to_start()
    assert isinstance(error, SlotInvalidated)
    assert "max_slot_wal_keep_size" in str(error)
    assert "headwater resnapshot" in str(error)


def test_m22_a_slot_that_the_server_gave_up_while_the_network_hung(
    newest_postgres: Database, tmp_path: Path, small_wal: Callable[[PostgresServer], None]
) -> None:
    make_tables(newest_postgres)
    with proxied(newest_postgres) as (proxy, dsn):
        capture = captured(newest_postgres, tmp_path, dsn=dsn)
        small_wal(newest_postgres.server)
        proxy.stall()
        write_much_wal(newest_postgres.server)
        lost = "SELECT wal_status FROM pg_replication_slots"
        capture.wait_for(lambda: newest_postgres.value(lost) == "lost")
        proxy.resume()
        assert isinstance(capture.wait_for_end(), SlotInvalidated)


@pytest.mark.parametrize("anew", [False, True])
def test_a_slot_that_somebody_moved_or_made_anew_is_a_gap_and_is_told(
    newest_postgres: Database, tmp_path: Path, anew: bool
) -> None:
    make_tables(newest_postgres)
    capture = captured(newest_postgres, tmp_path)
    capture.stop()
    fill(newest_postgres, 11, 20)
    if anew:
        newest_postgres.execute(
            f"SELECT pg_drop_replication_slot('{SLOT}')",
            f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')",
        )
    else:
        newest_postgres.execute(f"SELECT pg_replication_slot_advance('{SLOT}', pg_current_wal_lsn())")
    error = capture.fails_to_start()
    assert isinstance(error, SlotMoved)
    assert "headwater resnapshot" in str(error)


# -- the server --------------------------------------------------------------------------------------------------------


def test_another_server_at_the_same_address_is_refused_and_left_alone(
    start_postgres: StartPostgres, tmp_path: Path
) -> None:
    first, second = start_postgres(), start_postgres()
    with first.database() as old, second.database() as new:
        assert old.name == new.name
        for database in (old, new):
            make_tables(database)
            database.execute(f"ALTER ROLE postgres PASSWORD '{first.password}'")
        new.execute("CREATE TABLE only_here (id int PRIMARY KEY)")
        capture = captured(old, tmp_path)
        second.stop()
        first.stop()
        capture.wait_for(lambda: capture.capture.state is CaptureState.WAITING)
        second.port = first.port
        second.start()
        assert isinstance(capture.wait_for_end(), ServerReplaced)
        assert isinstance(capture.fails_to_start(["t", "only_here"]), ServerReplaced)
        assert new.value("SELECT count(*) FROM pg_publication") == 0
        assert new.value("SELECT count(*) FROM pg_replication_slots") == 0


def test_a_restart_of_the_server_is_waited_for(start_postgres: StartPostgres, tmp_path: Path) -> None:
    server = start_postgres()
    with server.database() as database:
        make_tables(database)
        with running(database, tmp_path, "t") as capture:
            fill(database, 1, 10)
            server.stop()
            capture.wait_for(lambda: capture.capture.state is CaptureState.WAITING)
            assert "cannot be reached" in capture.capture.statistics.last_error
            assert capture.capture.lag_seconds() is None
            server.start()
            capture.wait_for(lambda: capture.capture.lag_seconds() == 0)
            assert not capture.capture.statistics.last_error, "it is over, also where no change comes"
            fill(database, 11, 20)
            capture.assert_equal("t")
            capture.assert_once("public.t")
            assert capture.capture.statistics.restarts >= 1


def test_a_source_that_does_not_answer_has_an_unknown_lag(
    newest_postgres: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tables(newest_postgres)
    monkeypatch.setattr(statistics, "SILENT_SECONDS", 2.0)
    with running(newest_postgres, tmp_path, "t") as capture:
        capture.wait_for(lambda: capture.capture.lag_seconds() == 0)
        backends = [
            pid
            for (pid,) in newest_postgres.execute(
                "SELECT pid FROM pg_stat_activity WHERE application_name = 'headwater' AND datname = current_database()"
            )
        ]
        assert backends
        for pid in backends:
            os.kill(pid, signal.SIGSTOP)
        try:
            capture.wait_for(lambda: capture.capture.lag_seconds() is None, 10)
            assert capture.capture.state is CaptureState.RUNNING
        finally:
            for pid in backends:
                os.kill(pid, signal.SIGCONT)
        capture.wait_for(lambda: capture.capture.lag_seconds() == 0)


def test_a_fault_that_lasts_for_days_is_still_waited_for(newest_postgres: Database, tmp_path: Path) -> None:
    make_tables(newest_postgres)
    with proxied(newest_postgres) as (proxy, dsn), running(newest_postgres, tmp_path, "t", dsn=dsn) as capture:
        capture.capture._failures = 5000
        proxy.cut()
        fill(newest_postgres, 1, 10)
        capture.assert_equal("t")
        assert capture.capture.statistics.restarts >= 1


def test_a_power_cut_of_the_server_loses_and_doubles_nothing(start_postgres: StartPostgres, tmp_path: Path) -> None:
    server = start_postgres(settings={"fsync": "on", "full_page_writes": "on"})
    with server.database() as database:
        make_tables(database)
        with running(database, tmp_path, "t") as capture:
            for start in (1, 1001):
                with database.connect() as session:
                    for number in range(start, start + 100):
                        session.execute("INSERT INTO t VALUES (%s, 'x')", [number])
                    with contextlib.suppress(psycopg.OperationalError), session.transaction():
                        session.execute("UPDATE t SET v = 'never'")
                        server.kill9()
                server.start()
            fill(database, 5000, 5010)
            capture.assert_equal("t")
            capture.assert_once("public.t")
            assert all(row["v"] != "never" for row in capture.rows("public.t"))


def test_a_rotated_password_is_read_from_its_file_by_a_running_capture(
    newest_postgres: Database, tmp_path: Path
) -> None:
    make_tables(newest_postgres)
    role = newest_postgres.role("capturer", "REPLICATION")
    newest_postgres.execute(
        f'ALTER TABLE t OWNER TO "{role}"', f'GRANT CREATE ON DATABASE {newest_postgres.name} TO "{role}"'
    )
    dsn, file = newest_postgres.dsn_of(role), tmp_path / "shop.dsn"
    file.write_text(dsn)
    capture = captured(newest_postgres, tmp_path, dsn=in_file(file))
    newest_postgres.execute(f"ALTER ROLE \"{role}\" PASSWORD 'another'")
    fill(newest_postgres, 11, 20)
    capture.catch_up()  # open connections live on
    newest_postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'")
    capture.wait_for(lambda: "refused the user" in capture.capture.statistics.last_error)
    error = capture.capture.statistics.last_error
    assert "Check the user name and its password" in error
    assert newest_postgres.server.password not in error
    file.unlink()
    capture.wait_for(lambda: "No such file" in capture.capture.statistics.last_error)
    file.write_text(newest_postgres.server.dsn(newest_postgres.name, user=role, password="another"))
    fill(newest_postgres, 21, 30)
    capture.assert_equal("t")
    capture.assert_once("public.t")
    assert capture.capture.statistics.last_error == ""
    capture.stop()
    file.write_text(dsn)
    assert isinstance(capture.fails_to_start(), LoginRefused), "at the start it is an error at once"


# -- the publication ---------------------------------------------------------------------------------------------------


def test_a_dropped_publication_ends_the_capture(postgres: Database, tmp_path: Path) -> None:
    make_tables(postgres)
    capture = RunningCapture(postgres, tmp_path, ["t"])
    capture.start()
    capture.catch_up()
    postgres.execute("DROP PUBLICATION headwater")
    error = capture.wait_for_end()
    assert isinstance(error, SourceNotFound)
    assert "headwater resnapshot" in str(error)


ALTERED = {
    "removed": "ALTER PUBLICATION headwater DROP TABLE t",
    "put back": "ALTER PUBLICATION headwater DROP TABLE t; ALTER PUBLICATION headwater ADD TABLE t",
    "filtered": "ALTER PUBLICATION headwater SET TABLE other, t WHERE (id > 5)",
    "columns": "ALTER PUBLICATION headwater SET TABLE other, t (id)",
}


@pytest.mark.parametrize(
    ("how", "while_running"), [*((how, True) for how in ALTERED), ("removed", False), ("put back", False)]
)
def test_a_publication_that_was_altered_stops_its_table_and_no_other(
    newest_postgres: Database, tmp_path: Path, how: str, while_running: bool
) -> None:
    make_tables(newest_postgres, "t", "other")
    capture = captured(newest_postgres, tmp_path, "t", "other")
    if not while_running:
        capture.stop()
    newest_postgres.execute(*ALTERED[how].split("; "))
    fill(newest_postgres, 11, 20)
    if not while_running:
        capture.start()
    reason = capture.wait_until_stopped("public.t")
    assert "publication" in reason
    assert reason.endswith("un: headwater resnapshot public.t")
    fill(newest_postgres, 1, 10, "other")
    capture.assert_equal("other")
    capture.stop()
    assert len(capture.rows("public.t")) >= 10


def test_a_publication_that_sends_less_stops_its_tables(newest_postgres: Database, tmp_path: Path) -> None:
    make_tables(newest_postgres)
    with running(newest_postgres, tmp_path, "t") as capture:
        fill(newest_postgres, 1, 10)
        newest_postgres.execute("ALTER PUBLICATION headwater SET (publish = 'insert')", "DELETE FROM t WHERE id = 1")
        assert "does not send delete, truncate, update" in capture.wait_until_stopped("public.t")


def test_a_publication_of_all_tables_made_anew_while_the_capture_was_down_stops_its_tables(
    newest_postgres: Database, tmp_path: Path
) -> None:
    make_tables(newest_postgres)
    publication = "CREATE PUBLICATION headwater FOR ALL TABLES WITH (publish_via_partition_root = true)"
    newest_postgres.execute(publication)
    capture = RunningCapture(newest_postgres, tmp_path, ["t"])
    capture.start()
    fill(newest_postgres, 1, 10)
    capture.assert_equal("t")
    capture.stop()
    newest_postgres.execute("DROP PUBLICATION headwater", publication)
    capture.start()
    assert "put back" in capture.wait_until_stopped("public.t")
    capture.stop()


# -- the network -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poll", [False, True])
def test_a_cut_while_idle_is_mended(newest_postgres: Database, tmp_path: Path, poll: bool) -> None:
    make_tables(newest_postgres)
    with (
        proxied(newest_postgres) as (proxy, dsn),
        running(newest_postgres, tmp_path, "t", dsn=dsn, poll=poll) as capture,
    ):
        fill(newest_postgres, 1, 10)
        capture.catch_up()
        proxy.cut()
        capture.wait_for(lambda: capture.capture.statistics.restarts > 0)
        fill(newest_postgres, 11, 20)
        capture.assert_equal("t")
        capture.assert_once("public.t")


def test_cuts_in_a_transaction_and_under_load_lose_and_double_nothing(
    newest_postgres: Database, tmp_path: Path
) -> None:
    make_tables(newest_postgres)
    with proxied(newest_postgres) as (proxy, dsn), running(newest_postgres, tmp_path, "t", dsn=dsn) as capture:
        with newest_postgres.connect() as session, session.transaction():
            session.execute("INSERT INTO t SELECT i, 'long' FROM generate_series(100001, 100100) i")
            ended = threading.Event()
            writer = threading.Thread(target=write_until, args=(newest_postgres, ended))
            writer.start()
            try:
                for cut in range(1, 4):
                    proxy.cut()
                    capture.wait_for(lambda wanted=cut: capture.capture.statistics.restarts >= wanted)
                    capture.wait_for(lambda: capture.capture.state is CaptureState.RUNNING)
            finally:
                ended.set()
                writer.join()
            session.execute("UPDATE t SET v = 'longer' WHERE id > 100050")
        capture.assert_equal("t")
        capture.assert_once("public.t")


def write_until(database: Database, ended: threading.Event) -> None:
    with database.connect() as session:
        number = 0
        while not ended.is_set():
            number += 1
            session.execute("INSERT INTO t VALUES (%s, 'x')", [number])
            if number % 3 == 0:
                session.execute("UPDATE t SET id = -id WHERE id = %s", [number])


def test_a_cut_in_the_stream_of_a_large_transaction_repeats_it_whole(newest_postgres: Database, tmp_path: Path) -> None:
    database = newest_postgres
    make_tables(database)
    database.execute(f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'")
    with proxied(database) as (proxy, dsn), running(database, tmp_path, "t", dsn=dsn) as capture:
        with database.connect() as session, session.transaction():
            session.execute("INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 5000) i")
            capture.wait_for(lambda: capture.capture.statistics.spilled_bytes > 100_000)
            proxy.cut()
            session.execute("INSERT INTO t SELECT i, repeat('y', 100) FROM generate_series(5001, 9000) i")
            capture.wait_for(lambda: capture.capture.statistics.restarts > 0)
        capture.assert_equal("t")
        capture.assert_once("public.t")
        assert len({row["_epoch"] for row in capture.rows("public.t")}) == 1


def test_a_capture_that_stood_still_longer_than_the_server_waits_goes_on(
    newest_postgres: Database, tmp_path: Path
) -> None:
    make_tables(newest_postgres)
    server = newest_postgres.server
    server.reload(wal_sender_timeout="500ms")
    try:
        with (
            proxied(newest_postgres) as (proxy, dsn),
            running(newest_postgres, tmp_path, "t", dsn=dsn) as capture,
        ):
            fill(newest_postgres, 1, 10)
            capture.catch_up()
            proxy.stall()
            fill(newest_postgres, 11, 20)
            capture.wait_for(lambda: newest_postgres.value("SELECT count(*) FROM pg_stat_replication") == 0)
            proxy.resume()
            fill(newest_postgres, 21, 30)
            capture.assert_equal("t")
            capture.assert_once("public.t")
            assert capture.capture.statistics.restarts >= 1
    finally:
        server.reload(wal_sender_timeout="60s")


# -- the disk ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file of this process may grow beyond *size* bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def waits_for_room(capture: RunningCapture) -> bool:
    return capture.capture.state is CaptureState.WAITING and "no room" in capture.capture.statistics.last_error


def test_a_store_that_cannot_grow_is_waited_for_and_with_room_the_capture_goes_on(
    newest_postgres: Database, tmp_path: Path
) -> None:
    make_tables(newest_postgres)
    capture = captured(newest_postgres, tmp_path)
    before = confirmed(newest_postgres)
    random = "(SELECT string_agg(md5((n * 7919 + i)::text), '') FROM generate_series(1, 200) n)"
    with file_size_limit(2 << 20):
        newest_postgres.execute(f"INSERT INTO t SELECT i, {random} FROM generate_series(11, 1500) i")
        capture.wait_for(lambda: waits_for_room(capture))
    assert "files are limited to 2 MB (ulimit -f)" in capture.capture.statistics.last_error
    assert confirmed(newest_postgres) >= before
    capture.assert_equal("t")
    capture.assert_once("public.t")
    capture.stop()


def test_a_spill_that_cannot_grow_is_waited_for_and_with_room_the_capture_goes_on(
    newest_postgres: Database, tmp_path: Path
) -> None:
    database = newest_postgres
    make_tables(database)
    database.execute(f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'")
    capture = captured(database, tmp_path)
    with database.connect() as session, session.transaction(), file_size_limit(2 << 20):
        session.execute("INSERT INTO t SELECT i, repeat('x', 4000) FROM generate_series(11, 4000) i")
        capture.wait_for(lambda: waits_for_room(capture))
    capture.assert_equal("t")
    capture.assert_once("public.t")
    capture.stop()


# -- the clock ---------------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_neither_stops_epochs_nor_moves_them_far(
    newest_postgres: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    year, off, wall = 365 * 86_400_000, 0, capture_module._now_ms
    monkeypatch.setattr(capture_module, "_now_ms", lambda: wall() + off)
    make_tables(newest_postgres)
    capture = captured(newest_postgres, tmp_path)
    for number, jump in enumerate((10 * year, -5 * year, 0), 1):
        off = jump
        fill(newest_postgres, 10 * number + 1, 10 * number + 10)
        capture.assert_equal("t")
    capture.stop()
    epochs = [Epoch(row["_epoch"]).unix_ms for row in capture.rows("public.t")]
    assert len(epochs) == 40
    assert all(abs(epoch - wall()) < 600_000 for epoch in epochs)


# -- another capture ---------------------------------------------------------------------------------------------------


def test_a_second_capture_of_the_store_is_refused_with_the_owner(newest_postgres: Database, tmp_path: Path) -> None:
    make_tables(newest_postgres)
    with running(newest_postgres, tmp_path, "t") as capture:
        error = RunningCapture(newest_postgres, tmp_path, ["t"]).fails_to_start()
        assert isinstance(error, StoreOwned)
        assert isinstance(error, FencedError)
        assert f"pid {error.pid}" in str(error)
        fill(newest_postgres, 1, 10)
        capture.assert_equal("t")


def test_a_takeover_fences_the_first_capture_and_goes_on_where_it_was(
    newest_postgres: Database, tmp_path: Path
) -> None:
    make_tables(newest_postgres)
    first = captured(newest_postgres, tmp_path)
    second = RunningCapture(newest_postgres, tmp_path, ["t"])
    second.start(takeover=True)
    fill(newest_postgres, 11, 20)
    assert isinstance(first.wait_for_end(), FencedError)
    second.assert_equal("t")
    second.assert_once("public.t")
    second.stop()


def test_a_fenced_capture_acknowledges_nothing_any_more(newest_postgres: Database, tmp_path: Path) -> None:
    make_tables(newest_postgres)
    capture = captured(newest_postgres, tmp_path)
    with open_writer(capture.store, takeover=True):
        durable = capture.durable()
        fill(newest_postgres, 11, 20)
        assert isinstance(capture.wait_for_end(), FencedError)
    assert confirmed(newest_postgres) <= durable
    capture.start()
    capture.assert_equal("t")
    capture.assert_once("public.t")
    capture.stop()


# -- an idle database --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", ["another database", "another table"])
def test_the_log_is_released_while_nothing_of_ours_is_written(
    newest_postgres: Database, tmp_path: Path, elsewhere: str
) -> None:
    make_tables(newest_postgres)
    with contextlib.ExitStack() as stack:
        busy = newest_postgres
        if elsewhere == "another database":
            busy = stack.enter_context(newest_postgres.server.database())
        busy.execute("CREATE TABLE unrelated (id bigint, v text)")
        capture = stack.enter_context(running(newest_postgres, tmp_path, "t"))
        fill(newest_postgres, 1, 10)
        capture.catch_up()
        start = busy.value("SELECT pg_current_wal_lsn() - '0/0'")
        with busy.connect() as session:
            for _ in range(10):
                session.execute(
                    "INSERT INTO unrelated SELECT i, repeat(md5(i::text), 60) FROM generate_series(1, 10200) i"
                )
        assert busy.value("SELECT pg_current_wal_lsn() - '0/0'") - start > 200e6

        def held() -> int:
            newest_postgres.execute("SELECT pg_log_standby_snapshot()")
            return capture.capture.statistics.held_bytes or 0

        capture.wait_for(lambda: held() < 1 << 20)
        fill(newest_postgres, 11, 20)
        capture.assert_equal("t")
        assert capture.tables()["public.t"].state is TableState.ACTIVE


# -- locks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restart", [False, True])
def test_a_locked_table_holds_up_no_other(newest_postgres: Database, tmp_path: Path, restart: bool) -> None:
    make_tables(newest_postgres, "t", "locked")
    newest_postgres.execute("ALTER TABLE locked ALTER v SET DEFAULT 'a default is read with its table open'")
    with running(newest_postgres, tmp_path, "t", "locked") as capture, newest_postgres.connect() as holder:
        fill(newest_postgres, 1, 10, "locked")
        fill(newest_postgres, 1, 10)
        capture.catch_up()
        holder.execute("BEGIN; LOCK TABLE locked IN ACCESS EXCLUSIVE MODE")
        if restart:
            end_walsenders(newest_postgres)
            capture.wait_for(lambda: capture.capture.statistics.restarts == 1)
        before = capture.capture.statistics.checked_time
        fill(newest_postgres, 11, 20)
        capture.assert_equal("t")
        capture.wait_for(lambda: capture.capture.statistics.checked_time > before)
        assert capture.capture.statistics.restarts == int(restart), capture.capture.statistics.last_error
        holder.execute("COMMIT")
        fill(newest_postgres, 11, 20, "locked")
        capture.assert_equal("t", "locked")

"""A query that comes later is read from the tables that we keep: at one epoch, and nothing is asked of the source."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from tests.db.backfill.delivering import Delivering
from tests.db.capture.running import RunningCapture, running
from tests.db.versioned.kept import Kept, kept
from tests.servers.postgres import Database

from headwater.backfill.errors import InvalidQuery, SinceGone
from headwater.backfill.loop import next_batch
from headwater.backfill.snapshot.record import SnapshotPhase
from headwater.backfill.units import SnapshotUnit
from headwater.control.command import PauseBackfill, QueryCommand, ResnapshotTable, ResumeBackfill, ThrottleBackfill
from headwater.control.request import ask_query
from headwater.errors import InputError
from headwater.stream import Barrier, BarrierKind, Mutation, Throttle
from headwater.versioned import VersionedTable

pytestmark = pytest.mark.db

TABLE = "public.orders"
NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"
"""A source that does not answer: whoever asks it fails."""
SNAPSHOT, CHANGE_LOG, LIVE = SnapshotPhase.SNAPSHOT, SnapshotPhase.CHANGE_LOG, SnapshotPhase.LIVE


def _create(database: Database, rows: int = 3000) -> None:
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, state text, total numeric(10,2), note text)",
        f"INSERT INTO orders SELECT n * 3, 'new', n, repeat('x', 20) FROM generate_series(1, {rows}) n",
    )


@contextmanager
def _writer(database: Database, pause: float = 0.002) -> Iterator[None]:
    """Somebody who writes all the time."""
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.wait(pause):
            number += 1
            at = number * 37 % 9000
            database.execute(
                f"""
                INSERT INTO orders VALUES ({at * 3 + 1}, 'live', {number}, 'a')
                    ON CONFLICT (id) DO UPDATE SET total = {number};
                UPDATE orders SET state = 'paid', total = {number} WHERE id BETWEEN {at} AND {at + 20};
                DELETE FROM orders WHERE id = {at + 3};
                UPDATE orders SET id = id + 100000 WHERE id = {at + 30} AND NOT EXISTS
                    (SELECT FROM orders o WHERE o.id = {at + 100030});
                """
            )

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


class Later(Delivering):
    """A query that comes after the tables are kept; the source does not answer it."""

    def __init__(self, keeping: Kept, *tables: str, **options: Any) -> None:
        told: dict[str, Any] = {"query": "later", "source": NOWHERE, "kept": str(keeping.folder), "keyed": True}
        super().__init__(keeping.capture, *tables, **told | {"split_rows": 100, "interval_seconds": 0.0001} | options)

    def phase(self, name: str = TABLE) -> SnapshotPhase:
        return self.logs._tables.versioned[name].phase

    def go_to(self, phase: SnapshotPhase) -> None:
        """Into the middle of *phase*; with :data:`CHANGE_LOG`: to the batch that begins it."""
        while self.phase() is not phase:
            assert self.phase() is not LIVE
            self.batch(timeout=0.2)

    def assert_equal(self, *tables: str) -> None:
        told = self.options
        self.options = type(told)(**{name: getattr(told, name) for name in told.__slots__} | {"source": self._dsn()})
        super().assert_equal(*tables)
        self.options = told

    def _dsn(self) -> str:
        return self.capture.database.dsn


@contextmanager
def _kept(database: Database, folder: Path, *tables: str, rows: int = 3000) -> Iterator[tuple[RunningCapture, Kept]]:
    _create(database, rows)
    with running(database, folder, *(tables or (TABLE,))) as capture, kept(capture, *(tables or (TABLE,))) as keeping:
        keeping.finish()
        yield capture, keeping


def test_a_query_that_comes_later_is_read_from_the_kept_table_under_a_live_writer(
    newest_postgres: Database, tmp_path: Path
) -> None:
    with _kept(newest_postgres, tmp_path) as (_, keeping):
        with _writer(newest_postgres):
            query = Later(keeping, TABLE)
            assert query.planner.status()["tables"][TABLE]["origin"] == "tables"
            began, live = query.planner.initial().epoch, 0
            while query.phase() in (SnapshotPhase.WAITING, SNAPSHOT):
                query.batch(timeout=0.2)
                keeping.batch(timeout=0.0)  # the kept table goes on being folded
                live += query.planner.status()["epoch"] > began
            assert live, "changes are delivered while the snapshot is read"
        query.finish()
        query.assert_equal()
        assert query.batches > 3
        assert max(query.sink.history[TABLE].values()) == 1
        assert query.planner.status()["tables"][TABLE]["phase"] == "done"
        query.batch(timeout=1.5)
        assert not keeping.table(TABLE).pins()
        query.close()


class _Crash(Exception):
    pass


def _run(query: Later, between: Callable[[str], None]) -> None:
    while True:
        query.batch(timeout=0.2, between=between)


@pytest.mark.parametrize("known_sink", [True, False], ids=["sink tells", "sink unknown"])
def test_m1_m2_a_crash_at_each_step_of_each_phase_loses_and_doubles_nothing(
    known_sink: bool, newest_postgres: Database, tmp_path: Path
) -> None:
    steps = cycle(("planned", "logged", "units", "read", "committed"))
    with _kept(newest_postgres, tmp_path, rows=1000) as (_, keeping):
        query = Later(keeping, TABLE, known_sink=known_sink, max_epochs=3, split_rows=200)
        phases = set()
        with _writer(newest_postgres, 0.02):
            for number in range(20):
                if number % 2:
                    query.batch(timeout=0.2)
                    continue
                step = next(steps)

                def crash(at: str, step: str = step) -> None:
                    if at == step:
                        raise _Crash

                with pytest.raises(_Crash):
                    _run(query, crash)
                query.crash()
                phases.add(query.phase())
        assert SNAPSHOT in phases
        query.finish()
        query.assert_equal()
        assert max(query.sink.history[TABLE].values()) == 1
        query.close()


def test_a_query_that_is_resumed_reads_again_only_what_it_was_reading(
    newest_postgres: Database, tmp_path: Path
) -> None:
    with _kept(newest_postgres, tmp_path) as (_, keeping):
        query = Later(keeping, TABLE)
        for _ in range(5):
            query.batch()

        def crash(at: str) -> None:
            if at == "read":
                raise _Crash

        with pytest.raises(_Crash):
            _run(query, crash)
        query.crash()
        query.finish()
        query.assert_equal()
        assert 3000 <= query.read_rows < 3300  # under a tenth comes twice
        query.close()


class _Refused(InputError):
    pass


def test_what_was_handed_out_of_a_kept_table_comes_again_after_the_source_of_another_one_failed(
    newest_postgres: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest_postgres.execute("CREATE TABLE others (id bigint PRIMARY KEY)", "INSERT INTO others VALUES (1)")
    _create(newest_postgres)
    tables = (TABLE, "public.others")
    with running(newest_postgres, tmp_path, *tables) as capture, kept(capture, TABLE) as keeping:
        keeping.finish()
        query = Later(keeping, *tables, source=newest_postgres.dsn)

        def refused() -> Any:
            raise _Refused("The source refuses.")

        backfill = query.logs._tables.versioned[TABLE]
        with monkeypatch.context() as patched:
            patched.setattr(query.logs._plans._source, "export", refused)
            for _ in range(2):  # the second is not refused because of the first
                with pytest.raises(_Refused):
                    query.batch()
                assert not backfill.executor.handed_out(query.planner._state.plan.following)
        query.finish()
        query.assert_equal()
        assert max(query.sink.history[TABLE].values()) == 1
        query.close()


def test_two_tables_show_one_total_at_every_epoch(newest_postgres: Database, tmp_path: Path) -> None:
    """A transfer between accounts of two tables is one transaction: its halves never come apart."""
    newest_postgres.execute(
        "CREATE TABLE left_accounts (id bigint PRIMARY KEY, amount bigint)",
        "CREATE TABLE right_accounts (id bigint PRIMARY KEY, amount bigint)",
        "INSERT INTO left_accounts SELECT n, 100 FROM generate_series(1, 400) n",
        "INSERT INTO right_accounts SELECT n, 100 FROM generate_series(1, 400) n",
    )
    tables = ("public.left_accounts", "public.right_accounts")
    stop = threading.Event()

    def transfer() -> None:
        number = 0
        while not stop.wait(0.002):
            number += 1
            newest_postgres.execute(
                f"BEGIN; UPDATE left_accounts SET amount = amount - 7 WHERE id = {number * 13 % 400 + 1};"
                f" UPDATE right_accounts SET amount = amount + 7 WHERE id = {number * 29 % 400 + 1}; COMMIT"
            )

    thread = threading.Thread(target=transfer, daemon=True)
    with running(newest_postgres, tmp_path, *tables) as capture, kept(capture, *tables) as keeping:
        keeping.finish()
        thread.start()
        keeping.batch()
        query = Later(keeping, *tables, max_epochs=2)
        seen = 0
        while seen < 10:
            query.batch(timeout=0.2)
            keeping.batch(timeout=0.0)
            if all(query.phase(name) is not SNAPSHOT for name in tables):
                totals = [sum(row["amount"] for row in query.sink.mirror[name].values()) for name in tables]
                assert sum(totals) == 80_000
                seen += 1
        at = query.planner.newest().epoch
        kept_tables = [keeping.table(name) for name in tables]
        for epoch in (max(table.base_epoch for table in kept_tables), at):
            rows = [row for table in kept_tables for b in table.snapshot(epoch, (0, 256)) for row in b.to_pylist()]
            assert sum(row["amount"] for row in rows) == 80_000
        stop.set()
        thread.join(30)
        query.finish()
        query.assert_equal()
        query.close()


def _send(query: Later, mutation: Mutation) -> None:
    """The next barrier has *mutation*."""
    backfill = query.logs._tables.versioned[TABLE]
    last = backfill.executor._last
    assert last is not None
    backfill.on_barrier(Barrier(last.epoch.next(last.epoch.curr.next()), BarrierKind.CHECKPOINT, mutation))


def test_m7_pause_resume_and_throttle_stop_the_snapshot_and_no_change(
    newest_postgres: Database, tmp_path: Path
) -> None:
    def ask(query: Later, command: QueryCommand) -> None:
        asking = threading.Thread(target=ask_query, args=(query.options.state_location, "later", command), daemon=True)
        asking.start()
        asked = query.planner._requests
        while asking.is_alive() and not asked._inbox.open(asked._answers, "later", now=True):
            time.sleep(0.02)
        asked._inbox._looked = -1e9  # the next batch does what was asked
        while asking.is_alive():
            query.batch(timeout=0.05)

    with _kept(newest_postgres, tmp_path) as (capture, keeping):
        query = Later(keeping, TABLE, max_epochs=1)
        query.batch()
        ask(query, PauseBackfill(TABLE))
        assert not query.batch(timeout=0.1)
        assert query.planner.is_waiting()
        query.crash()
        assert not query.batch(timeout=0.1)  # it stays over a restart
        ask(query, ThrottleBackfill(0, TABLE))
        ask(query, ResumeBackfill(TABLE))
        assert not query.batch(timeout=0.1)
        assert "0 rows" in query.planner.status()["tables"][TABLE]["waiting"]
        for number in range(30):
            newest_postgres.execute(f"UPDATE orders SET total = {number} WHERE id = 30")
            capture.catch_up()
        at, read = query.planner.status()["epoch"], query.read_rows
        for _ in range(5):
            assert query.batch(timeout=0.5)
        assert query.planner.status()["epoch"] > at
        assert (query.read_rows, query.phase()) == (read, SNAPSHOT)
        _send(query, Throttle(None))
        query.finish()
        query.assert_equal()
        query.close()


def test_m4_a_source_that_is_faster_than_the_backfill_is_caught_up_with_afterwards(
    newest_postgres: Database, tmp_path: Path
) -> None:
    seconds = 60.0 if os.environ.get("HEADWATER_SOAK") else 1.5
    with _kept(newest_postgres, tmp_path, rows=1000) as (capture, keeping):
        query = Later(keeping, TABLE, rows_per_second=int(500 / seconds), max_epochs=1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with _writer(newest_postgres, 0.0):
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                query.batch(timeout=0.05)
        for number in range(10):  # epochs that the query has not read, however slow the machine is
            newest_postgres.execute(f"UPDATE orders SET total = {number} WHERE id = 30")
            capture.catch_up()
        assert query.phase() is SNAPSHOT
        _send(query, Throttle(None))
        query.go_to(CHANGE_LOG)
        lags = []
        while not query.planner.is_history_done():
            query.batch(timeout=0.2)
            lags.append(query.planner.status()["tables"][TABLE]["lag_epochs"] or 0)
        assert lags == sorted(lags, reverse=True)
        assert lags[0] > 3
        query.finish()
        query.assert_equal()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kilobytes
        query.close()


def test_m6_s15_the_epoch_stays_pinned_while_it_is_read_and_is_let_go_when_the_query_is_dropped(
    newest_postgres: Database, tmp_path: Path
) -> None:
    with _kept(newest_postgres, tmp_path) as (capture, keeping):
        query = Later(keeping, TABLE)
        query.batch()
        (pin,) = keeping.table(TABLE).pins()
        assert (pin.owner, pin.lasting) == ("later", True)
        for number in range(5):
            newest_postgres.execute(f"UPDATE orders SET total = {number}")
            capture.catch_up()
            keeping.batch()
        assert keeping.table(TABLE).base_epoch <= pin.epoch
        query.close()
        from headwater.backfill.snapshot.backfill import release_pins

        release_pins(query.options.store, str(keeping.folder), "later", [TABLE])
        assert not keeping.table(TABLE).pins()
        keeping.batch()
        assert keeping.table(TABLE).base_epoch > pin.epoch


def test_truncate_a_new_column_and_a_resnapshot_while_the_kept_table_is_read(
    newest_postgres: Database, tmp_path: Path
) -> None:
    with _kept(newest_postgres, tmp_path, rows=1000) as (capture, keeping):
        query = Later(keeping, TABLE)
        query.batch()
        registration = capture.tables()[TABLE].registration
        newest_postgres.execute(
            "TRUNCATE orders",
            "INSERT INTO orders VALUES (1, 'a', 1, 'b')",
        )
        capture.wait_for(lambda: capture.tables()[TABLE].registration != registration)
        newest_postgres.execute(
            "ALTER TABLE orders ADD COLUMN extra int DEFAULT 7",
            "INSERT INTO orders VALUES (2, 'a', 1, 'b', 8)",
        )
        query.options = type(query.options)(
            **{name: getattr(query.options, name) for name in query.options.__slots__} | {"source": query._dsn()}
        )
        query.crash()  # what is read once more is read from the source
        assert query.planner.status()["tables"][TABLE]["origin"] == "tables"
        query.finish()
        query.run_until(query.planner.is_history_done)
        query.finish()
        query.assert_equal()
        assert not keeping.table(TABLE).pins()
        asking = threading.Thread(
            target=ask_query, args=(query.options.state_location, "later", ResnapshotTable(TABLE)), daemon=True
        )
        asking.start()
        while asking.is_alive():
            query.batch(timeout=0.05)
        query.finish()
        query.assert_equal()
        assert query.planner.status()["tables"][TABLE]["origin"] == "source"
        query.close()


def test_where_history_comes_from_is_chosen_once(newest_postgres: Database, tmp_path: Path) -> None:
    _create(newest_postgres, 500)
    with running(newest_postgres, tmp_path, TABLE) as capture, kept(capture, TABLE) as keeping:
        early = Later(keeping, TABLE, query="early", source=capture.database.dsn)
        assert early.planner.status()["tables"][TABLE]["origin"] == "source"  # nothing is kept yet
        patient = Later(keeping, TABLE, query="patient", origin="tables")
        patient.batch(timeout=0.2)
        assert patient.planner.status()["tables"][TABLE]["waiting"]
        keeping.finish()
        early.crash()
        assert early.planner.status()["tables"][TABLE]["origin"] == "source"
        direct = Later(keeping, TABLE, query="direct", source=capture.database.dsn, origin="source")
        assert direct.planner.status()["tables"][TABLE]["origin"] == "source"
        for query in (early, patient, direct):
            query.finish()
            query.assert_equal()
            query.close()
    with pytest.raises(InvalidQuery, match="none are kept"):
        Later(keeping, TABLE, query="other", origin="tables", kept=None)


@pytest.mark.parametrize("phase", [SNAPSHOT, LIVE])
def test_a_query_goes_on_when_nobody_keeps_the_tables_any_more(
    newest_postgres: Database, tmp_path: Path, phase: SnapshotPhase
) -> None:
    with _kept(newest_postgres, tmp_path, rows=500) as (capture, keeping):
        query = Later(keeping, TABLE)
        while query.phase() is not phase:
            query.batch(timeout=0.2)
        told = {name: getattr(query.options, name) for name in query.options.__slots__}
        query.options = type(query.options)(**told | {"kept": None, "source": capture.database.dsn})
        query.crash()
        newest_postgres.execute("DELETE FROM orders WHERE id <= 30", "UPDATE orders SET state = 'late' WHERE id = 60")
        query.finish()
        query.assert_equal()
        is_read_again = query.planner.status()["tables"][TABLE].get("origin") == "source"
        assert is_read_again == (phase is SNAPSHOT)
        query.close()


def test_units_are_read_at_one_epoch_in_any_process(newest_postgres: Database, tmp_path: Path) -> None:
    with _kept(newest_postgres, tmp_path, rows=30_000) as (_, keeping):
        query = Later(keeping, TABLE, split_rows=30_000)
        start = query.planner.initial()
        end = next_batch(query.planner, start, 1.0)
        units = query.planner.units(start, end)
        assert end.epoch == start.epoch
        assert len(units) > 1
        assert all(isinstance(unit, SnapshotUnit) and unit.epoch == start.epoch for unit in units)
        newest_postgres.execute("DELETE FROM orders")
        assert sum(batch.num_rows for unit in units for batch in query.read(unit)) == 30_000
        query.close()
        assert VersionedTable.open(query.options.store, TABLE, keeping.folder).pins()


# -- since -------------------------------------------------------------------------------------------------------------


def test_s11_s14_since_an_epoch_or_a_time_there_is_no_history_and_every_change_of_then_on(
    newest_postgres: Database, tmp_path: Path
) -> None:
    _create(newest_postgres, 10)
    with running(newest_postgres, tmp_path, TABLE) as capture:
        hold = Delivering(capture, TABLE, query="hold", history=False)  # holds the whole log
        for number in range(4):
            newest_postgres.execute(f"INSERT INTO orders VALUES ({number + 1000}, 'x', 0, '')")
            capture.catch_up()
        rows = [(row["id"], row["_epoch"], row["_commit_timestamp"]) for row in capture.rows(TABLE)]
        (_, _, _), (_, second, moment), *_ = rows

        def ids(query: str, since: str) -> list[int]:
            made = Delivering(capture, TABLE, query=query, history=False, since=since, source=NOWHERE)
            while made.batch(timeout=0.1):
                pass
            made.crash()  # it goes on where it was
            assert not made.batch(timeout=0.1)
            made.close()
            return sorted(key for (key,) in made.sink.mirror.get(TABLE, {}))

        assert ids("epoch", str(second)) == [1002, 1003]
        found = ids("time", moment.astimezone(UTC).isoformat())
        assert found[-3:] == [1001, 1002, 1003]  # whole epochs: one before it may come with it
        assert ids("now", datetime.now(UTC).isoformat()) in ([], [1003])
        for wrong, why in (
            ("2027", "neither"),
            ("2026-05-31T12:00:00", "without its zone"),
            ("2100-01-01T00:00Z", "not there yet"),
        ):
            with pytest.raises(InvalidQuery, match=why):
                Delivering(capture, TABLE, query="wrong", history=False, since=wrong, source=NOWHERE)
        with pytest.raises(InvalidQuery, match="without history"):
            Delivering(capture, TABLE, query="wrong", since=str(second))
        hold.close()


def test_s14_since_an_epoch_that_is_not_retained_tells_the_range_that_is(
    newest_postgres: Database, tmp_path: Path
) -> None:
    _create(newest_postgres, 10)
    with running(newest_postgres, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE)
        query.finish()
        for number in range(3):
            newest_postgres.execute(f"INSERT INTO orders VALUES ({number + 1000}, 'x', 0, '')")
            capture.catch_up()
            query.batch(timeout=1.2)
        query.batch(timeout=1.2)
        newest_postgres.execute("INSERT INTO orders VALUES (2000, 'x', 0, '')")
        capture.catch_up()
        with pytest.raises(SinceGone, match=r"hold the epochs after \d+ \(\d{4}-.*Z\) up to \d+") as raised:
            Delivering(capture, TABLE, query="late", history=False, since="65536", source=NOWHERE)
        assert raised.value.oldest > 65536
        assert str(raised.value.oldest) in (raised.value.next_step or "")
        query.close()

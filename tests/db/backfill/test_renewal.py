"""Tables that are read once more: because somebody asked, or because their log has a gap."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.db.backfill.delivering import Delivering
from tests.db.backfill.shops import MARIADB, MYSQL, POSTGRES, Shop, only, running, shared

from headwater.capture.renewal import renew
from headwater.control.command import PauseBackfill, QueryCommand, ResnapshotTable, ResumeBackfill, ThrottleBackfill
from headwater.control.request import ask_query
from headwater.errors import HeadwaterError
from headwater.sources.splits import SplitKind

pytestmark = pytest.mark.db

TABLE = "public.orders"


def _create(shop: Shop) -> None:
    shop.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, name text)",
        "INSERT INTO orders SELECT n, 'order ' || n FROM generate_series(1, 1000) n",
    )


def _asked(query: Delivering, command: QueryCommand) -> None:
    """Ask the query while it runs."""
    failure: list[HeadwaterError] = []

    def ask() -> None:
        try:
            ask_query(query.options.state_location, query.options.query, command)
        except HeadwaterError as error:
            failure.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    query.run_until(lambda: not thread.is_alive())
    if failure:
        raise failure[0]


@shared(MYSQL)
def test_a_range_is_read_once_more(shop: Shop, tmp_path: Path) -> None:
    _create(shop)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=100)
        query.finish()
        for key in range(200, 300):
            del query.sink.mirror[TABLE][(key,)]
        query.sink.mirror[TABLE][(250,)] = {"id": 250, "name": "wrong"}
        _asked(query, ResnapshotTable(TABLE, ("200",), ("299",)))
        query.finish()
        query.assert_equal()
        assert {key for (key,), count in query.sink.history[TABLE].items() if count == 2} == set(range(200, 300))
        query.close()


@shared(POSTGRES, MARIADB)
def test_a_range_that_no_key_can_be_in_is_refused_before_it_is_planned(shop: Shop, tmp_path: Path) -> None:
    """A query that had it in its state would fail at every start."""
    refusals: list[tuple[dict[str, tuple[str, ...]], str]] = [
        ({"start": ("abc",)}, "'id' of public.orders is of type bigint"),
        ({"start": ("300",), "end": ("200",)}, "ends before it begins"),
        ({"start": ("1", "2")}, "has 1 columns; received 2 values"),
    ]
    if shop.kind == POSTGRES:  # the others compare with numbers of any size
        refusals.append(({"end": ("99999999999999999999",)}, "'id' of public.orders is of type bigint"))
    _create(shop)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE)
        for part, told in refusals:
            with pytest.raises(HeadwaterError, match=told) as refused:
                _asked(query, ResnapshotTable(TABLE, **part))
            assert refused.value.next_step
            assert "abc" not in str(refused.value)
        query.finish()
        query.assert_equal()
        query.close()


@only(POSTGRES)
def test_the_keys_of_a_range_are_taken_as_the_server_prints_them(shop: Shop, tmp_path: Path) -> None:
    shop.execute(
        "CREATE TABLE orders (code uuid, day date, line int, PRIMARY KEY (code, day, line))",
        "INSERT INTO orders SELECT lpad(to_hex(n), 32, '0')::uuid, '2024-02-01', n FROM generate_series(1, 30) n",
    )
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=10)
        query.finish()
        del query.sink.mirror[TABLE][next(key for key in query.sink.mirror[TABLE] if key[2] == 0x1B)]
        ends = ("0000000000000000000000000000001B", "0000000000000000000000000000001C")
        _asked(query, ResnapshotTable(TABLE, (ends[0], "1 Feb 2024", "+27"), (ends[1],)))
        query.finish()
        query.assert_equal()
        assert {key[2] for key, count in query.sink.history[TABLE].items() if count == 2} == {0x1B, 0x1C}
        query.close()


@shared(MYSQL)
def test_a_column_that_is_not_there_is_refused(shop: Shop, tmp_path: Path) -> None:
    _create(shop)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE)
        with pytest.raises(HeadwaterError, match="has no column 'nothing'"):
            _asked(query, ResnapshotTable(TABLE, columns=("nothing",)))
        query.finish()
        query.assert_equal()
        query.close()


@shared(POSTGRES, MARIADB)
def test_a_table_that_was_made_anew_is_read_as_a_whole(shop: Shop, tmp_path: Path) -> None:
    """M26: other columns, another key, and rows that are gone."""
    _create(shop)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=100)
        query.finish()
        shop.execute(
            "UPDATE orders SET name = 'last words' WHERE id < 50",
            "DROP TABLE orders",
            'CREATE TABLE orders (code varchar(20) COLLATE "C" PRIMARY KEY, amount int)',
            "INSERT INTO orders SELECT 'c' || n, n FROM generate_series(1, 300) n",
        )
        capture.wait_until_stopped(TABLE)
        assert not renew(str(capture.store), [TABLE])
        shop.execute("UPDATE orders SET amount = -1 WHERE amount < 20")
        query.finish()
        query.run_until(query.planner.is_history_done)
        query.assert_equal()
        query.close()


@shared(MYSQL)
def test_a_table_is_captured_anew_while_a_batch_is_under_way(shop: Shop, tmp_path: Path) -> None:
    _create(shop)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=50, interval_seconds=0.001)
        query.batch()
        shop.execute("UPDATE orders SET name = 'a' WHERE id % 3 = 0")
        assert not renew(str(capture.store), [TABLE])
        shop.execute("UPDATE orders SET name = 'b' WHERE id % 5 = 0", "DELETE FROM orders WHERE id > 990")
        query.crash()
        query.finish()
        query.assert_equal()
        query.close()


@shared(MARIADB)
def test_a_column_that_comes_with_a_value_is_read_for_the_rows_of_before(shop: Shop, tmp_path: Path) -> None:
    """M25."""
    _create(shop)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=100, keyed=True, split_kind=SplitKind.KEY)
        query.finish()
        shop.execute(
            "ALTER TABLE orders ADD COLUMN grade int DEFAULT 7",
            "UPDATE orders SET grade = 8 WHERE id < 10",
            "INSERT INTO orders (id, name) VALUES (5000, 'new')",
        )
        query.finish()
        query.run_until(lambda: query.planner.is_history_done() and query.sink.history[TABLE][(500,)] == 2)
        query.assert_equal()
        query.close()


@shared(POSTGRES)
def test_a_sink_that_has_nothing_gets_the_history_again(shop: Shop, tmp_path: Path) -> None:
    _create(shop)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=100)
        query.finish()
        query.sink.mirror.clear()
        query.sink.tokens.clear()
        query.crash()
        query.finish()
        query.assert_equal()
        query.close()


@shared(MYSQL)
def test_pause_and_resume_of_one_table_leave_its_limit(shop: Shop, tmp_path: Path) -> None:
    """M27."""
    _create(shop)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=100, rows_per_second=50)
        _asked(query, PauseBackfill(TABLE))
        state = query.planner.status()["tables"][TABLE]
        assert state["paused"]
        _asked(query, ThrottleBackfill(2000, TABLE))
        _asked(query, ResumeBackfill(TABLE))
        state = query.planner.status()["tables"][TABLE]
        assert not state["paused"]
        assert state["limit"] == 2000
        query.finish()
        query.assert_equal()
        query.close()


@shared(MARIADB)
def test_a_limit_of_0_holds_history_and_another_one_lets_it_go_on(shop: Shop, tmp_path: Path) -> None:
    """M27, M12."""
    _create(shop)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, rows_per_second=0)
        assert not query.batch(timeout=0.5)
        assert query.planner.is_waiting()
        query.crash()
        _asked(query, ThrottleBackfill(100_000, TABLE))
        query.finish()
        query.assert_equal()
        assert query.sink.history[TABLE].total() == 1000
        query.close()


@only(POSTGRES)
def test_a_truncation_before_the_gap_does_not_stand_for_reading_the_table_again(shop: Shop, tmp_path: Path) -> None:
    """Both reach the query in one batch; the rows between them are in no log."""
    _create(shop)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, keyed=True)
        query.finish()
        since = capture.tables()[TABLE].since
        shop.execute("TRUNCATE orders")
        capture.catch_up()
        capture.stop()
        shop.execute("INSERT INTO orders VALUES (1, 'after the truncation')")
        assert renew(str(capture.store), [TABLE])
        capture.start([])
        capture.wait_for(lambda: capture.tables()[TABLE].since != since)
        shop.execute("INSERT INTO orders VALUES (2, 'after the gap')")
        query.finish()
        query.assert_equal()
        assert len(query.sink.mirror[TABLE]) == 2
        query.close()

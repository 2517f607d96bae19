"""The history and the changes of real tables, planned and read as Spark would."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest
from tests.db.backfill.delivering import Delivering
from tests.db.backfill.shops import ALL, MARIADB, MYSQL, POSTGRES, Shop, on, only, running, shared

from headwater.sources.splits import SplitKind

pytestmark = pytest.mark.db

TABLE = "public.orders"


def _create(shop: Shop, rows: int = 5000) -> None:
    shop.execute("CREATE TABLE orders (id bigint PRIMARY KEY, state text, total numeric(10,2), note text)")
    shop.execute(f"INSERT INTO orders SELECT n * 3, 'new', n, repeat('x', 20) FROM generate_series(1, {rows}) n")


@contextmanager
def _writer(shop: Shop) -> Iterator[None]:
    """Somebody who writes all the time: new rows, updates, deletes, other keys."""
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            at = number * 37 % 15000
            shop.execute(
                f"""
                INSERT INTO orders VALUES ({at * 3 + 1}, 'live', {number}, 'a')
                    ON CONFLICT (id) DO UPDATE SET total = {number};
                UPDATE orders SET state = 'paid', total = {number} WHERE id BETWEEN {at} AND {at + 20};
                DELETE FROM orders WHERE id = {at + 3};
                UPDATE orders SET id = id + 100000 WHERE id = {at + 30} AND id + 100000 NOT IN
                    (SELECT id FROM (SELECT id FROM orders WHERE id = {at + 100030} LIMIT 1) o);
                """
            )
            stop.wait(0.002)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


@shared(*ALL)
def test_history_and_live_changes_come_to_the_source(shop: Shop, tmp_path: Path) -> None:
    _create(shop)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=300, interval_seconds=0.05)
        with _writer(shop):
            query.run_until(query.planner.is_history_done)
        query.finish()
        query.assert_equal()
        assert query.batches > 3
        assert max(query.sink.history[TABLE].values()) == 1
        query.close()


@shared(MYSQL)
def test_one_reader_pages_by_key(shop: Shop, tmp_path: Path) -> None:
    _create(shop, 2000)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, backfill="single", split_rows=100, interval_seconds=0.05)
        with _writer(shop):
            query.run_until(query.planner.is_history_done)
        query.finish()
        query.assert_equal()
        query.close()


class _Crash(Exception):
    pass


def _deliver(query: Delivering, between: Callable[[str], None]) -> None:
    while True:
        query.batch(timeout=0.2, between=between)


STEPS = ("planned", "logged", "units", "read", "committed")


@pytest.mark.parametrize(
    ("known_sink", "shop"),
    [(True, server) for server in on(MARIADB)] + [(False, server) for server in on(POSTGRES)],
    indirect=["shop"],
)
def test_a_crash_at_each_step_loses_and_doubles_nothing(known_sink: bool, shop: Shop, tmp_path: Path) -> None:
    _create(shop, 3000)
    steps = cycle(STEPS)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, known_sink=known_sink, split_rows=50, interval_seconds=0.001)
        with _writer(shop):
            for number in range(45):
                if number % 3:
                    query.batch(timeout=0.2)
                    continue
                step = next(steps)

                def crash(at: str, step: str = step) -> None:
                    if at == step:
                        raise _Crash

                with pytest.raises(_Crash):
                    _deliver(query, crash)
                query.crash()
        query.finish()
        query.assert_equal()
        query.close()


@shared(MARIADB)
def test_a_truncate_in_the_middle_begins_anew(shop: Shop, tmp_path: Path) -> None:
    """M32."""
    _create(shop, 3000)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=200, interval_seconds=0.01)
        for _ in range(3):
            query.batch()
        assert not query.planner.is_history_done()
        shop.execute("TRUNCATE orders; INSERT INTO orders SELECT n, 'after', n, '' FROM generate_series(1, 500) n")
        query.finish()
        query.assert_equal()
        query.close()


@shared(MYSQL)
def test_an_empty_table_and_an_idle_one_are_done(shop: Shop, tmp_path: Path) -> None:
    """M20."""
    shop.execute("CREATE TABLE orders (id bigint PRIMARY KEY)")
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE)
        query.run_until(query.planner.is_history_done)
        shop.execute("INSERT INTO orders VALUES (1)")
        query.finish()
        query.assert_equal()
        query.close()


@shared(POSTGRES, MYSQL)
def test_a_transaction_that_was_open_at_the_snapshot_is_delivered(shop: Shop, tmp_path: Path) -> None:
    """M15: written before the snapshot, committed after it."""
    _create(shop, 1000)
    with running(shop, tmp_path, TABLE) as capture:
        with shop.transaction() as open_one:
            open_one.execute("UPDATE orders SET state = 'late' WHERE id <= 300")
            query = Delivering(capture, TABLE, split_rows=100)
            while query.planner.has_history:
                query.batch()
            open_one.commit()
        query.finish()
        query.assert_equal()
        query.close()


@shared(MARIADB)
def test_tables_of_one_source_share_a_query(shop: Shop, tmp_path: Path) -> None:
    """M33."""
    _create(shop, 2000)
    shop.execute(
        "CREATE TABLE small (a int, b varchar(9), v int, PRIMARY KEY (a, b))",
        "INSERT INTO small SELECT n % 3, '' || n, n FROM generate_series(1, 300) n",
    )
    with running(shop, tmp_path, TABLE, "public.small") as capture:
        query = Delivering(capture, TABLE, "public.small", split_rows=100, interval_seconds=0.05)
        with _writer(shop):
            query.run_until(query.planner.is_history_done)
        query.finish()
        query.assert_equal()
        query.close()


@only(POSTGRES)
def test_a_table_without_a_key_is_read_in_one_snapshot(shop: Shop, tmp_path: Path) -> None:
    """Nulls and all: its rows are named by all their columns."""
    shop.execute(
        "CREATE TABLE orders (a int, b text); ALTER TABLE orders REPLICA IDENTITY FULL;"
        "INSERT INTO orders SELECT nullif(n % 7, 0) + n * 10, nullif((n % 5)::text, '0') "
        "FROM generate_series(1, 3000) n"
    )
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=100, interval_seconds=0.01)
        query.batch()
        shop.execute("DELETE FROM orders WHERE a < 500", "INSERT INTO orders VALUES (-1, NULL), (NULL, 'x')")
        query.finish()
        query.assert_equal()
        assert query.read_rows == 3000
        query.close()


@only(POSTGRES)
def test_splits_of_the_heap_overlap_changes_and_come_right(shop: Shop, tmp_path: Path) -> None:
    _create(shop, 4000)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=200, interval_seconds=0.01, keyed=True, split_kind=SplitKind.HEAP)
        with _writer(shop):
            query.run_until(query.planner.is_history_done)
        query.finish()
        query.assert_equal()
        query.close()


@shared(MARIADB)
def test_m14_another_parallelism_takes_nothing_back(shop: Shop, tmp_path: Path) -> None:
    """Some splits are read, some are not, some are under way: fewer and more tasks go on from there."""
    _create(shop, 2000)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=100, parallelism=4, interval_seconds=0.001)
        with _writer(shop):
            for parallelism in (1, 7, 2):
                query.batch(timeout=5)

                def die(step: str) -> None:
                    if step == "read":
                        raise _Crash

                with pytest.raises(_Crash):
                    _deliver(query, die)
                query.parallelism = parallelism
                query.crash()
            assert query.planner.has_history
            query.run_until(query.planner.is_history_done)
        query.finish()
        query.assert_equal()
        assert max(query.sink.history[TABLE].values()) == 1
        query.close()


@shared(MYSQL)
def test_m24_interleaved_transactions_come_in_the_order_of_their_commits(shop: Shop, tmp_path: Path) -> None:
    """Each of three writes rows that the others will write; the one that began first commits last."""
    _create(shop, 900)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE, split_rows=100, parallelism=1, interval_seconds=0.001)
        number = 0
        while not query.planner.is_history_done():
            query.batch(timeout=0.2, between=lambda step: None)
            number += 1
            with shop.transaction() as one, shop.transaction() as two, shop.transaction() as three:
                for place, session in enumerate((one, two, three)):
                    session.execute(f"UPDATE orders SET total = {number} WHERE id % 9 = {place * 3} AND id > {number}")
                    session.execute(f"INSERT INTO orders VALUES ({number * 3 + 100001 + place * 10000}, 'new', 1, 'a')")
                three.commit()
                one.execute(f"UPDATE orders SET state = 'one' WHERE id % 9 = 6 AND id % 7 = {number % 7}")
                query.batch(timeout=0.2)
                two.commit()
                one.execute(f"DELETE FROM orders WHERE id % 9 = 3 AND id % 11 = {number % 11}")
                one.commit()
        query.finish()
        query.assert_equal()
        assert max(query.sink.history[TABLE].values()) == 1
        query.close()


@shared(POSTGRES)
def test_a_batch_of_changes_that_is_delivered_again_has_the_units_that_were_planned(shop: Shop, tmp_path: Path) -> None:
    _create(shop, 10)
    with running(shop, tmp_path, TABLE) as capture:
        query = Delivering(capture, TABLE)
        query.finish()
        shop.execute("UPDATE orders SET state = 'paid'")
        capture.catch_up()
        start = query.checkpoint
        assert start is not None
        end = query.planner.plan(start)
        planned = query.planner.units(start, end)
        query.crash()
        assert planned
        assert query.planner.units(start, end) == planned
        query.close()

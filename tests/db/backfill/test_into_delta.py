"""Queries whose batches go into real Delta tables, staged and committed as the tasks of Spark do it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.db.backfill.shops import MARIADB, MYSQL, POSTGRES, Shop, only, running, shared
from tests.db.capture.running import RunningCapture

from headwater.backfill.control import RESNAPSHOT, ask_query
from headwater.backfill.offset import QueryOffset
from headwater.backfill.planner import QueryPlanner
from headwater.backfill.query import QueryOptions
from headwater.capture.renewal import renew
from headwater.sinks.delta import DeltaSink
from headwater.sinks.sink import Committed, Mode
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.splits import SplitKind
from headwater.sources.table import SourceTable
from headwater.spark.claim_check import ClaimDelivery, ClaimReader, ClaimWriter

pytestmark = pytest.mark.db


class IntoDelta:
    """One query into one sink, without Spark."""

    def __init__(self, capture: RunningCapture, *tables: str, mode: Mode = Mode.MIRROR, **options: Any) -> None:
        self.capture = capture
        self.sink = DeltaSink(str(capture.folder / "lake"), mode)
        self.options = QueryOptions(
            **{"store": str(capture.store), "source": capture.database.dsn, "query": "delta", "tables": tables}
            | options
        )
        self.checkpoint: QueryOffset | None = None
        self.open()

    @property
    def delivery_options(self) -> dict[str, Any]:
        return {}

    def open(self) -> None:
        def committed(table: SourceTable, backfill: str) -> Committed:
            return self.sink.committed(table, "delta", backfill)

        self.planner = QueryPlanner(self.options, committed=committed, takeover=True)

    def batch(self, timeout: float = 0.3) -> bool:
        start = self.checkpoint or self.planner.initial()
        end = self.planner.advance(start, timeout=timeout)
        if end != start:
            self.deliver(start, end)
        return end != start

    def deliver(self, start: QueryOffset, end: QueryOffset) -> None:
        delivery = ClaimDelivery(self.options, self.sink, "/nowhere", **self.delivery_options)
        reader, writer = ClaimReader(delivery), ClaimWriter(delivery)
        reader._opened = self.planner
        messages = [
            writer.write(reader.read(partition)) for partition in reader.partitions(start.to_json(), end.to_json())
        ]
        writer.commit(list(messages), 0)
        self.checkpoint = end

    def finish(self, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not self.planner.is_history_done():
            assert time.monotonic() < end, self.planner.status()
            self.batch(0.2)
        self.capture.catch_up()
        while self.batch(0.2):
            pass

    def rows(self, table: str) -> pa.Table:
        return DeltaTable(f"{self.sink.path}/{table}").to_pyarrow_table()

    def assert_equal(self, table: str) -> None:
        found = self.rows(table)
        names = found.schema.names
        expected = self.capture.database.execute(f"SELECT {', '.join(names)} FROM {table}")
        assert Counter(zip(*(found.column(name).to_pylist() for name in names), strict=True)) == Counter(expected)


def _orders(shop: Shop) -> None:
    shop.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, state text, note text)",
        "INSERT INTO orders SELECT n, 'new', repeat('x', 200) FROM generate_series(1, 2000) n",
    )


@only(POSTGRES)
def test_rows_that_move_in_the_heap_come_once(shop: Shop, tmp_path: Path) -> None:
    """A row is read in one block, and updated into another before that is read."""
    _orders(shop)
    heap: dict[str, Any] = {"keyed": True, "split_kind": SplitKind.HEAP, "split_rows": 500, "parallelism": 1}
    with running(shop, tmp_path, "public.orders") as capture:
        query = IntoDelta(capture, "public.orders", interval_seconds=0.001, **heap)
        for number in range(3):
            start = query.checkpoint or query.planner.initial()
            planned = query.planner.advance(start, timeout=5)
            query.planner.close()  # the driver dies, and the snapshot with it
            shop.execute(f"UPDATE orders SET state = 'moved' WHERE id % 97 = {number}")
            query.open()
            query.deliver(start, planned)
        query.finish()
        query.assert_equal("public.orders")
        query.planner.close()


@shared(MARIADB)
def test_a_plan_that_the_sink_has_is_not_given_again(shop: Shop, tmp_path: Path) -> None:
    """The checkpoint is gone, and with it the last plan that was delivered."""
    _orders(shop)
    with running(shop, tmp_path, "public.orders") as capture:
        query = IntoDelta(capture, "public.orders", split_rows=100, parallelism=1, interval_seconds=0.001)
        for _ in range(3):
            query.batch()
        query.planner.close()
        query.checkpoint = None
        shop.execute("UPDATE orders SET state = 'later'")
        capture.catch_up()
        query.open()
        query.finish()
        query.assert_equal("public.orders")
        query.planner.close()


@shared(MYSQL)
def test_a_table_that_was_away_is_read_again(shop: Shop, tmp_path: Path) -> None:
    shop.execute(
        "CREATE TABLE a (id int PRIMARY KEY, v int)",
        "CREATE TABLE b (id int PRIMARY KEY, v int)",
        "INSERT INTO a VALUES (1, 1)",
        "INSERT INTO b VALUES (1, 1), (2, 2)",
    )
    with running(shop, tmp_path, "public.a", "public.b") as capture:
        query = IntoDelta(capture, "public.a", "public.b")
        query.finish()
        query.planner.close()
        alone = IntoDelta(capture, "public.a")
        alone.checkpoint = query.checkpoint
        shop.execute("UPDATE b SET v = 5 WHERE id = 1", "DELETE FROM b WHERE id = 2", "UPDATE a SET v = 2")
        alone.finish()
        alone.planner.close()
        both = IntoDelta(capture, "public.a", "public.b")
        both.checkpoint = alone.checkpoint
        shop.execute("INSERT INTO b VALUES (3, 3)")
        both.finish()
        both.assert_equal("public.b")
        both.assert_equal("public.a")
        both.planner.close()


@shared(MARIADB)
def test_changes_without_history_go_on_after_a_gap(shop: Shop, tmp_path: Path) -> None:
    shop.execute("CREATE TABLE a (id int PRIMARY KEY, v int)")
    with running(shop, tmp_path, "public.a") as capture:
        query = IntoDelta(capture, "public.a", mode=Mode.CHANGES, history=False)
        shop.execute("INSERT INTO a VALUES (2, 2)")
        query.finish()
        shop.execute("DROP TABLE a", "CREATE TABLE a (id int PRIMARY KEY, v int, w text)")
        capture.wait_until_stopped("public.a")
        assert renew(str(capture.store), ["public.a"])
        shop.execute("INSERT INTO a VALUES (10, 10, 'x')")
        query.finish()
        shop.execute("INSERT INTO a VALUES (11, 11, 'x')")
        query.finish()
        assert sorted(query.rows("public.a").column("id").to_pylist()) == [2, 10, 11]
        query.planner.close()


@only(POSTGRES)
def test_a_table_without_a_key_is_read_again_as_a_whole(shop: Shop, tmp_path: Path) -> None:
    shop.execute(
        "CREATE TABLE clicks (at int, what text)",
        "ALTER TABLE clicks REPLICA IDENTITY FULL",
        "INSERT INTO clicks SELECT n, nullif('w' || n % 7, 'w0') FROM generate_series(1, 500) n",
    )
    with running(shop, tmp_path, "public.clicks") as capture:
        query = IntoDelta(capture, "public.clicks", keyed=True, rows_per_second=0)
        shop.execute("INSERT INTO clicks VALUES (NULL, 'before its history')")
        query.batch()
        _ask(query, "throttle", rows_per_second=None)
        query.finish()
        query.assert_equal("public.clicks")
        _ask(query, RESNAPSHOT)
        query.finish()
        query.assert_equal("public.clicks")
        query.planner.close()


@shared(MYSQL)
def test_columns_that_the_capture_leaves_out_do_not_stop_the_history(shop: Shop, tmp_path: Path) -> None:
    _orders(shop)
    with running(shop, tmp_path, "public.orders", schema_policy=SchemaPolicy.IGNORE) as capture:
        query = IntoDelta(capture, "public.orders", split_rows=200, interval_seconds=0.001, new_columns=False)
        query.batch()
        shop.execute("ALTER TABLE orders ADD COLUMN w int", "UPDATE orders SET w = 1 WHERE id < 10")
        query.finish()
        query.assert_equal("public.orders")
        query.planner.close()


def _ask(query: IntoDelta, kind: str, **detail: Any) -> None:
    (table,) = query.options.tables
    asked = {"table": table, "start": None, "end": None, "columns": None} | detail
    thread = threading.Thread(target=ask_query, args=(query.options.store, "delta", kind, asked))
    thread.start()
    while thread.is_alive():
        query.batch(0.1)

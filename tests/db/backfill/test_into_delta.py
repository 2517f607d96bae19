"""Queries whose batches go into real Delta tables, staged and committed as the tasks of Spark do it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog
from tests.db.backfill.shops import MARIADB, MYSQL, POSTGRES, Shop, only, running, shared
from tests.db.capture.running import RunningCapture
from tests.here import Here

from headwater.backfill.claims import Delivery
from headwater.backfill.loop import DeliveryLoop
from headwater.backfill.planner import QueryPlanner
from headwater.backfill.query import QueryOptions
from headwater.capture.renewal import renew
from headwater.control.command import QueryCommand, ResnapshotTable, ThrottleBackfill
from headwater.control.request import ask_query
from headwater.pipeline.sink_state import let_back
from headwater.sinks.delivery import read_parked
from headwater.sinks.delta import DeltaSink
from headwater.sinks.iceberg import IcebergSink
from headwater.sinks.mysql import SESSIONS as MYSQL_SESSIONS
from headwater.sinks.mysql import MySqlSink
from headwater.sinks.parquet import ParquetSink
from headwater.sinks.postgres import SESSIONS as POSTGRES_SESSIONS
from headwater.sinks.postgres import PostgresSink
from headwater.sinks.sink import Mode, Sink
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.splits import SplitKind

pytestmark = pytest.mark.db


class IntoDelta:
    """One query into one sink, without Spark."""

    def __init__(
        self,
        capture: RunningCapture,
        *tables: str,
        mode: Mode = Mode.MIRROR,
        sink: Sink | None = None,
        parallelism: int = 2,
        **options: Any,
    ) -> None:
        self.capture, self.parallelism = capture, parallelism
        self.sink = sink or DeltaSink(str(capture.folder / "lake"), mode)
        self.options = QueryOptions(
            **{"store": str(capture.store), "source": capture.database.dsn, "query": "delta", "tables": tables}
            | options
        )
        self.open()

    @property
    def delivery_options(self) -> dict[str, Any]:
        return {}

    def open(self) -> None:
        delivery = Delivery(self.options, self.sink, **self.delivery_options)
        self.loop = DeliveryLoop(delivery, Here(self.parallelism))

    @property
    def planner(self) -> QueryPlanner:
        return self.loop.planner

    def batch(self, timeout: float = 0.3) -> bool:
        if not self.loop.plan(timeout):
            return False
        self.loop.deliver()
        return True

    def close(self) -> None:
        self.loop.close()

    def finish(self, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not self.planner.is_history_done():
            assert time.monotonic() < end, self.planner.status()
            self.batch(0.2)
        self.capture.catch_up()
        while self.batch(0.2):
            pass

    def rows(self, table: str) -> pa.Table:
        return DeltaTable(self.capture.folder / "lake" / table).to_pyarrow_table()

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
            assert query.loop.plan(5)
            query.close()  # the driver dies, and the snapshot with it
            shop.execute(f"UPDATE orders SET state = 'moved' WHERE id % 97 = {number}")
            query.open()
            assert query.batch(0)
        query.finish()
        query.assert_equal("public.orders")
        query.close()


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
        query.close()
        alone = IntoDelta(capture, "public.a")
        shop.execute("UPDATE b SET v = 5 WHERE id = 1", "DELETE FROM b WHERE id = 2", "UPDATE a SET v = 2")
        alone.finish()
        alone.close()
        both = IntoDelta(capture, "public.a", "public.b")
        shop.execute("INSERT INTO b VALUES (3, 3)")
        both.finish()
        both.assert_equal("public.b")
        both.assert_equal("public.a")
        both.close()


@shared(MARIADB)
def test_changes_without_history_go_on_after_a_gap(shop: Shop, tmp_path: Path) -> None:
    shop.execute("CREATE TABLE a (id int PRIMARY KEY, v int)")
    with running(shop, tmp_path, "public.a") as capture:
        query = IntoDelta(capture, "public.a", mode=Mode.CHANGES, history=False)
        shop.execute("INSERT INTO a VALUES (2, 2)")
        query.finish()
        shop.execute("DROP TABLE a", "CREATE TABLE a (id int PRIMARY KEY, v int, w text)")
        capture.wait_until_stopped("public.a")
        assert not renew(str(capture.store), ["public.a"])
        shop.execute("INSERT INTO a VALUES (10, 10, 'x')")
        query.finish()
        shop.execute("INSERT INTO a VALUES (11, 11, 'x')")
        query.finish()
        assert sorted(query.rows("public.a").column("id").to_pylist()) == [2, 10, 11]
        query.close()


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
        _ask(query, ThrottleBackfill(None))
        query.finish()
        query.assert_equal("public.clicks")
        _ask(query, ResnapshotTable())
        query.finish()
        query.assert_equal("public.clicks")
        query.close()


@shared(MYSQL)
def test_columns_that_the_capture_leaves_out_do_not_stop_the_history(shop: Shop, tmp_path: Path) -> None:
    _orders(shop)
    with running(shop, tmp_path, "public.orders", schema_policy=SchemaPolicy.IGNORE) as capture:
        query = IntoDelta(capture, "public.orders", split_rows=200, interval_seconds=0.001, new_columns=False)
        query.batch()
        shop.execute("ALTER TABLE orders ADD COLUMN w int", "UPDATE orders SET w = 1 WHERE id < 10")
        query.finish()
        query.assert_equal("public.orders")
        query.close()


@only(POSTGRES)
def test_a_table_of_others_is_parked_untouched_and_delivered_once_it_is_adopted(shop: Shop, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shop.execute(f"CREATE TABLE {name} (id bigint PRIMARY KEY, v text)", f"INSERT INTO {name} VALUES (1, 'ours')")
    theirs = pa.table({"id": pa.array([1, 2], pa.int64()), "v": ["theirs", "theirs"]})
    write_deltalake(tmp_path / "lake" / "public.a", theirs)
    with running(shop, tmp_path, "public.a", "public.b") as capture:
        query = IntoDelta(capture, "public.a", "public.b")
        query.finish()
        query.assert_equal("public.b")
        (told,) = read_parked(query.options.state_location, "delta").values()
        assert "not created by Headwater" in told.reason
        assert "adopt = true" in str(told.next_step)
        assert query.rows("public.a").equals(theirs)
        assert DeltaTable(tmp_path / "lake" / "public.a").version() == 0
        query.close()
        query.sink = DeltaSink(str(tmp_path / "lake"), adopt=True)
        assert let_back(query.options.store, query.options.state_location, "delta") == ["public.a"]
        query.open()
        query.finish()
        query.assert_equal("public.a")
        query.close()


EMPTY = ("public.never", "public.emptied")


def _empty(shop: Shop) -> None:
    for name in ("never", "emptied"):
        shop.execute(f"CREATE TABLE {name} (id bigint PRIMARY KEY, name varchar(40), amount numeric(10,2))")
    shop.execute("INSERT INTO emptied VALUES (1, 'gone', 1.5)", "DELETE FROM emptied")


def _deliver_empty(capture: RunningCapture, mode: Mode, sink: Sink | None = None) -> None:
    """Deliver the empty tables, to the Delta lake where no *sink* is given."""
    query = IntoDelta(capture, *EMPTY, mode=mode, sink=sink, query=f"{type(sink).__name__}-{mode.value}")
    query.finish()
    query.close()


@only(POSTGRES)
@pytest.mark.parametrize(
    "mode", [Mode.MIRROR, *(pytest.param(one, marks=pytest.mark.soak) for one in (Mode.CHANGES, Mode.HISTORY))]
)
def test_an_empty_table_is_there_at_every_sink_of_tables(shop: Shop, tmp_path: Path, mode: Mode) -> None:
    _empty(shop)
    with running(shop, tmp_path, *EMPTY) as capture:
        _deliver_empty(capture, mode)
        _deliver_empty(capture, mode, IcebergSink(str(tmp_path / "iceberg"), mode))
        _deliver_empty(capture, Mode.CHANGES, ParquetSink(str(tmp_path / "parquet")))
        _deliver_empty(capture, mode, PostgresSink(shop.dsn, mode, schema="mirror"))
        POSTGRES_SESSIONS.close()
        for name in EMPTY:
            found = {
                "delta": DeltaTable(tmp_path / "lake" / name).to_pyarrow_table(),
                "parquet": pq.read_table(tmp_path / "parquet" / name),
            }
            with load_catalog("headwater", uri=f"sqlite:///{tmp_path}/iceberg/catalog.db") as catalog:
                found["iceberg"] = catalog.load_table(name).scan().to_arrow()
            for kind, rows in found.items():
                assert (rows.num_rows, rows.schema.names[:3]) == (0, ["id", "name", "amount"]), kind
                assert rows.schema.field("amount").type == pa.decimal128(10, 2), kind
            columns = shop.execute(
                "SELECT column_name, data_type FROM information_schema.columns WHERE table_schema = 'mirror'"
                f" AND table_name = '{name.removeprefix('public.')}' ORDER BY ordinal_position LIMIT 3"
            )
            assert columns == [("id", "bigint"), ("name", "text"), ("amount", "numeric")]
            assert shop.execute(f"SELECT count(*) FROM mirror.{name.removeprefix('public.')}") == [(0,)]


@only(MARIADB)
def test_an_empty_table_of_mysql_is_there_at_a_sink_in_mysql(shop: Shop, tmp_path: Path) -> None:
    _empty(shop)
    with running(shop, tmp_path, *EMPTY) as capture:
        _deliver_empty(capture, Mode.MIRROR, MySqlSink(shop.dsn, database="mirror"))
        MYSQL_SESSIONS.close()
        for name in EMPTY:
            assert shop.execute(f"SELECT id, name, amount FROM mirror.{name.removeprefix('public.')}") == []


def _ask(query: IntoDelta, command: QueryCommand) -> None:
    thread = threading.Thread(target=ask_query, args=(query.options.state_location, "delta", command))
    thread.start()
    while thread.is_alive():
        query.batch(0.1)

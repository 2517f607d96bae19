"""A pipeline that keeps its tables and derives others of them: added, looked at, paused, dropped and made anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from tests.servers.postgres import Database

from headwater import Pipeline
from headwater.control.command import DropSink
from headwater.control.errors import RequestFailed
from headwater.pipeline.commands import steer
from headwater.pipeline.errors import ConfigError

SECONDS = 120.0


def per_customer(orders: Any, customers: Any) -> Any:
    """What each customer has ordered; those without orders, too."""
    sums = orders.groupBy("customer_id").agg(F.count("*").alias("orders"), F.sum("total").alias("total"))
    joined = customers.join(sums, customers.id == sums.customer_id, "left")
    return joined.select("id", "name", F.coalesce("orders", F.lit(0)).alias("orders"), "total")


@pytest.fixture
def shop(newest_postgres: Database) -> Database:
    newest_postgres.execute(
        "CREATE TABLE customers (id bigint PRIMARY KEY, name text)",
        "CREATE TABLE orders (id bigint PRIMARY KEY, customer_id bigint, total bigint)",
        "INSERT INTO customers SELECT n, 'customer ' || n FROM generate_series(1, 50) n",
        "INSERT INTO orders SELECT n, n % 40 + 1, n FROM generate_series(1, 1000) n",
    )
    return newest_postgres


def expected(shop: Database) -> list[tuple[Any, ...]]:
    return sorted(
        shop.execute(
            "SELECT c.id, c.name, count(o.id), sum(o.total)::bigint FROM customers c "
            "LEFT JOIN orders o ON o.customer_id = c.id GROUP BY 1, 2"
        )
    )


def found(folder: Path) -> list[tuple[Any, ...]]:
    try:
        table = DeltaTable(str(folder / "lake" / "derived.spending")).to_pyarrow_table()
    except Exception:
        return []
    return sorted(tuple(row.values()) for row in table.to_pylist())


def wait(done: Callable[[], object]) -> None:
    end = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.timeout(400)
def test_a_derived_table_is_kept_up_paused_dropped_and_made_anew(spark: Any, shop: Database, tmp_path: Path) -> None:
    source = {"dsn": shop.dsn, "heartbeat_seconds": 0.5}
    pipeline = Pipeline(source, ["public.*"], store=tmp_path / "store", name="shop")
    with pytest.raises(ConfigError, match=r'needs kept tables.*kind = "table"'):
        pipeline.derive("spending", per_customer, ["orders"], by=["customer_id"])
    pipeline.sink("table", interval_seconds=1.0).sink("delta", path=tmp_path / "lake")
    by = {"orders": ["customer_id"], "customers": ["id"]}
    pipeline.derive("spending", per_customer, ["orders", "customers"], by=by, key=["id"], interval_seconds=0.2)
    pipeline.start(spark)
    try:
        wait(lambda: pipeline.status().is_live)
        assert found(tmp_path) == expected(shop)
        shop.execute(
            "UPDATE orders SET customer_id = 45 WHERE id <= 20",
            "DELETE FROM customers WHERE id = 7",
            "INSERT INTO customers VALUES (100, 'new')",
            "DELETE FROM orders WHERE id > 990",
        )
        wait(lambda: found(tmp_path) == expected(shop))
        (told,) = pipeline.status().derived
        assert (told.table, told.phase, told.state, told.sink) == ("derived.spending", "live", "running", "delta")
        assert told.tables == ("public.orders", "public.customers")

        assert [outcome.text for outcome in pipeline.pause(sink="spending")] == ["paused; changes wait in the log"]
        before = found(tmp_path)
        shop.execute("UPDATE customers SET name = 'other' WHERE id = 1", "TRUNCATE orders")
        time.sleep(2)
        assert found(tmp_path) == before
        assert pipeline.status().derived[0].lag_rows > 0
        pipeline.resume(sink="spending")
        wait(lambda: found(tmp_path) == expected(shop))

        with pytest.raises(RequestFailed, match="made anew, not set back"):
            pipeline.rewind("spending")
        told_tables = steer(pipeline.config, DropSink("spending"))
        assert told_tables["tables"] == ["derived.spending"]
        shop.execute("INSERT INTO orders VALUES (1, 100, 5)", "DELETE FROM customers WHERE id = 2")
        pipeline.resume(sink="spending")
        wait(lambda: found(tmp_path) == expected(shop))
    finally:
        pipeline.stop()
    journal = "".join(path.read_text() for path in (tmp_path / "store" / "journal").rglob("*.jsonl"))
    for words in ('"to":"snapshot"', '"to":"live"', "derive_paused", "derive_starts", "derive_dropped"):
        assert words in journal.replace(": ", ":"), words

"""A pipeline from MySQL and MariaDB into a Delta mirror: history, live changes, and the end of both.

The default run has a pipeline from MariaDB in ``test_advised_commands.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.db.backfill.shops import MySqlShop
from tests.db.conftest import started_or_skipped
from tests.spark.pipeline.conftest import StartPipeline

ROWS = 20_000
TABLES = ("public.orders", "public.customers")


@pytest.fixture
def shop(request: pytest.FixtureRequest) -> Iterator[MySqlShop]:
    with started_or_skipped(request.param) as server:
        server.execute("CREATE DATABASE `public`")
        made = MySqlShop(server)
        made.execute(
            "CREATE TABLE orders (id bigint PRIMARY KEY, name varchar(40))",
            f"INSERT INTO orders SELECT n, 'order ' || n FROM generate_series(1, {ROWS}) n",
            "CREATE TABLE customers (id bigint PRIMARY KEY, name varchar(40))",
            "INSERT INTO customers SELECT n, 'customer ' || n FROM generate_series(1, 100) n",
        )
        yield made


def write(shop: MySqlShop, first: int) -> None:
    """A little of everything."""
    shop.execute(
        f"INSERT INTO orders SELECT n, 'new ' || n FROM generate_series({ROWS + first}, {ROWS + first + 99}) n",
        f"UPDATE orders SET name = 'changed' WHERE id BETWEEN {first} AND {first + 49}",
        f"DELETE FROM orders WHERE id BETWEEN {first + 50} AND {first + 99}",
        f"UPDATE orders SET id = -id WHERE id BETWEEN {first + 100} AND {first + 109}",
        f"DELETE FROM customers WHERE id = {first % 100 + 1}",
    )


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shop", ["mysql", "mariadb"], indirect=True)
def test_history_and_changes_come_to_a_mirror_and_the_history_ends(
    shop: MySqlShop, start_pipeline: StartPipeline
) -> None:
    pipeline = start_pipeline(shop, '["orders", "customers"]', "[backfill]\nsplit_rows = 2000")
    pipeline.wait_for(lambda: pipeline.table(TABLES[0])["rows"] > 0)
    write(shop, 1)
    for table in TABLES:
        pipeline.wait_for(lambda table=table: pipeline.table(table)["phase"] == "live")  # type: ignore[misc]
    write(shop, 1001)
    pipeline.wait_until_equal(*TABLES)
    pipeline.ask("verify", "--json")
    pipeline.end()

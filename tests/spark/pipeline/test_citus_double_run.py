"""``headwater run`` from a double of a Citus cluster (plain Postgres, not Citus) into a Delta mirror, verified."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.db.citus.writing import here
from tests.servers.citus_double import CitusDouble, Nodes
from tests.spark.pipeline.driven import RunningPipeline

ROWS = 5000


class Shop:
    """The cluster as one database: its rows are those of all nodes."""

    def __init__(self, double: CitusDouble) -> None:
        self.double = double
        self.dsn = double.dsn

    def execute(self, query: str) -> list[tuple[Any, ...]]:
        return [row for group in self.double.servers for row in self.double.execute(group, query)]

    def write(self, first: int) -> None:
        """A little of everything, on all nodes."""
        for group in (1, 2):
            added = f"generate_series({ROWS + first}::bigint, {ROWS + first + 99}) i WHERE"
            self.double.execute(
                group,
                f"INSERT INTO orders SELECT i, 'new ' || i FROM {added} {here(self.double, 'orders', group)}",
                f"UPDATE orders SET name = 'changed' WHERE id BETWEEN {first} AND {first + 49}",
                f"DELETE FROM orders WHERE id BETWEEN {first + 50} AND {first + 99}",
            )


@pytest.fixture
def shop() -> Iterator[Shop]:
    nodes = Nodes()
    try:
        double = CitusDouble([nodes.server(place) for place in range(3)], "shop")
        double.distribute("orders", "id bigint, name text")
        for group in (1, 2):
            rows = f"generate_series(1::bigint, {ROWS}) i WHERE {here(double, 'orders', group)}"
            double.execute(group, f"INSERT INTO orders SELECT i, 'order ' || i FROM {rows}")
        yield Shop(double)
    finally:
        nodes.close()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_history_and_changes_of_all_nodes_come_to_a_mirror_that_is_verified(shop: Shop, tmp_path: Path) -> None:
    pipeline = RunningPipeline(tmp_path, shop, '["orders"]', "[backfill]\nsplit_rows = 1000")  # type: ignore[arg-type]
    table = "public.orders"
    try:
        pipeline.start()
        pipeline.wait_for(lambda: pipeline.table(table)["rows"] > 0)
        shop.write(1)
        pipeline.wait_for(lambda: pipeline.table(table)["phase"] == "live")
        shard, owner = next(iter(shop.double.tables["orders"].shards.items()))
        shop.double.move("orders", shard, 3 - owner)
        shop.write(1001)
        pipeline.wait_until_equal(table)
        verified = pipeline.headwater("verify", "--json")
        assert verified.returncode == 0, verified.stdout + verified.stderr
        assert pipeline.stop() == 0, pipeline.complaints()
    finally:
        pipeline.close()

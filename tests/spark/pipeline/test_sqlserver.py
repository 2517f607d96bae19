"""``headwater run`` over the double of SQL Server into a Delta mirror: history, changes, a kill, and the proof."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.sqlserver import AnySqlServer, start_sqlserver, track
from tests.spark.pipeline.driven import RunningPipeline

ROWS = 3000


@pytest.fixture
def shop() -> Iterator[AnySqlServer]:
    with start_sqlserver() as server:
        server.execute("CREATE TABLE shop.orders (id bigint NOT NULL PRIMARY KEY, name nvarchar(40))")
        for first in range(1, ROWS + 1, 500):
            values = ", ".join(f"({n}, N'order {n}')" for n in range(first, first + 500))
            server.execute(f"INSERT INTO shop.orders VALUES {values}")
        track(server, "orders")
        yield server


def write(server: AnySqlServer, first: int) -> None:
    """A little of everything."""
    values = ", ".join(f"({ROWS + first + n}, N'new {n}')" for n in range(100))
    server.execute(
        f"INSERT INTO shop.orders VALUES {values}",
        f"BEGIN TRANSACTION; UPDATE shop.orders SET name = N'changed' WHERE id BETWEEN {first} AND {first + 49};"
        f" DELETE FROM shop.orders WHERE id BETWEEN {first + 50} AND {first + 99}; COMMIT",
        f"UPDATE shop.orders SET id = {-first} WHERE id = {first + 101}",
    )


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_mirror_of_the_double_is_the_table_also_after_a_kill(tmp_path: Path, shop: AnySqlServer) -> None:
    backfill = "[backfill]\nsplit_rows = 500\ninterval_seconds = 0.5"
    pipeline = RunningPipeline(tmp_path, shop, '["shop.orders"]', backfill)  # type: ignore[arg-type]
    try:
        pipeline.start()
        pipeline.wait_for(lambda: pipeline.table("shop.orders")["rows"] > 0)
        write(shop, 1)
        pipeline.kill9()
        write(shop, 201)
        pipeline.start()
        pipeline.wait_for(lambda: pipeline.table("shop.orders")["phase"] == "live")
        write(shop, 401)
        pipeline.wait_until_equal("shop.orders")
        verified = pipeline.headwater("verify", "--json")
        assert verified.returncode == 0, verified.stdout + verified.stderr
        assert json.loads(verified.stdout.splitlines()[-1])
        assert pipeline.stop() == 0, pipeline.complaints()
    finally:
        pipeline.close()

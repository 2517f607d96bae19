"""``headwater run`` from MongoDB into a Delta mirror: history, live changes, verified; a DataFrame of a collection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.db.mongodb.conftest import started_or_skipped
from tests.servers.mongodb import MongoServer
from tests.spark.pipeline.driven import RunningPipeline

ROWS = 5_000
TABLES = ("shop.orders", "shop.mixed")
SETTINGS = """
[backfill]
split_rows = 1000
[table."shop.orders".columns]
_id = "long"
name = "string"
lines = "array<struct<article: string, pieces: int>>"
more = "rest"
"""


@pytest.fixture
def server() -> Iterator[MongoServer]:
    with started_or_skipped() as made:
        shop = made.client.shop
        shop.orders.insert_many([order(number) for number in range(1, ROWS + 1)])
        shop.mixed.insert_many(
            [{"_id": number if number % 2 else f"key {number}", "n": number} for number in range(200)]
        )
        yield made


def order(number: int) -> dict[str, Any]:
    return {"_id": number, "name": f"order {number}", "lines": [{"article": "a", "pieces": number % 5}], "x": number}


def write(server: MongoServer, first: int) -> None:
    """A little of everything."""
    shop = server.client.shop
    shop.orders.insert_many([order(number) for number in range(ROWS + first, ROWS + first + 100)])
    with server.client.start_session() as session, session.start_transaction():
        paid = {"$set": {"name": "changed"}, "$push": {"lines": {"article": "b", "pieces": 1}}}
        shop.orders.update_many({"_id": {"$gte": first, "$lt": first + 50}}, paid, session=session)
        shop.orders.delete_many({"_id": {"$gte": first + 50, "$lt": first + 100}}, session=session)
        shop.mixed.delete_one({"_id": f"key {first % 50 * 2}"}, session=session)
        shop.mixed.replace_one({"_id": 1}, {"n": -first}, session=session)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_history_and_changes_come_to_a_mirror_and_are_verified(server: MongoServer, tmp_path: Path) -> None:
    pipeline = RunningPipeline(tmp_path, server, '["shop.*"]', SETTINGS)  # type: ignore[arg-type]
    try:
        pipeline.start()
        pipeline.wait_for(lambda: pipeline.table(TABLES[0])["rows"] > 0)
        write(server, 1)
        for table in TABLES:
            pipeline.wait_for(lambda table=table: pipeline.table(table)["phase"] == "live")  # type: ignore[misc]
        write(server, 1001)
        verified = pipeline.headwater("verify", "--json")
        assert verified.returncode == 0, verified.stdout + verified.stderr
        assert f'"source_rows": {server.client.shop.orders.count_documents({})}' in verified.stdout
        assert pipeline.stop() == 0, pipeline.complaints()
    finally:
        pipeline.close()

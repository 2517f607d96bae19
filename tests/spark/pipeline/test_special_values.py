"""A special value stops its table alone, in history and in changes, and what its reason says repairs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.db.backfill.shops import MySqlShop
from tests.db.conftest import started_or_skipped
from tests.servers.postgres import Database
from tests.spark.pipeline.driven import RunningPipeline

NAMES = ("orders", "old", "odd")


@pytest.fixture
def shop(newest_postgres: Database) -> Database:
    newest_postgres.execute("CREATE SCHEMA shop")
    for name in NAMES:
        newest_postgres.execute(
            f"CREATE TABLE shop.{name} (id bigint PRIMARY KEY, name text, day date, price numeric(9,2))",
            f"INSERT INTO shop.{name} SELECT n, 'row ' || n, '2026-01-01', n FROM generate_series(1, 100) n",
        )
    newest_postgres.execute("UPDATE shop.old SET day = 'infinity' WHERE id = 50")
    return newest_postgres


@pytest.fixture
def running(tmp_path: Path, shop: Database) -> Iterator[RunningPipeline]:
    made = RunningPipeline(tmp_path, shop, '["shop.*"]')
    made.start()
    yield made
    made.close()


def shown(running: RunningPipeline, name: str) -> dict[str, Any]:
    return running.table(f"shop.{name}")


def is_live(running: RunningPipeline, name: str) -> bool:
    found = shown(running, name)
    return bool(found["phase"] == "live")


def set_policy(running: RunningPipeline, text: str) -> None:
    path = running.folder / "pipeline.toml"
    path.write_text(f"{path.read_text()}\n{text}\n")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_special_value_stops_its_table_alone_and_its_reason_repairs_it(
    running: RunningPipeline, shop: Database
) -> None:
    running.wait_for(lambda: shown(running, "old")["phase"] == "stopped")
    assert "column 'day' (date) holds infinite dates or times" in shown(running, "old")["reason"]
    assert shown(running, "old")["next_step"].endswith("run: headwater resnapshot shop.old")
    running.wait_for(lambda: shown(running, "orders")["phase"] == shown(running, "odd")["phase"] == "live")
    shop.execute(
        "INSERT INTO shop.odd VALUES (101, 'good', '2026-01-01', 1)",
        "UPDATE shop.odd SET price = 'NaN' WHERE id = 7",
        "INSERT INTO shop.odd VALUES (102, 'after', '2026-01-01', 1)",
        "INSERT INTO shop.orders VALUES (101, 'more', NULL, NULL)",
    )
    running.wait_for(lambda: shown(running, "odd")["phase"] == "stopped")
    assert "column 'price' (numeric(9,2)) holds NaN or infinite numbers" in shown(running, "odd")["reason"]
    assert "headwater resnapshot shop.odd" in shown(running, "odd")["next_step"]
    running.wait_until_equal("shop.orders")
    assert running.stop() == 0, running.complaints()

    set_policy(
        running, '[table."shop.old"]\nspecial_values = "text"\n[table."shop.odd"]\nspecial_values.price = "null"'
    )
    set_policy(running, '[table."shop.orders"]\nspecial_values = "park"')
    running.start()
    shop.execute("INSERT INTO shop.orders VALUES (102, 'still', NULL, NULL)")
    running.wait_until_equal("shop.orders")
    for name in NAMES:
        done = running.headwater("resnapshot", f"shop.{name}")
        assert done.returncode == 0, done.stderr
        running.wait_for(partial(is_live, running, name))
    shop.execute("INSERT INTO shop.old VALUES (101, 'far', '0044-03-15 BC', 1)")
    running.wait_until_equal("shop.old", "shop.odd")
    assert sorted(set(running.column("shop.old", "day"))) == ["0044-03-15 BC", "2026-01-01", "infinity"]
    assert running.column("shop.odd", "price").count(None) == 1

    shop.execute("UPDATE shop.orders SET day = 'infinity' WHERE id <= 2")
    running.wait_for(lambda: len(running.mirror("shop.orders")) == 100)
    (letters,) = json.loads(running.headwater("sink", "letters", "delta", "--json").stdout)
    assert (letters["table"], letters["rows"]) == ("shop.orders", 2)
    assert list(letters["reasons"]) == ["Special value: column 'day' holds a value that the type does not have."]
    shop.execute("UPDATE shop.orders SET day = NULL WHERE id = 1")
    running.wait_for(lambda: len(running.mirror("shop.orders")) == 101)
    replayed = running.headwater("sink", "replay", "delta")
    assert "1 rows of shop.orders" in replayed.stderr, replayed.stderr
    running.wait_for(lambda: json.loads(running.headwater("sink", "letters", "delta", "--json").stdout))
    shop.execute("DELETE FROM shop.orders WHERE id = 2")
    running.wait_for(lambda: not json.loads(running.headwater("sink", "letters", "delta", "--json").stdout))
    running.wait_until_equal("shop.orders")
    assert running.stop() == 0, running.complaints()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_only_table_of_a_sink_is_repaired_in_the_same_way(tmp_path: Path) -> None:
    with started_or_skipped("mariadb") as server:
        server.execute("CREATE DATABASE `public`")
        shop = MySqlShop(server)
        shop.execute(
            "CREATE TABLE orders (id bigint PRIMARY KEY, name varchar(40), day date)",
            "SET sql_mode = ''",
            "INSERT INTO orders VALUES (1, 'one', '0000-00-00'), (2, 'two', '2026-01-01')",
        )
        running = RunningPipeline(tmp_path, shop, '["orders"]')
        running.start()
        try:
            assert running.wait() != 0
            assert "column 'day' (date) holds" in running.complaints()
            set_policy(running, '[table.orders]\nspecial_values = "null"')
            done = running.headwater("resnapshot", "orders")
            assert done.returncode == 0, done.stderr
            running.start()
            running.wait_for(lambda: running.table("public.orders")["phase"] == "live")
            running.wait_until_equal("public.orders")
            assert running.column("public.orders", "day").count(None) == 1
        finally:
            running.close()

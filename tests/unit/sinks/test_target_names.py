"""Names of tables at every sink, as tests/fixtures/sinks/target_names.json has them. They never change: a table of an
existing pipeline would be delivered to another target from then on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.sinks.iceberg import IcebergSink
from headwater.sinks.iceberg_catalog import identifier_of
from headwater.sinks.kafka import KafkaSink
from headwater.sinks.mysql import MySqlSink
from headwater.sinks.postgres import PostgresSink
from headwater.sinks.storage import Storage
from headwater.sources.table import SourceColumn, SourceTable
from headwater.sources.target_names import directory_name, table_of_directory, token_topic
from headwater.versioned.folder import TableFolder

GOLDEN = Path(__file__).parents[2] / "fixtures/sinks/target_names.json"


def table_named(namespace: str, name: str) -> SourceTable:
    return SourceTable(namespace, name, (SourceColumn("id", pa.int64(), "bigint", 1),), ("id",))


def targets(table: SourceTable, root: str) -> dict[str, Any]:
    kafka = KafkaSink(brokers="localhost", staging=root)
    return {
        "directory": Storage(root).directory_of(table),
        "iceberg": list(identifier_of(table, None)),
        "iceberg_location": IcebergSink(root).target(table),
        "versioned": TableFolder(root, table.full_name).path.name,
        "topic": kafka.topic_of(table),
        "postgres": PostgresSink("postgresql://localhost/x").target(table),
        "mysql": list(MySqlSink("mysql://localhost")._place(table)),
    }


def test_names_at_every_sink_are_those_of_the_golden_file(tmp_path: Path) -> None:
    for case in json.loads(GOLDEN.read_text(encoding="utf-8")):
        table = table_named(case["namespace"], case["name"])
        assert {"namespace": table.namespace, "name": table.name, **targets(table, str(tmp_path))} == case


def test_names_at_every_sink_are_unique_also_where_case_is_ignored(tmp_path: Path) -> None:
    cases = json.loads(GOLDEN.read_text(encoding="utf-8"))
    for kind in ("directory", "iceberg_location", "versioned"):
        assert len({case[kind].casefold() for case in cases}) == len(cases), kind
    for kind in ("topic", "postgres"):
        assert len({case[kind] for case in cases}) == len(cases), kind
    for kind in ("iceberg", "mysql"):
        assert len({tuple(case[kind]) for case in cases}) == len(cases), kind


def test_the_earlier_directory_of_a_table_is_used_where_it_exists(tmp_path: Path) -> None:
    table = table_named("dbo", "CustomerOrders")
    assert Storage(str(tmp_path)).directory_of(table) == "dbo.customerorders~u101~"
    (tmp_path / "dbo.CustomerOrders").mkdir()
    assert Storage(str(tmp_path)).directory_of(table) == "dbo.CustomerOrders"
    (tmp_path / "dbo.customerorders~u101~").mkdir()
    assert Storage(str(tmp_path)).directory_of(table) == "dbo.customerorders~u101~"
    old = tmp_path / "dbo.~22~CustomerOrders~22~"
    assert TableFolder(tmp_path, table.full_name).path.name == "dbo.~22~customerorders~22~~u808~"
    old.mkdir()
    assert TableFolder(tmp_path, table.full_name).path == old


def test_an_earlier_directory_that_another_table_has_today_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "a.b.c").mkdir()
    assert Storage(str(tmp_path)).directory_of(table_named("a", "b.c")) == "a.b.c"
    assert Storage(str(tmp_path)).directory_of(table_named("a.b", "c")) == "a~2e~b.c"


@pytest.mark.parametrize("directory", ["Orders", "a..b", "a.b ", "a~2E~", "a~61~", "x~u0~", "x~h00~", "~110000~", "~"])
def test_a_directory_that_is_not_of_a_table_has_none(directory: str) -> None:
    found = table_of_directory(directory)
    assert found is None or directory_name(*found) == directory
    assert directory == "~" or found is None


def test_a_token_topic_names_query_and_topic() -> None:
    assert token_topic("shop-x1-lake", "public.orders") == "_headwater.shop-x1-lake.public.orders"
    long = token_topic("q" * 100, "t" * 200)
    assert len(long) == 249
    assert long != token_topic("q" * 100, "t" * 199 + "u")

"""Tables whose names are not ordinary: each has a target of its own, and none leaves the directory of its sink."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog
from tests.query_state import coordinating

from headwater.sinks.console import ConsoleSink
from headwater.sinks.dead_letters import DeadLetters
from headwater.sinks.delta import DeltaSink
from headwater.sinks.errors import SinkInputError, SinkSchemaError
from headwater.sinks.iceberg import IcebergSink
from headwater.sinks.kafka import KafkaSink
from headwater.sinks.kept_tables import KeptTables
from headwater.sinks.parquet import ParquetSink, read
from headwater.sinks.postgres import PostgresSink
from headwater.sinks.sink import Sink, Token
from headwater.sinks.storage import Storage
from headwater.sources.table import SourceTable
from headwater.state import open_writer

from .file_sinks import INSERT, ORDERS, UPDATE, Feed, log_rows, order

NAMES = [
    ("a.b", "c"),
    ("a", "b.c"),
    ("..", "orders"),
    ("public", ".."),
    ("public", "Orders"),
    ("public", "ORDERS"),
    ("_headwater_staging", "orders"),
    ("x" * 128, "y" * 128),
    ("x" * 128, "y" * 127 + "z"),
]


def table_named(namespace: str, name: str) -> SourceTable:
    return replace(ORDERS, namespace=namespace, name=name)


def statuses(sink: Sink, table: SourceTable) -> dict[int, str]:
    rows = [row for part in sink.shown(table, ["id", "status"]) for row in part.to_pylist()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row["status"] for row in rows}


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("kind", [DeltaSink, IcebergSink, KeptTables])
def test_each_table_has_its_own_rows_and_stays_in_the_directory_of_the_sink(kind: type, tmp_path: Path) -> None:
    sink = kind(str(tmp_path / "deep" / "lake"))
    tables = [table_named(*names) for names in NAMES]
    for number, table in enumerate(tables):
        feed = Feed(sink, table)
        assert feed.history(1, [order(number, "old")])
        assert feed.changes(1, (UPDATE, order(number, f"table {number}")))
    for number, table in enumerate(tables):
        assert statuses(sink, table) == {number: f"table {number}"}
    assert entries(tmp_path) == ["deep"]
    assert entries(tmp_path / "deep") == ["lake"]


def test_each_parquet_directory_has_the_rows_of_one_table(tmp_path: Path) -> None:
    sink = ParquetSink(str(tmp_path / "lake"))
    tables = [table_named(*names) for names in NAMES]
    for number, table in enumerate(tables):
        assert Feed(sink, table).changes(1, (INSERT, order(number)))
    for number, table in enumerate(tables):
        assert read(Path(Storage(sink.path).of_table(table).address)).column("id").to_pylist() == [number]
    assert entries(tmp_path) == ["lake"]


def test_other_programs_read_the_tables_by_the_names_of_the_docs(tmp_path: Path) -> None:
    delta, iceberg = DeltaSink(str(tmp_path / "delta")), IcebergSink(str(tmp_path / "iceberg"))
    for sink in (delta, iceberg):
        for number, names in enumerate((("a.b", "c"), ("a", "b.c"))):
            assert Feed(sink, table_named(*names)).changes(1, (INSERT, order(number)))
    for directory, number in (("a~2e~b.c", 0), ("a.b.c", 1)):
        found = DeltaTable(str(tmp_path / "delta" / directory)).to_pyarrow_table()
        assert found.column("id").to_pylist() == [number]
    uri = f"sqlite:///{tmp_path}/iceberg/catalog.db"
    with load_catalog(iceberg.catalog, uri=uri) as catalog:
        for identifier, number in ((("a.b", "c"), 0), (("a", "b.c"), 1)):
            found = catalog.load_table(identifier).scan().to_arrow()
            assert found.column("id").to_pylist() == [number]


def test_a_table_of_an_earlier_version_stays_where_it_is(tmp_path: Path) -> None:
    orders, sink = table_named("dbo", "Orders"), DeltaSink(str(tmp_path))
    (tmp_path / "dbo.Orders").mkdir()
    feed = Feed(sink, orders)
    assert feed.history(1, [order(1)])
    assert feed.changes(1, (UPDATE, order(1, "changed")))
    assert DeltaTable(str(tmp_path / "dbo.Orders")).to_pyarrow_table().column("status").to_pylist() == ["changed"]
    assert not (tmp_path / "dbo.orders~u1~").exists()


@pytest.mark.parametrize("kind", [DeltaSink, ParquetSink])
def test_a_directory_with_the_rows_of_another_table_is_refused(kind: type, tmp_path: Path) -> None:
    """As on a file system that ignores case, where an earlier version created ``public.Orders``."""
    sink = kind(str(tmp_path))
    (tmp_path / "public.Orders").mkdir()
    assert Feed(sink, table_named("public", "Orders")).changes(1, (INSERT, order(1)))
    (tmp_path / "public.Orders").rename(tmp_path / "public.orders")
    with pytest.raises(SinkSchemaError, match=r'has the rows of public\."Orders"'):
        Feed(sink, ORDERS).changes(1, (INSERT, order(2)))
    assert sink.committed(ORDERS, "q", "b1").epoch == 0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    location = str(tmp_path / "store")
    with open_writer(location):
        yield location


def test_two_tables_with_one_target_are_refused_at_the_start_and_named(store: str, tmp_path: Path) -> None:
    tables = [table_named("a", "orders"), table_named("b", "other"), table_named("b", "orders")]
    staging = str(tmp_path / "staging")
    shared: list[Sink] = [
        IcebergSink(str(tmp_path / "lake"), namespace="all"),
        KafkaSink(brokers="localhost:1", staging=staging, topic="{table}"),
        PostgresSink("postgresql://localhost:1/x", schema="all"),
    ]
    for sink in shared:
        with (
            coordinating(store, "q") as coordinator,
            pytest.raises(SinkInputError, match=r"Tables a\.orders and b\.orders have the same target .*orders"),
        ):
            coordinator.recover(sink, "b1", tables)
    own: list[Sink] = [DeltaSink(str(tmp_path / "delta")), ConsoleSink(staging=staging)]
    for sink in own:
        with coordinating(store, "q") as coordinator:
            coordinator.recover(sink, "b1", tables)


def test_two_directories_that_are_one_are_refused_at_the_start(store: str, tmp_path: Path) -> None:
    """A link stands for a file system that ignores case."""
    lake = tmp_path / "lake"
    (lake / "public.Orders").mkdir(parents=True)
    (lake / "public.orders").symlink_to(lake / "public.Orders")
    tables = [table_named("public", "Orders"), ORDERS]
    with (
        coordinating(store, "q") as coordinator,
        pytest.raises(SinkInputError, match="have the same target"),
    ):
        coordinator.recover(ParquetSink(str(lake)), "b1", tables)


def test_dead_letters_of_every_table_are_listed(tmp_path: Path) -> None:
    letters = DeadLetters(str(tmp_path))
    tables = [table_named("_app", "orders"), table_named("App", "Orders"), table_named("x" * 128, "y" * 128)]
    for table in tables:
        rows = log_rows(table, [(INSERT, order(1))])
        place = len(table.columns)
        columns = [*rows.columns[:place], pa.array(["a check"]), pa.array([None], pa.string()), *rows.columns[place:]]
        names = [*rows.schema.names[:place], "_reason", "_letter_key", *rows.schema.names[place:]]
        refused = pa.RecordBatch.from_arrays(columns, names)
        letters.commit([letters.stage_changes(table, Token("q", "b1", 0, 1, 0), [refused])])
    assert set(letters.tables()) == {letters.directory_of(table) for table in tables}
    for directory in letters.tables():
        assert letters.rows(directory).num_rows == 1
        letters.put_away(directory)
    assert letters.tables() == []
    assert sorted(entries(tmp_path / "_replayed"))[0].startswith("_app.orders-")

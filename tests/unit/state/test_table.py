"""State tables: typed rows, ranges, the catalog, and rows of older versions."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from headwater.state import (
    Catalog,
    Field,
    FieldType,
    StateStore,
    StateTable,
    TableSchema,
    WriteBatch,
    open_writer,
)
from headwater.state.errors import InvalidKey, InvalidValue, SchemaMismatch, StoreCorrupt
from headwater.stream.epoch import Epoch

SPLITS = TableSchema(
    "splits",
    1,
    key=(Field("tenant", FieldType.TEXT), Field("number", FieldType.INT)),
    value=(Field("done", FieldType.BOOL), Field("rows", FieldType.UINT, nullable=True)),
)


@pytest.fixture
def store() -> Iterator[StateStore]:
    with open_writer(f"memory://{uuid.uuid4()}") as made:
        yield made


def commit(store: StateStore, batch: WriteBatch) -> None:
    store.seal(Epoch.from_ms(store.committed_epoch().ms + 1), batch)


def created(store: StateStore, schema: TableSchema = SPLITS, **options: Any) -> StateTable:
    batch = WriteBatch()
    with store.snapshot() as view:
        table = Catalog.load(view).open_or_create(schema, batch, **options)
    commit(store, batch)
    return table


def fill(store: StateStore, table: StateTable, rows: dict[tuple[int, str, int], tuple[Any, ...]]) -> None:
    batch = WriteBatch()
    for (vnode, tenant, number), value in rows.items():
        table.put(batch, vnode, (tenant, number), value)
    commit(store, batch)


def test_rows_come_back_by_key_and_in_key_order(store: StateStore) -> None:
    table = created(store)
    rows = {(3, "b", -5): (True, None), (3, "b", 2): (False, 7), (3, "a", 9): (True, 1), (4, "a", 1): (True, 2)}
    fill(store, table, rows)
    with store.snapshot() as view:
        assert table.get(view, 3, ("b", -5)) == (True, None)
        assert table.get(view, 3, ("b", -6)) is None
        assert [key for key, _ in table.scan(view, 3)] == [("a", 9), ("b", -5), ("b", 2)]
        assert [key for key, _ in table.scan(view, 3, reverse=True)] == [("b", 2), ("b", -5), ("a", 9)]
        assert [key for key, _ in table.scan(view, 3, ("a", 9), ("b", 2))] == [("a", 9), ("b", -5)]
        assert [key for key, _ in table.scan_prefix(view, 3, ("b",))] == [("b", -5), ("b", 2)]
        assert [list(table.scan(view, vnode)) for vnode in (3, 4)] == [
            [((t, n), rows[v, t, n]) for v, t, n in sorted(rows) if v == vnode] for vnode in (3, 4)
        ]


def test_rows_are_deleted_one_by_one_and_by_range(store: StateStore) -> None:
    table = created(store)
    fill(store, table, {(0, "a", n): (True, n) for n in range(5)} | {(1, "a", 0): (True, 0)})
    batch = WriteBatch()
    table.delete(batch, 0, ("a", 4))
    table.delete_range(batch, 0, ("a", 1), ("a", 3))
    commit(store, batch)
    with store.snapshot() as view:
        assert [key[1] for key, _ in table.scan(view, 0)] == [0, 3]
    batch = WriteBatch()
    table.delete_range(batch, 0)
    commit(store, batch)
    with store.snapshot() as view:
        assert list(table.scan(view, 0)) == []
        assert list(table.scan(view, 1)) == [(("a", 0), (True, 0))]


def test_tables_of_one_store_do_not_see_each_other(store: StateStore) -> None:
    first = created(store)
    second = created(store, TableSchema("other", 1, SPLITS.key, SPLITS.value))
    fill(store, first, {(0, "a", 1): (True, 1)})
    with store.snapshot() as view:
        assert list(second.scan(view, 0)) == []
        catalog = Catalog.load(view)
        assert catalog.names() == ["other", "splits"]
        assert catalog.schema("splits") == SPLITS
        assert list(catalog.open(SPLITS).scan(view, 0)) == [(("a", 1), (True, 1))]


def test_a_table_exists_only_once_its_batch_is_sealed(store: StateStore) -> None:
    batch = WriteBatch()
    with store.snapshot() as view:
        Catalog.load(view).open_or_create(SPLITS, batch)
        with pytest.raises(SchemaMismatch, match="no state table 'splits'"):
            Catalog.load(view).open(SPLITS)
    commit(store, batch)
    with store.snapshot() as view:
        assert Catalog.load(view).open(SPLITS).schema == SPLITS


def test_rows_never_come_without_the_catalog_row_that_names_them(store: StateStore) -> None:
    with store.snapshot() as view:
        catalog = Catalog.load(view)
        table = catalog.open_or_create(SPLITS, WriteBatch())  # this batch is never sealed
    fill(store, table, {(0, "a", 1): (True, 1)})
    other = created(store, TableSchema("other", 1, SPLITS.key, SPLITS.value))
    with store.snapshot() as view:
        assert Catalog.load(view).names() == ["other", "splits"]
        assert list(other.scan(view, 0)) == []
        assert list(Catalog.load(view).open(SPLITS).scan(view, 0)) == [(("a", 1), (True, 1))]


def test_tables_read_from_a_mapped_snapshot(tmp_path: Path) -> None:
    with open_writer(tmp_path / "store") as store:
        table = created(store)
        fill(store, table, {(0, "a", 1): (True, 1)})
        with store.mapped_snapshot() as view:
            assert Catalog.load(view).open(SPLITS).get(view, 0, ("a", 1)) == (True, 1)


def test_two_tables_created_in_one_batch_get_numbers_of_their_own(store: StateStore) -> None:
    batch = WriteBatch()
    with store.snapshot() as view:
        catalog = Catalog.load(view)
        tables = [catalog.open_or_create(TableSchema(f"t{n}", 1, SPLITS.key, SPLITS.value), batch) for n in range(3)]
    for number, table in enumerate(tables):
        table.put(batch, 0, ("x", number), (True, number))
    commit(store, batch)
    with store.snapshot() as view:
        assert [list(table.scan(view, 0)) for table in tables] == [[(("x", n), (True, n))] for n in range(3)]


V2 = TableSchema("splits", 2, SPLITS.key, (*SPLITS.value, Field("bytes", FieldType.DECIMAL)))
V3 = TableSchema("splits", 3, SPLITS.key, (Field("state", FieldType.TEXT), Field("bytes", FieldType.DECIMAL)))
MIGRATIONS = {
    1: lambda values: (*values, Decimal(0)),
    2: lambda values: ("done" if values[0] else "open", values[2]),
}


def test_rows_of_every_older_version_are_migrated_when_read_and_rewritten_on_demand(store: StateStore) -> None:
    fill(store, created(store), {(0, "a", 1): (True, 1)})
    second = created(store, V2, migrations=MIGRATIONS)
    fill(store, second, {(0, "a", 2): (False, None, Decimal("2.50"))})
    third = created(store, V3, migrations=MIGRATIONS)
    fill(store, third, {(0, "a", 3): ("open", Decimal(3))})
    expected = [("done", Decimal(0)), ("open", Decimal("2.50")), ("open", Decimal(3))]
    with store.snapshot() as view:
        assert [values for _, values in third.scan(view, 0)] == expected
        batch = WriteBatch()
        assert third.rewrite(view, batch, limit=1) == 1
        batch = WriteBatch()
        assert third.rewrite(view, batch) == 2
    commit(store, batch)
    with store.snapshot() as view:
        assert [values for _, values in third.scan(view, 0)] == expected
        assert third.rewrite(view, WriteBatch()) == 0


def test_schemas_that_do_not_fit_what_is_stored_are_refused_and_nothing_is_written(store: StateStore) -> None:
    created(store, V2, migrations=MIGRATIONS)
    for schema, words in (
        (SPLITS, "version 2; this release has 1"),
        (TableSchema("splits", 2, SPLITS.key, SPLITS.value), "other stored fields"),
        (TableSchema("splits", 2, (Field("tenant", FieldType.BYTES),), V2.value), "other key fields"),
        (TableSchema("splits", 3, (Field("tenant", FieldType.BYTES),), V2.value), "other key fields"),
        (TableSchema("splits", 3, SPLITS.key, V3.value), "migration from version 2"),
    ):
        batch = WriteBatch()
        with store.snapshot() as view, pytest.raises(SchemaMismatch, match=words):
            Catalog.load(view).open_or_create(schema, batch)
        assert not batch


@pytest.mark.parametrize(
    ("name", "version", "key"),
    [
        ("", 1, SPLITS.key),
        ("x" * 101, 1, SPLITS.key),
        ("new\nline", 1, SPLITS.key),
        ("t", 0, SPLITS.key),
        ("t", 1, ()),
        ("t", 1, (Field("a", FieldType.INT), Field("a", FieldType.INT))),
        ("t", 1, (Field("a", FieldType.JSON),)),
    ],
)
def test_a_schema_that_makes_no_sense_is_refused(name: str, version: int, key: tuple[Field, ...]) -> None:
    with pytest.raises(SchemaMismatch):
        TableSchema(name, version, key, ())


def test_bad_keys_and_values_are_refused_before_they_reach_the_batch(store: StateStore) -> None:
    table = created(store)
    batch = WriteBatch()
    for vnode, key, value in (
        (-1, ("a", 1), (True, 1)),
        (32768, ("a", 1), (True, 1)),
        (1.5, ("a", 1), (True, 1)),
        (0, ("a",), (True, 1)),
        (0, ("a", "1"), (True, 1)),
        (0, (None, 1), (True, 1)),
        (0, ("a" * 500, 1), (True, 1)),
        (0, ("a", 1), (True,)),
        (0, ("a", 1), (None, 1)),
        (0, ("a", 1), (True, -1)),
    ):
        with pytest.raises((InvalidKey, InvalidValue)):
            table.put(batch, vnode, key, value)  # type: ignore[arg-type]
    assert not batch


def test_damaged_rows_are_called_corrupt(store: StateStore) -> None:
    table = created(store)
    fill(store, table, {(0, "a", 1): (True, 1)})
    with store.snapshot() as view:
        (key, good) = next(iter(view.scan_prefix(b"\x00\x00\x00\x01")))
    for bad in (b"", good[:2], good[:-1], good + b"x", b"\x09" + good[1:], good[:1] + b"\x00\x07" + good[3:]):
        batch = WriteBatch()
        batch.put(key, bad)
        commit(store, batch)
        with store.snapshot() as view, pytest.raises(StoreCorrupt):
            table.get(view, 0, ("a", 1))

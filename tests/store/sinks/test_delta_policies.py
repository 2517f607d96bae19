"""What becomes of columns at a Delta sink that the source drops or renames, by policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from headwater.sinks.errors import SinkSchemaError
from headwater.sinks.open import SinkOptionError, open_sink
from headwater.sinks.sink import Sink
from headwater.sources.table import SourceColumn, SourceTable

from .file_sinks import DELETE, INSERT, UPDATE, Feed, IntegerOrder

MODES = pytest.mark.parametrize("mode", ["mirror", "changes", "history"])


def table_with(*columns: tuple[str, int], dropped: tuple[str, ...] = (), key: tuple[str, ...] = ("id",)) -> SourceTable:
    """Columns of text with their field ids."""
    made = tuple(SourceColumn(name, pa.string(), "text", number, dropped=name in dropped) for name, number in columns)
    return SourceTable("public", "orders", made, key)


BEFORE = table_with(("id", 1), ("a", 2), ("b", 3))


def rows_of(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    rows = DeltaTable(path / "public.orders").to_pyarrow_table()
    names = [name for name in rows.schema.names if not name.startswith("_")]
    return sorted(names), sorted(rows.select(names).to_pylist(), key=str)


@MODES
def test_a_dropped_column_stays(tmp_path: Path, mode: str) -> None:
    feed = Feed(open_sink("delta", path=str(tmp_path), mode=mode), BEFORE)
    feed.changes(1, (INSERT, {"id": "1", "a": "x", "b": "y"}))
    feed.table = table_with(("id", 1), ("a", 2), ("b", 3), dropped=("b",))
    feed.changes(2, (INSERT, {"id": "2", "a": "z"}))
    assert rows_of(tmp_path) == (
        ["a", "b", "id"],
        [{"id": "1", "a": "x", "b": "y"}, {"id": "2", "a": "z", "b": None}],
    )


@MODES
def test_a_dropped_column_goes(tmp_path: Path, mode: str) -> None:
    sink = open_sink("delta", path=str(tmp_path), mode=mode, on_drop="drop")
    feed = Feed(sink, BEFORE)
    feed.changes(1, (INSERT, {"id": "1", "a": "x", "b": "y"}))
    feed.table = table_with(("id", 1), ("a", 2), ("b", 3), dropped=("b",))
    feed.changes(2, (INSERT, {"id": "2", "a": "z"}))
    feed.history(1, [{"id": "3", "a": "h"}], epoch=2)
    found = [{"id": "1", "a": "x"}, {"id": "2", "a": "z"}, {"id": "3", "a": "h"}]
    assert rows_of(tmp_path) == (["a", "id"], found)
    assert not feed.changes(2, (INSERT, {"id": "9"}))
    feed.table = table_with(("id", 1), ("a", 2), ("b", 4))
    feed.changes(3, (INSERT, {"id": "4", "b": "new"}))
    names, rows = rows_of(tmp_path)
    assert names == ["a", "b", "id"]
    assert [row["b"] for row in rows] == [None, None, None, "new"]
    shown = pa.Table.from_batches(list(sink.shown(BEFORE, ["id", "b"]))).to_pylist()
    assert sorted(row["id"] for row in shown) == ["1", "2", "3", "4"]


@MODES
@pytest.mark.parametrize("on_drop", ["keep", "drop"])
def test_a_renamed_column_is_copied(tmp_path: Path, mode: str, on_drop: str) -> None:
    feed = Feed(open_sink("delta", path=str(tmp_path), mode=mode, on_drop=on_drop), BEFORE)
    feed.changes(1, (INSERT, {"id": "1", "a": "x"}))
    feed.table = table_with(("id", 1), ("a2", 2), ("b", 3))
    feed.changes(2, (INSERT, {"id": "2", "a2": "y"}))
    names, rows = rows_of(tmp_path)
    assert names == (["a", "a2", "b", "id"] if on_drop == "keep" else ["a2", "b", "id"])
    copied = [None, "y"] if mode == "changes" and on_drop == "keep" else ["x", "y"]
    assert [row["a2"] for row in rows] == copied


@MODES
def test_a_renamed_column_keeps_its_name(tmp_path: Path, mode: str) -> None:
    sink = open_sink("delta", path=str(tmp_path), mode=mode, on_rename="keep")
    feed = Feed(sink, BEFORE)
    feed.changes(1, (INSERT, {"id": "1", "a": "x", "b": "y"}), (INSERT, {"id": "2", "a": "x", "b": "y"}))
    feed.table = table_with(("key", 1), ("a2", 2), ("b", 3), ("new", 4), key=("key",))
    feed.changes(
        2,
        (UPDATE, {"key": "1", "a2": None, "b": "told"}, "a2"),
        (DELETE, {"key": "2"}),
        (INSERT, {"key": "3", "a2": "z", "new": "n"}),
    )
    feed.history(1, [{"key": "4", "a2": "h"}], epoch=2)
    names, rows = rows_of(tmp_path)
    assert names == ["a", "b", "id", "new"]
    if mode == "mirror":
        assert rows == [
            {"id": "1", "a": "x", "b": "told", "new": None},
            {"id": "3", "a": "z", "b": None, "new": "n"},
            {"id": "4", "a": "h", "b": None, "new": None},
        ]
    if mode == "history":
        current = DeltaTable(tmp_path / "public.orders").to_pyarrow_table(filters=[("_is_current", "=", True)])
        told = sorted((row["id"], row["a"], row["b"]) for row in current.to_pylist())
        assert told == [("1", "x", "told"), ("3", "z", None), ("4", "h", None)]
    if mode == "changes":
        table = DeltaTable(tmp_path / "public.orders").to_pyarrow_table().to_pylist()
        assert {row["_unavailable"] for row in table} == {None, "a"}
    shown = pa.Table.from_batches(list(sink.shown(feed.table, ["key", "a2"])))
    assert shown.schema.names == ["key", "a2"]
    assert {row["key"]: row["a2"] for row in shown.to_pylist()}["3"] == "z"


def test_a_kept_name_in_a_resnapshot_and_a_column_that_is_read_again(tmp_path: Path) -> None:
    sink = open_sink("delta", path=str(tmp_path), on_rename="keep")
    feed = Feed(sink, numbers("id", "a"))
    feed.history(1, [{"id": key, "a": "x"} for key in range(4)])
    feed.table = numbers("key", "a2")
    feed.history(2, [{"key": 1, "a2": "y"}], ranges=[(1, 3)], replaces=True, order=IntegerOrder())
    feed.history(3, [{"key": 0, "a2": "z"}], columns=("a2",))
    assert rows_of(tmp_path)[1] == [{"id": 0, "a": "z"}, {"id": 1, "a": "y"}, {"id": 3, "a": "x"}]


def numbers(key: str, value: str) -> SourceTable:
    columns = (SourceColumn(key, pa.int64(), "bigint", 1), SourceColumn(value, pa.string(), "text", 2))
    return SourceTable("public", "orders", columns, (key,))


def test_another_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SinkOptionError, match="on_drop"):
        open_sink("delta", path=str(tmp_path), on_drop="remove")
    with pytest.raises(SinkOptionError, match="on_rename"):
        open_sink("delta", path=str(tmp_path), on_rename="move")


def test_a_column_by_which_rows_are_parted_cannot_go(tmp_path: Path) -> None:
    sink: Sink = open_sink("delta", path=str(tmp_path), on_drop="drop", partition_by=["b"])
    feed = Feed(sink, BEFORE)
    feed.changes(1, (INSERT, {"id": "1", "b": "y"}))
    feed.table = replace(BEFORE, columns=BEFORE.columns[:2])
    with pytest.raises(SinkSchemaError, match="partitioned by 'b', which it does not have"):
        feed.changes(2, (INSERT, {"id": "2"}))

"""What the rows of a log come to for each key."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from tests.store.sinks.file_sinks import DELETE, INSERT, OLD, ORDERS, UPDATE, log_rows, order, table_of

from headwater.sinks import fold as fold_module
from headwater.sinks.fold import DELETED, fold
from headwater.sinks.keys import KeySet


def folded(*changes: tuple[Any, ...], truncated: tuple[int, int] | None = None) -> dict[int, Any]:
    """Per key ``None`` if it is gone, else status, total and what is not known."""
    rows = fold(ORDERS, [log_rows(ORDERS, changes)], truncated).to_pylist()
    made = {
        row["id"]: None if row[DELETED] else (row["status"], row["total"] and str(row["total"]), row["_unavailable"])
        for row in rows
    }
    assert len(made) == len(rows)
    return made


def test_the_last_row_of_a_key_counts() -> None:
    found = folded(
        (INSERT, order(1)),
        (INSERT, order(2)),
        (OLD, order(1)),
        (UPDATE, order(1, "paid")),
        (DELETE, order(2)),
        (DELETE, order(3)),
        (INSERT, order(3, "again")),
        (OLD, order(4)),
    )
    assert found == {1: ("paid", "1.00", None), 2: None, 3: ("again", "1.00", None), 4: None}


def test_rows_before_a_truncation_are_void() -> None:
    changes = ((INSERT, order(1)), (INSERT, order(2)), (INSERT, order(3)))
    assert folded(*changes, truncated=(1, 2)) == {3: ("new", "1.00", None)}
    assert folded(*changes, truncated=(0, 9)) == dict.fromkeys((1, 2, 3), ("new", "1.00", None))
    assert folded(*changes, truncated=(2, 0)) == {}


def test_an_unavailable_column_comes_from_an_earlier_row_of_the_key() -> None:
    found = folded(
        (UPDATE, order(1, "told")),
        (OLD, order(1, None, None)),
        (UPDATE, order(1, None, "2.00"), "status"),
        (UPDATE, order(2, None, "3.00"), "status"),
        (UPDATE, order(3, "a", None), "total"),
        (UPDATE, order(3, None, "4.00"), "status"),
    )
    assert found == {1: ("told", "2.00", None), 2: (None, "3.00", "status"), 3: ("a", "4.00", None)}


def test_after_a_delete_there_is_nothing_to_keep() -> None:
    found = folded((UPDATE, order(1, "old")), (DELETE, order(1)), (INSERT, order(1, None), "status"))
    assert found == {1: (None, "1.00", None)}


def test_several_columns_are_unavailable() -> None:
    assert folded((UPDATE, order(1, None, None), "status,total")) == {1: (None, None, "status,total")}
    found = folded((UPDATE, order(1, None, "2.00"), "status"), (UPDATE, order(1, None, None), "status,total"))
    assert found == {1: (None, "2.00", "status")}


def test_a_name_inside_another_name_is_another_column() -> None:
    table = table_of({"id": pa.int64(), "a": pa.string(), "aa": pa.string()})
    changes = [(UPDATE, {"id": 1, "a": "1", "aa": "2"}), (UPDATE, {"id": 1, "a": "3"}, "aa")]
    [row] = fold(table, [log_rows(table, changes)]).to_pylist()
    assert (row["a"], row["aa"], row["_unavailable"]) == ("3", "2", None)


@pytest.mark.parametrize("piece", [1, 10_000])
def test_any_pieces_give_what_a_dictionary_gives(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(fold_module, "FOLD_BYTES", piece)
    chance = random.Random(7)
    expected: dict[int, Any] = {}
    batches, first = [], 0
    for _ in range(20):
        changes: list[tuple[Any, ...]] = []
        for _ in range(chance.randrange(1, 30)):
            key = chance.randrange(15)
            known = expected.get(key)
            kind = chance.choice(["insert", "delete", "keep"])
            if kind == "delete":
                changes.append((DELETE, order(key)))
                expected[key] = None
            elif kind == "keep" and known is not None:
                changes.append((UPDATE, order(key, None, "2.00"), "status"))
                expected[key] = (known[0], "2.00", known[2])
            elif kind == "keep" and key not in expected:
                changes.append((UPDATE, order(key, None, "3.00"), "status"))
                expected[key] = (None, "3.00", "status")
            else:
                changes.append((INSERT, order(key, f"s{first}")))
                expected[key] = (f"s{first}", "1.00", None)
            first += 1
        batches.append(log_rows(ORDERS, changes))
    found = fold(ORDERS, batches).to_pylist()
    assert {
        row["id"]: None if row[DELETED] else (row["status"], str(row["total"]), row["_unavailable"]) for row in found
    } == expected
    assert len(found) == len(expected)


def test_keys_of_several_columns_are_found_by_value() -> None:
    rows = pa.table(
        {"a": [1, 1, 2, None, 1], "b": ["x", "y", "x", None, "x"], "c": [0.0, 0.5, float("nan"), 1.0, -0.0]}
    )
    keys = KeySet(rows, ("a", "b", "c"))
    assert keys.ids.tolist() == [0, 1, 2, 3, 0]
    assert keys.count == 4
    nan = float("nan")
    others = pa.table({"a": [2, 2, None, 1, 3], "b": ["x", "y", None, "y", "x"], "c": [nan, 0.5, 1.0, 0.5, 0.0]})
    assert keys.find(others).tolist() == [2, -1, 3, 1, -1]

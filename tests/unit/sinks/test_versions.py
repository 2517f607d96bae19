"""Which versions of rows the rows of a log begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from tests.store.sinks.file_sinks import (
    DELETE,
    INSERT,
    OLD,
    ORDERS,
    UPDATE,
    history_part,
    log_rows,
    order,
    own_rows,
    position,
    table_of,
)

from headwater.sinks import fold
from headwater.sinks.fold import DELETED
from headwater.sinks.types import sink_schema
from headwater.sinks.versions import (
    CLOSES,
    IS_CURRENT,
    VALID_FROM,
    VALID_TO,
    history_versions,
    is_open,
    staged_schema,
    version_pieces,
    version_rows,
    versions_schema,
)

OWN = sink_schema(ORDERS)


@dataclass(frozen=True)
class Change:
    """One row of a log: its commit, and when that was."""

    commit: int
    at: int
    op: int
    values: dict[str, Any]
    unavailable: str | None = None


def batch_of(changes: Sequence[Change], epoch: int = 1, first: int = 0, table: Any = ORDERS) -> pa.RecordBatch:
    rows = log_rows(table, [(one.op, one.values, one.unavailable) for one in changes], epoch, first)
    for name, values in (
        ("_position", [position(one.commit) for one in changes]),
        ("_commit_timestamp", [one.at for one in changes]),
    ):
        place = rows.schema.get_field_index(name)
        rows = rows.set_column(place, rows.schema.field(place), pa.array(values, rows.schema.field(place).type))
    return rows


def told(rows: pa.Table) -> list[tuple[Any, ...]]:
    """Per row key, status, begin, end, and ``C`` current, ``x`` closes, ``d`` deleted; what is not known."""
    assert rows.schema == staged_schema(OWN)
    begins, ends = (rows.column(name).cast(pa.int64()).to_pylist() for name in (VALID_FROM, VALID_TO))
    marks = [
        "".join(mark for mark, name in (("C", IS_CURRENT), ("x", CLOSES), ("d", DELETED)) if row[name])
        for row in rows.to_pylist()
    ]
    keys, statuses, lacks = (rows.column(name).to_pylist() for name in ("id", "status", "_unavailable"))
    return list(zip(keys, statuses, begins, ends, marks, lacks, strict=True))


def versions(*changes: Change, truncated: tuple[int, int] | None = None) -> list[tuple[Any, ...]]:
    return told(version_rows(ORDERS, OWN, [batch_of(changes)], truncated))


def test_each_commit_of_a_key_is_a_version_that_ends_where_the_next_begins() -> None:
    found = versions(
        Change(1, 10, INSERT, order(1, "a")),
        Change(1, 10, INSERT, order(2, "b")),
        Change(2, 20, UPDATE, order(1, "c")),
        Change(3, 30, UPDATE, order(1, "d")),
    )
    assert found == [
        (1, "a", 10, 20, "x", None),
        (2, "b", 10, None, "Cx", None),
        (1, "c", 20, 30, "", None),
        (1, "d", 30, None, "C", None),
    ]


def test_several_changes_of_a_key_in_one_commit_are_one_version() -> None:
    found = versions(
        Change(1, 10, INSERT, order(1, "a")),
        Change(1, 10, UPDATE, order(1, "b")),
        Change(1, 10, INSERT, order(2, "other")),
        Change(1, 10, UPDATE, order(1, "c")),
    )
    assert found == [(2, "other", 10, None, "Cx", None), (1, "c", 10, None, "Cx", None)]


def test_a_delete_ends_a_version_and_begins_none() -> None:
    assert versions(Change(1, 10, DELETE, order(1))) == [(1, "new", 10, None, "xd", None)]
    found = versions(Change(1, 10, INSERT, order(1, "a")), Change(2, 20, DELETE, order(1)))
    assert found == [(1, "a", 10, 20, "x", None)]
    found = versions(Change(1, 10, DELETE, order(1)), Change(2, 20, DELETE, order(1)), Change(3, 30, DELETE, order(1)))
    assert found == [(1, "new", 10, None, "xd", None)]


def test_delete_and_insert_of_a_key_in_one_commit_are_one_version() -> None:
    found = versions(Change(5, 50, DELETE, order(1, "old")), Change(5, 50, INSERT, order(1, "again")))
    assert found == [(1, "again", 50, None, "Cx", None)]
    found = versions(
        Change(5, 50, INSERT, order(1)), Change(5, 50, DELETE, order(1)), Change(5, 50, INSERT, order(1, "x"))
    )
    assert found == [(1, "x", 50, None, "Cx", None)]


def test_an_insert_that_its_own_commit_deletes_is_no_version() -> None:
    found = versions(Change(5, 50, INSERT, order(1)), Change(5, 50, DELETE, order(1)))
    assert found == [(1, "new", 50, None, "xd", None)]
    found = versions(
        Change(4, 40, INSERT, order(1, "a")), Change(5, 50, INSERT, order(1)), Change(5, 50, DELETE, order(1))
    )
    assert found == [(1, "a", 40, 50, "x", None)]


def test_delete_and_insert_in_two_commits_leave_a_gap() -> None:
    found = versions(
        Change(1, 10, INSERT, order(1, "a")), Change(2, 20, DELETE, order(1)), Change(3, 30, INSERT, order(1, "b"))
    )
    assert found == [(1, "a", 10, 20, "x", None), (1, "b", 30, None, "C", None)]
    found = versions(Change(2, 20, DELETE, order(1)), Change(3, 30, INSERT, order(1, "b")))
    assert found == [(1, "new", 20, None, "xd", None), (1, "b", 30, None, "C", None)]


def test_the_old_half_of_an_update_is_no_version() -> None:
    found = versions(
        Change(1, 10, OLD, order(1, "a")),
        Change(1, 10, UPDATE, order(1, "b")),
        Change(2, 20, OLD, order(1, "b")),
        Change(2, 20, UPDATE, order(1, "c")),
    )
    assert found == [(1, "b", 10, 20, "x", None), (1, "c", 20, None, "C", None)]


def test_an_old_half_whose_new_half_has_another_key_ends_its_version() -> None:
    found = versions(Change(1, 10, OLD, order(1, "a")), Change(1, 10, UPDATE, order(2, "a")))
    assert found == [(1, "a", 10, None, "xd", None), (2, "a", 10, None, "Cx", None)]


def test_two_commits_at_one_time_are_two_versions_in_the_order_of_the_log() -> None:
    found = versions(Change(1, 10, UPDATE, order(1, "a")), Change(2, 10, UPDATE, order(1, "b")))
    assert found == [(1, "a", 10, 10, "x", None), (1, "b", 10, None, "C", None)]


def test_a_version_never_begins_before_the_one_that_it_follows() -> None:
    found = versions(
        Change(1, 30, UPDATE, order(1, "a")),
        Change(2, 20, UPDATE, order(2, "other")),
        Change(3, 25, UPDATE, order(1, "b")),
        Change(4, 40, UPDATE, order(1, "c")),
    )
    assert found == [
        (1, "a", 30, 30, "x", None),
        (2, "other", 20, None, "Cx", None),
        (1, "b", 30, 40, "", None),
        (1, "c", 40, None, "C", None),
    ]


def test_an_unavailable_value_comes_from_the_version_before() -> None:
    found = versions(
        Change(1, 10, UPDATE, order(1, "told")),
        Change(2, 20, OLD, order(1, None)),
        Change(2, 20, UPDATE, order(1, None), "status"),
        Change(3, 30, UPDATE, order(2, None), "status"),
        Change(4, 40, UPDATE, order(2, None), "status"),
        Change(5, 50, UPDATE, order(2, "now")),
        Change(6, 60, UPDATE, order(2, None), "status"),
    )
    assert found == [
        (1, "told", 10, 20, "x", None),
        (1, "told", 20, None, "C", None),
        (2, None, 30, 40, "x", "status"),
        (2, None, 40, 50, "", "status"),
        (2, "now", 50, 60, "", None),
        (2, "now", 60, None, "C", None),
    ]


def test_after_a_delete_no_value_comes_from_before() -> None:
    found = versions(
        Change(1, 10, UPDATE, order(1, "old")),
        Change(2, 20, DELETE, order(1)),
        Change(3, 30, INSERT, order(1, None), "status"),
        Change(4, 40, UPDATE, order(1, None), "status"),
        Change(5, 50, DELETE, order(2)),
        Change(5, 50, INSERT, order(2, None), "status"),
    )
    assert found == [
        (1, "old", 10, 20, "x", None),
        (1, None, 30, 40, "", None),
        (1, None, 40, None, "C", None),
        (2, None, 50, None, "Cx", None),
    ]


def test_a_value_told_by_a_change_that_is_no_version_counts() -> None:
    found = versions(Change(1, 10, UPDATE, order(1, "a")), Change(1, 10, UPDATE, order(1, None), "status"))
    assert found == [(1, "a", 10, None, "Cx", None)]


def test_rows_before_a_truncation_are_void() -> None:
    changes = [Change(1, 10, INSERT, order(1)), Change(2, 20, INSERT, order(2)), Change(3, 30, INSERT, order(3))]
    assert versions(*changes, truncated=(1, 2)) == [(3, "new", 30, None, "Cx", None)]
    assert versions(*changes, truncated=(2, 0)) == []
    assert versions() == []


def test_keys_of_several_columns_are_told_apart() -> None:
    table = table_of({"a": pa.string(), "b": pa.int32(), "v": pa.int64()}, key=("b", "a"))
    changes = [
        Change(place, place * 10, UPDATE, {"a": a, "b": b, "v": place})
        for place, (a, b) in enumerate([("x", 1), ("x", 2), ("y", 1), ("x", 1), ("y", 1)], 1)
    ]
    rows = version_rows(table, sink_schema(table), [batch_of(changes, table=table)]).to_pylist()
    assert [(row["v"], row[CLOSES], row[IS_CURRENT]) for row in rows] == [
        (1, True, False),
        (2, True, True),
        (3, True, False),
        (4, False, True),
        (5, False, True),
    ]


def test_open_versions_are_told() -> None:
    rows = version_rows(
        ORDERS,
        OWN,
        [batch_of([Change(1, 10, DELETE, order(1)), Change(1, 10, INSERT, order(2)), Change(2, 20, UPDATE, order(2))])],
    )
    assert is_open(rows).to_pylist() == [False, False, True]


def test_rows_of_history_are_current() -> None:
    rows = history_versions(own_rows(ORDERS, [order(1), order(2)]), OWN, history_part())
    assert rows.schema == versions_schema(OWN)
    assert [(row["id"], row[IS_CURRENT], row[VALID_TO], row["_commit_version"]) for row in rows.to_pylist()] == [
        (1, True, None, 7),
        (2, True, None, 7),
    ]
    assert rows.column(VALID_FROM).cast(pa.int64()).to_pylist() == [1_000_000] * 2


def test_a_piece_ends_with_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "FOLD_BYTES", 1)
    batches = [
        batch_of([Change(1, 10, UPDATE, order(1, "a"))], 1),
        batch_of([Change(2, 20, UPDATE, order(1, "b"))], 2),
        batch_of([Change(2, 20, UPDATE, order(1, "c"))], 2, 1),
        batch_of([Change(3, 30, DELETE, order(1))], 3),
    ]
    assert [told(piece) for piece in version_pieces(ORDERS, OWN, batches)] == [
        [(1, "a", 10, None, "Cx", None)],
        [(1, "c", 20, None, "Cx", None)],
        [(1, "new", 30, None, "xd", None)],
    ]
    assert list(version_pieces(ORDERS, OWN, batches, (9, 0))) == []

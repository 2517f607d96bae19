"""Rows that were read later are brought back to their place with the first change of each key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from headwater.backfill.cdc.rewind import Rewind
from headwater.backfill.errors import OldRowsMissing
from headwater.sources.mysql.gtid import MariaDbGtids
from headwater.sources.mysql.offset import POSITION_TYPE, MySqlMark, MySqlOffset, positions_of
from headwater.sources.snapshots import mark_from_json
from headwater.sources.splits import Cut, KeyRange
from headwater.sources.table import SourceColumn, SourceTable
from headwater.stream import Op

TABLE = SourceTable(
    "shop",
    "t",
    (SourceColumn("id", pa.int64(), "bigint", 1), SourceColumn("v", pa.string(), "varchar(9)", 2)),
    ("id",),
)
MARK = MySqlMark(MySqlOffset("", 0, MariaDbGtids.parse("0-1-10")))
EVERYWHERE = KeyRange()

Change = tuple[int, Op, int, str | None]
"""The number of the transaction, what, which key, which value."""


class ById:
    """Keys in their order."""

    def places(self, keys: pa.RecordBatch, cuts: Sequence[Cut]) -> NDArray[np.int64]:
        bounds = [int(cut.values[0]) for cut in cuts]
        found: NDArray[np.int64] = np.searchsorted(bounds, keys.column(0).to_numpy(), side="right").astype(np.int64)
        return found


def log(*changes: Change, unavailable: str | None = None) -> pa.RecordBatch:
    before = [MySqlOffset("", 0, MariaDbGtids.parse(f"0-1-{number - 1}")).place for number, *_ in changes]
    rows = np.arange(len(changes), dtype=np.uint32)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([change[2] for change in changes], pa.int64()),
            pa.array([change[3] for change in changes], pa.string()),
            positions_of(np.array(before, np.uint64), rows).cast(POSITION_TYPE),
            pa.array([unavailable] * len(changes), pa.string()),
            pa.array([change[1] for change in changes], pa.int8()),
            pa.array([change[0] for change in changes], pa.uint64()),
            pa.array(rows, pa.uint32()),
        ],
        ["id", "v", "_position", "_unavailable", "_op", "_epoch", "_seq"],
    )


def rows(**values: str) -> pa.RecordBatch:
    made: list[dict[str, Any]] = [{"id": int(name[1:]), "v": value} for name, value in values.items()]
    return pa.RecordBatch.from_pylist(made, schema=TABLE.schema)


def rewound(read: pa.RecordBatch, *logs: pa.RecordBatch, part: KeyRange = EVERYWHERE) -> dict[int, str]:
    rewind = Rewind(TABLE, MARK, logs)
    both = [row for batch in (rewind.unchanged(read), *rewind.old_rows(part, ById)) for row in batch.to_pylist()]
    assert len({row["id"] for row in both}) == len(both)
    return {row["id"]: row["v"] for row in both}


def test_without_a_change_rows_stay() -> None:
    assert rewound(rows(k1="a", k2="b")) == {1: "a", 2: "b"}


def test_changes_before_the_place_are_in_the_rows() -> None:
    assert rewound(rows(k1="b"), log((10, Op.UPDATE_DELETE, 1, "a"), (10, Op.UPDATE_INSERT, 1, "b"))) == {1: "b"}


def test_the_first_change_tells_what_a_row_was_whether_it_was_seen_or_not() -> None:
    later = log(
        (11, Op.UPDATE_DELETE, 1, "a"),
        (11, Op.UPDATE_INSERT, 1, "b"),
        (12, Op.DELETE, 1, "b"),
        (12, Op.INSERT, 2, "new"),
        (13, Op.DELETE, 3, "gone"),
        (14, Op.INSERT, 3, "again"),
    )
    expected = {1: "a", 3: "gone", 4: "same"}
    assert rewound(rows(k2="new", k3="again", k4="same"), later) == expected
    assert rewound(rows(k1="b", k4="same"), later) == expected
    assert rewound(rows(k1="a", k3="gone", k4="same"), later) == expected


def test_the_order_of_batches_makes_no_difference() -> None:
    first, second = log((11, Op.DELETE, 1, "a")), log((12, Op.INSERT, 1, "b"))
    assert rewound(rows(k1="b"), second, first) == rewound(rows(k1="b"), first, second) == {1: "a"}


def test_changes_with_more_text_than_one_column_holds_are_all_undone() -> None:
    text = pa.py_buffer(bytes(1_200_000_000))  # of two, no column can hold one after the other

    def with_text(batch: pa.RecordBatch, *ends: int) -> pa.RecordBatch:
        values = pa.StringArray.from_buffers(len(ends) - 1, pa.py_buffer(np.array(ends, np.int32)), text)
        return batch.set_column(1, "v", values)

    size = text.size
    first = with_text(log((11, Op.INSERT, 1, "")), 0, size)
    second = with_text(log((12, Op.UPDATE_DELETE, 1, ""), (12, Op.DELETE, 2, "")), 0, size - 3, size)
    rewind = Rewind(TABLE, MARK, [first, second])
    assert rewind.unchanged(rows(k1="b", k2="again", k3="same")).to_pylist() == [{"id": 3, "v": "same"}]
    assert [batch.to_pylist() for batch in rewind.old_rows(EVERYWHERE, ById)] == [[{"id": 2, "v": "\0\0\0"}]]


def test_old_rows_of_other_ranges_are_left_to_others() -> None:
    part = KeyRange(Cut(("2",)), Cut(("4",)))
    gone = log(*((11, Op.DELETE, number, f"v{number}") for number in range(1, 6)))
    assert rewound(rows(), gone, part=part) == {2: "v2", 3: "v3"}


@pytest.mark.parametrize(
    "batch",
    [log((11, Op.UPDATE_INSERT, 1, "b")), log((11, Op.DELETE, 1, None), unavailable="v")],
    ids=["no old version", "half of one"],
)
def test_a_log_without_old_versions_is_refused_with_the_statement_that_helps(batch: pa.RecordBatch) -> None:
    with pytest.raises(OldRowsMissing, match="binlog_row_image = FULL"):
        Rewind(TABLE, MARK, [batch])


def test_a_mark_is_the_same_after_its_json() -> None:
    assert mark_from_json(MARK.to_json()) == MARK
    assert MARK.low == MARK.high == MARK.at

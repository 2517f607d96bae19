"""Rows of a capture instance: updates as pairs, numbers within a commit, and columns that are missing."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headwater.sources.evolution import Projection
from headwater.sources.sqlserver.changes import Interval, changes_of, ops_of, statement_of
from headwater.sources.sqlserver.followed import Stretch
from headwater.sources.sqlserver.instances import CaptureInstance
from headwater.sources.sqlserver.offset import Lsn
from headwater.sources.sqlserver.server import Commit
from headwater.sources.sqlserver.types import SqlType, Ticks, source_column
from headwater.sources.table import SourceTable
from headwater.stream import Op

ONE, TWO = (Lsn.parse(f"00000027:0000075{n}:0005") for n in (1, 2))
TABLE = SourceTable(
    "shop", "orders", (source_column("id", SqlType("int"), 1), source_column("n", SqlType("int"), 2)), ("id",), 7
)
INSTANCE = CaptureInstance("shop_orders", 7, Lsn(1), (), "shop_orders_CT")
STRETCH = Stretch(INSTANCE, ONE, TWO, TABLE.columns, Projection(TABLE, (0, 1)))


def of(lsn: Lsn) -> bytes:
    return int(lsn).to_bytes(10, "big")


def told(*rows: tuple[object, ...]) -> list[pa.Array]:
    """Rows as columns."""
    return [pa.array(column) for column in zip(*rows, strict=True)]


def ops(*rows: tuple[Lsn, int, int, int]) -> list[str]:
    """:param rows: commit, change, operation, key."""
    starts, changes, operations, keys = zip(*rows, strict=True)
    made = ops_of(
        np.array(operations, np.int8),
        pa.array([of(start) for start in starts]),
        pa.array([of(Lsn(change)) for change in changes]),
        [pa.array(keys)],
    )
    return [Op(op).name for op in made]


def test_the_halves_of_an_update_are_a_pair() -> None:
    assert ops((ONE, 1, 3, 5), (ONE, 1, 4, 5), (ONE, 2, 2, 6), (ONE, 3, 1, 6)) == [
        "UPDATE_DELETE",
        "UPDATE_INSERT",
        "INSERT",
        "DELETE",
    ]


def test_an_update_of_the_key_is_a_delete_and_an_insert() -> None:
    assert ops((ONE, 1, 3, 5), (ONE, 1, 4, 6)) == ["DELETE", "INSERT"]


def test_halves_that_do_not_stand_together_are_deletes_and_inserts() -> None:
    # rows of one statement may share the number of their change: all old ones come first then
    assert ops((ONE, 1, 3, 5), (ONE, 1, 3, 6), (ONE, 1, 4, 5), (ONE, 1, 4, 6)) == [
        "DELETE",
        "DELETE",
        "INSERT",
        "INSERT",
    ]
    assert ops((ONE, 1, 3, 5), (TWO, 1, 4, 5)) == ["DELETE", "INSERT"]
    assert ops((ONE, 1, 4, 5)) == ["INSERT"]


def test_numbers_within_a_commit_go_on_over_blocks_and_tables() -> None:
    interval = Interval([Commit(ONE, 10), Commit(TWO, 20)])
    first = changes_of(STRETCH, told((of(ONE), of(ONE), 2, 1, 1), (of(TWO), of(ONE), 2, 2, 1)), interval, Ticks.REFUSE)
    second = changes_of(STRETCH, told((of(TWO), of(TWO), 1, 2, 1), (of(TWO), of(TWO), 2, 3, 1)), interval, Ticks.REFUSE)
    positions = [row for part in (first, second) for row in part.rows["_position"].to_pylist()]
    assert positions == sorted(set(positions))
    assert [int.from_bytes(one[8:12], "big") for one in positions] == [0, 0, 1, 2]
    assert first.rows["_commit_timestamp"].cast(pa.int64()).to_pylist() == [10, 20]


def test_a_column_that_the_instance_lacks_is_null_and_named() -> None:
    grown = SourceTable("shop", "orders", (*TABLE.columns, source_column("rate", SqlType("int"), 3)), ("id",), 7)
    stretch = Stretch(INSTANCE, ONE, TWO, TABLE.columns, Projection(grown, (0, 1, None)), ("rate",))
    made = changes_of(stretch, told((of(ONE), of(ONE), 2, 1, 1)), Interval([Commit(ONE, 0)]), Ticks.REFUSE)
    assert made.rows.to_pylist()[0]["rate"] is None
    assert made.rows.to_pylist()[0]["_unavailable"] == "rate"


def test_the_statement_asks_for_both_halves_in_the_order_of_the_changes() -> None:
    assert statement_of(STRETCH) == (
        "SELECT [__$start_lsn], [__$seqval], [__$operation], [id] AS [c0], [n] AS [c1] FROM"
        " cdc.[shop_orders_CT] WHERE [__$start_lsn] BETWEEN 0x00000027000007510005 AND 0x00000027000007520005"
        " ORDER BY [__$start_lsn], [__$command_id], [__$seqval], [__$operation]"
    )

"""Rows that a sink refuses are kept, whatever happens to the batch that they are left out of."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from headwater.sinks import dead_letters
from headwater.sinks.dead_letters import DeadLetters, RowFilter
from headwater.sinks.sink import Token
from headwater.sources.table import SourceTable

from .file_sinks import DELETE, INSERT, OLD, ORDERS, UPDATE, history_part, log_rows, order, own_rows


class Picky:
    """It refuses rows by their key."""

    def __init__(self, *keys: int) -> None:
        self.keys = keys

    def refused(self, table: SourceTable, rows: pa.Table) -> list[tuple[int, str]]:
        return [(place, "a check") for place, key in enumerate(rows.column("id").to_pylist()) if key in self.keys]


def test_a_batch_that_comes_again_may_leave_out_more_rows(tmp_path: Path) -> None:
    letters = DeadLetters(str(tmp_path))
    for generation, keys in ((1, (2,)), (2, (2, 3))):
        token = Token("q", "b1", 0, 1, 0, generation=generation)
        row_filter = RowFilter(Picky(*keys), ORDERS)
        rows = iter([log_rows(ORDERS, [(INSERT, order(key)) for key in (1, 2, 3)])])
        assert sum(part.num_rows for part in row_filter.through(rows)) == 3 - len(keys)
        letters.commit([letters.stage_changes(ORDERS, token, row_filter.refused)])
    assert sorted(letters.rows("public.orders").column("id").to_pylist()) == [2, 3]
    assert letters.counts() == {"public.orders": 2}


def test_history_that_is_read_in_another_snapshot_may_leave_out_rows_too(tmp_path: Path) -> None:
    letters, part = DeadLetters(str(tmp_path)), history_part()
    for generation in (1, 2):
        token = Token("q", "b1", 0, 1, 1, attempt=generation - 1, generation=generation)
        row_filter = RowFilter(Picky(2), ORDERS)
        list(row_filter.through(iter([own_rows(ORDERS, [order(1), order(2)])])))
        letters.commit([letters.stage_history(ORDERS, token, part, row_filter.refused)])
    assert letters.rows("public.orders").column("id").to_pylist() == [2]


def test_of_rows_that_are_read_for_one_column_the_others_are_unknown(tmp_path: Path) -> None:
    letters, part = DeadLetters(str(tmp_path)), history_part(columns=("status",))
    row_filter = RowFilter(Picky(2), ORDERS)
    rows = own_rows(ORDERS, [order(1), order(2)]).select(["id", "status"])
    assert [part.column("id").to_pylist() for part in row_filter.through(iter([rows]))] == [[1]]
    letters.commit([letters.stage_history(ORDERS, Token("q", "b1", 0, 1, 1), part, row_filter.refused)])
    (found,) = letters.rows("public.orders").to_pylist()
    assert (found["id"], found["total"], found["_reason"]) == (2, None, "a check")


def test_an_update_that_is_refused_goes_with_its_old_row_also_over_the_end_of_a_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dead_letters, "_PIECE_ROWS", 3)
    changes = [
        (INSERT, order(1)),
        (DELETE, order(2)),
        (OLD, order(4)),
        (UPDATE, order(4, "refused")),
        (OLD, order(5)),
        (UPDATE, order(5, "taken")),
        (UPDATE, order(6, "refused alone")),
    ]
    row_filter = RowFilter(Picky(2, 4, 6), ORDERS)
    taken = [row for batch in row_filter.through(iter([log_rows(ORDERS, changes)])) for row in batch.to_pylist()]
    assert [(row["_op"], row["id"]) for row in taken] == [(INSERT, 1), (DELETE, 2), (OLD, 5), (UPDATE, 5)]
    assert [row["id"] for batch in row_filter.refused for row in batch.to_pylist()] == [4, 6]

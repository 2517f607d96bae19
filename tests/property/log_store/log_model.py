"""What a log should hold: a list of rows per vnode, some of which a compaction has left out. Plain Python."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import pyarrow as pa
from tests.logs import SCHEMA, epoch

from headwater.log_store import LogView
from headwater.stream import Epoch, Op, VnodeBitmap

VNODES = 8
FULL = VnodeBitmap.full(VNODES)
ALWAYS = 1 << 60

Ranges: TypeAlias = list[tuple[int, int]]


class Row(NamedTuple):
    """A change. Names are never used twice, and rise within a log."""

    epoch: int
    name: str
    key: int
    op: int


def schema_of(width: int) -> pa.Schema:
    """The columns after so many schema changes."""
    return pa.schema([*SCHEMA, *(pa.field(f"more{place}", pa.int64()) for place in range(width))])


def rows_in(batches: Iterable[pa.RecordBatch], wanted: Iterable[int] = range(VNODES)) -> dict[int, list[Row]]:
    """What range reads gave, per vnode in their order."""
    found: dict[int, list[Row]] = {vnode: [] for vnode in wanted}
    for batch in batches:
        columns = (batch.column(name).to_pylist() for name in ("_vnode", "_epoch", "name", "id", "_op"))
        for vnode, number, name, key, op in zip(*columns, strict=True):
            found[vnode].append(Row(Epoch(number).ms, name, key, op))
    return found


def shown_rows(shown: LogView, upto: int) -> dict[int, list[Row]]:
    """Everything that a view of the log holds."""
    return rows_in(shown.read_range(shown.bounds().gone, epoch(upto)))


def inside(number: int, ranges: Ranges) -> bool:
    return any(low < number <= high for low, high in ranges)


def final_state(rows: Iterable[Row]) -> dict[int, str]:
    """The table after these changes."""
    state: dict[int, str] = {}
    for row in rows:
        if Op(row.op).adds:
            state[row.key] = row.name
        else:
            state.pop(row.key, None)
    return state


class Model:
    """All rows that were written and not lost."""

    def __init__(self) -> None:
        self.log: dict[int, list[Row]] = {vnode: [] for vnode in range(VNODES)}
        self.left_out: set[str] = set()

    def add(self, vnode: int, row: Row) -> None:
        self.log[vnode].append(row)

    def end(self, vnode: int, upto: int) -> int:
        """How many rows there are up to the end of an epoch, with those that were left out."""
        return bisect_right(self.log[vnode], upto, key=lambda row: row.epoch)

    def skip(self, vnode: int, place: int) -> int:
        """The place of the first row from *place* on that is still there."""
        rows = self.log[vnode]
        while place < len(rows) and rows[place].name in self.left_out:
            place += 1
        return place

    def rows(self, vnode: int, first: int, upto: int) -> list[Row]:
        """The rows from number *first* on that are there, up to the end of epoch *upto*."""
        return [row for row in self.log[vnode][first : self.end(vnode, upto)] if row.name not in self.left_out]

    def forget_after(self, number: int) -> None:
        """A crash: epochs after *number* were never sealed."""
        for vnode, rows in self.log.items():
            self.log[vnode] = rows[: self.end(vnode, number)]

    def compacted(self, shown: LogView, upto: int, left_alone: Sequence[Ranges]) -> None:
        """Take over what compactions left, when it is right.

        :param left_alone: for each of them the epochs that it had no right to touch.
        """
        gone = shown.bounds().gone.ms
        found = shown_rows(shown, upto)
        for vnode, left in found.items():
            first = self.end(vnode, gone)
            before = self.rows(vnode, first, upto)
            after = {row.name: row for row in left}
            assert [row.name for row in left] == [row.name for row in before if row.name in after], "order"
            newest = {row.key: row for row in left}  # the last one of a key wins
            for row in before:
                if row.name not in after:
                    assert any(not inside(row.epoch, ranges) for ranges in left_alone), "an epoch to be left alone"
                    assert newest[row.key].name > row.name, "the last word on a key is kept"
                    self.left_out.add(row.name)
                else:
                    new = after[row.name]
                    assert new == row or new == row._replace(op=_ALONE[row.op])
            _check_pairs(left)
            for start in range(gone, upto + 1):  # whoever is at its end ends with the same table
                held = [row for row in before if row.epoch <= start]
                rest = [row for row in left if row.epoch > start]
                assert final_state([*held, *rest]) == final_state(before)
            self.log[vnode] = [after.get(row.name, row) for row in self.log[vnode]]

    def fully_compacted(self, shown: LogView, upto: int, left_alone: Ranges) -> None:
        """Each key has one row in each run of epochs that may be compacted."""
        seen: set[int] = set()
        schema = 0
        for end in shown.epochs(shown.bounds().gone, epoch(upto)):
            number = end.epoch.ms
            if inside(number, left_alone) or end.schema_version != schema:
                seen = set()
            schema = end.schema_version
            if not inside(number, left_alone):
                there = (row for rows in self.log.values() for row in rows if row.name not in self.left_out)
                here = [row.key for row in there if row.epoch == number]
                assert len(set(here)) == len(here)
                assert seen.isdisjoint(here)
                seen.update(here)


_ALONE = {
    int(Op.INSERT): int(Op.INSERT),
    int(Op.DELETE): int(Op.DELETE),
    int(Op.UPDATE_INSERT): int(Op.INSERT),
    int(Op.UPDATE_DELETE): int(Op.DELETE),
}


def _check_pairs(rows: list[Row]) -> None:
    """Halves of a pair are neighbours of one key and epoch."""
    before: Row | None = None
    for row in rows:
        opened = before is not None and before.op == Op.UPDATE_DELETE
        assert opened == (row.op == Op.UPDATE_INSERT)
        if opened and before is not None:
            assert (before.key, before.epoch) == (row.key, row.epoch)
        before = row
    assert before is None or before.op != Op.UPDATE_DELETE

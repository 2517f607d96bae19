"""The check of a table while both sides move, step by step: a source and a mirror whose every read is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.pipeline.verify.check import Findings, Options, check_table
from headwater.sources.offset import CdcOffset
from headwater.sources.postgres.offset import PostgresOffset
from headwater.sources.splits import Cut, KeyRange, Split, SplitKind, SplitPlan
from headwater.sources.table import SourceColumn, SourceTable

TABLE = SourceTable(
    "public",
    "t",
    (SourceColumn("id", pa.int64(), "bigint", 1), SourceColumn("v", pa.string(), "text", 2)),
    ("id",),
)
SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
Rows = dict[int, str]


@dataclass
class Mark:
    high: CdcOffset


@dataclass
class Shown:
    """A snapshot: the rows of its moment."""

    rows: Rows
    mark: Mark
    name: str

    def table(self, table: SourceTable) -> SourceTable:
        return table

    def plan(self, _table: SourceTable, *, split_rows: int, kind: SplitKind | None = None) -> SplitPlan:
        assert kind is SplitKind.KEY
        cuts = [None, *(Cut((str(key),)) for key in sorted(self.rows)[::split_rows]), None]
        ranges = [KeyRange(start, end) for start, end in pairwise(cuts)]
        splits = tuple(Split(number, part, split_rows) for number, part in enumerate(ranges))
        return SplitPlan(kind, splits, len(self.rows), 0, "told")

    def close(self) -> None:
        self.name = "closed"


class Order:
    def places(self, keys: pa.RecordBatch, cuts: Sequence[Cut]) -> NDArray[np.int64]:
        found = keys.column("id").to_numpy()
        places: NDArray[np.int64] = np.searchsorted([int(cut.values[0]) for cut in cuts], found, side="right")
        return places


@dataclass
class World:
    """A source that a mirror follows; *between* runs before every read of the mirror that is waited for."""

    source: Rows
    mirror: list[tuple[int, str]]
    between: Callable[[World, int], None] = lambda _world, _round: None
    delivers: bool = True
    rounds: int = 0
    reads: int = 0
    snapshots: dict[str, Rows] = field(default_factory=dict)

    def export(self) -> Any:
        name = f"s{len(self.snapshots)}"
        self.snapshots[name] = dict(self.source)
        return Shown(self.snapshots[name], Mark(PostgresOffset.at(len(self.snapshots))), name)

    def order(self, _table: SourceTable) -> Any:
        return Order()

    def key_range(self, _table: SourceTable, part: KeyRange) -> KeyRange:
        return part

    def read(
        self,
        _table: SourceTable,
        _kind: SplitKind,
        part: KeyRange,
        snapshot: str | None,
        *,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        self.reads += 1
        rows = self.source if snapshot is None else self.snapshots[snapshot]
        low = int(part.start.values[0]) if part.start else -(1 << 60)
        high = int(part.end.values[0]) if part.end else 1 << 60
        yield _batch([(key, value) for key, value in rows.items() if low <= key < high], columns)

    def delivered(self, _position: CdcOffset, _seconds: float) -> bool:
        self.rounds += 1
        self.between(self, self.rounds)
        return self.delivers

    def check(self, **options: Any) -> Findings:
        return check_table(self, TABLE, _Mirror(self), self.delivered, Options(split_rows=10, **options))


@dataclass
class _Mirror:
    world: World

    def sent(self, _table: SourceTable, rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows

    def received(self, _table: SourceTable, rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows

    def read(self, _table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        yield _batch(self.world.mirror, columns)


def _batch(rows: Sequence[tuple[int, str]], columns: Sequence[str] | None) -> pa.RecordBatch:
    made = pa.RecordBatch.from_pylist([{"id": key, "v": value} for key, value in rows], schema=SCHEMA)
    return made if columns is None else made.select(list(columns))


def rows(count: int = 50) -> Rows:
    return {key: f"value {key}" for key in range(count)}


def test_equal_sides_need_no_second_look() -> None:
    world = World(rows(), list(rows().items()))
    found = world.check()
    assert found.is_right
    assert (found.source_rows, found.mirror_rows, found.rounds, world.rounds) == (50, 50, 0, 0)


def test_each_kind_of_difference_is_counted_once_and_told_with_its_key_and_range() -> None:
    mirror = [(key, value) for key, value in rows().items() if key != 17]
    mirror[3] = (3, "other")
    mirror += [(44, rows()[44]), (1000, "extra")]
    found = World(rows(), mirror).check(keys=10)
    assert (found.mismatches, found.missing, found.extra, found.doubled) == (1, 1, 1, 1)
    assert not found.is_right
    assert found.unsettled == 0
    assert sorted(key["id"] for key in found.keys) == [3, 17, 44, 1000]
    starts = [part.start.values[0] if part.start else None for part in found.ranges]
    assert starts == ["0", "40"]  # neighbours are one: 0-20 holds 3 and 17


def test_only_the_splits_of_what_differs_are_read_again() -> None:
    mirror = list(rows(500).items())
    mirror[3] = (3, "other")
    world = World(rows(500), mirror)
    assert world.check().mismatches == 1
    assert world.reads == 51 + 3  # every split, and one of them three times


def test_what_is_on_its_way_is_no_difference() -> None:
    source = rows() | {7: "new", 60: "inserted"}
    del source[9]

    def deliver(world: World, _round: int) -> None:
        world.mirror = list(world.source.items())

    found = World(source, list(rows().items()), deliver).check()
    assert found.is_right
    assert found.rounds == 1


def test_a_key_that_never_rests_is_unsettled_and_no_difference() -> None:
    def move(world: World, number: int) -> None:
        world.mirror = list(world.source.items())
        world.source = world.source | {7: f"again {number}"}
        world.mirror[7] = (7, f"before {number}")

    found = World(rows() | {7: "hot"}, list(rows().items()), move).check(rounds=5)
    assert found.differences == 0
    assert (found.unsettled, found.rounds) == (1, 5)
    assert found.is_right


def test_a_difference_is_found_beside_keys_that_move() -> None:
    def move(world: World, number: int) -> None:
        world.mirror = [(key, "wrong" if key == 5 else value) for key, value in world.source.items()]
        world.source = world.source | {7: f"again {number}"}
        world.mirror[7] = (7, f"before {number}")

    found = World(rows() | {7: "hot"}, [(key, f"old {key}") for key in rows()], move).check(rounds=6)
    assert (found.mismatches, found.unsettled) == (1, 1)


def test_a_mirror_that_does_not_come_up_is_behind_and_not_wrong() -> None:
    found = World(rows() | {7: "new"}, list(rows().items()), delivers=False).check()
    assert found.differences == 0
    assert found.is_behind
    assert not found.is_right
    assert found.unsettled == 1


def test_an_empty_mirror_misses_everything() -> None:
    found = World(rows(), []).check()
    assert (found.missing, found.mirror_rows) == (50, 0)
    assert found.ranges == (KeyRange(Cut(("0",)), None),)

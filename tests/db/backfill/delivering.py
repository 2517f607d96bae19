"""A query under test without Spark: its batches are planned, read and committed to a mirror in memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from tests.db.capture.running import RunningCapture

from headwater.backfill.loop import next_batch, units_of
from headwater.backfill.offset import QueryOffset
from headwater.backfill.planner import QueryPlanner
from headwater.backfill.query import QueryOptions
from headwater.backfill.reader import read_changes, read_history
from headwater.backfill.store_logs import StoreLogs
from headwater.backfill.units import LogUnit, SnapshotUnit, SplitUnit, Unit, UpstreamUnit
from headwater.sinks.sink import Committed
from headwater.sources.open import open_source
from headwater.sources.snapshots import open_snapshots
from headwater.sources.splits import KeyRange
from headwater.sources.table import SourceTable
from headwater.stream import Op

Key = tuple[Any, ...]


@dataclass
class MemorySink:
    """Keeps what a sink would: a mirror of each table, every change that it got, and its tokens."""

    mirror: dict[str, dict[Key, dict[str, Any]]] = field(default_factory=dict)
    changes: dict[str, Counter[tuple[bytes, Key, int]]] = field(default_factory=dict)
    history: dict[str, Counter[Key]] = field(default_factory=dict)
    tokens: dict[str, Committed] = field(default_factory=dict)
    tables: dict[str, SourceTable] = field(default_factory=dict)
    source: str = ""

    def committed(self, table: SourceTable, backfill: str) -> Committed:
        return self.tokens.get(table.full_name, Committed())

    def commit(self, units: list[tuple[Unit, list[pa.RecordBatch]]], end: QueryOffset) -> None:
        for unit, batches in units:
            self._rename(unit.table)
            if isinstance(unit, LogUnit):
                self._take_changes(unit, batches)
        for unit, batches in units:
            if isinstance(unit, SplitUnit):
                self._take_history(unit, batches)
            elif isinstance(unit, SnapshotUnit):
                self._take_kept(unit, batches)
        for unit, _ in units:
            known = self.tokens.get(unit.table.full_name, Committed())
            if isinstance(unit, LogUnit):
                made = Committed(end.epoch, known.plan, known.attempt)
            else:
                assert not isinstance(unit, UpstreamUnit)
                made = Committed(known.epoch, end.plan, unit.attempt)
            self.tokens[unit.table.full_name] = made

    def _rename(self, table: SourceTable) -> None:
        """As a table does it: values stay in their columns, whatever those are called by now."""
        known = self.tables.get(table.full_name)
        self.tables[table.full_name] = table
        if known is None or known.source_id != table.source_id or known.columns == table.columns:
            return
        old = {column.field_id: column.name for column in known.columns}
        names = {column.name: old.get(column.field_id) for column in table.columns}
        mirror = self.mirror.get(table.full_name, {})
        for key, row in mirror.items():
            mirror[key] = {name: None if before is None else row.get(before) for name, before in names.items()}

    def _take_changes(self, unit: LogUnit, batches: list[pa.RecordBatch]) -> None:
        name = unit.table.full_name
        if self.tokens.get(name, Committed()).epoch >= unit.upto:
            return
        mirror, told = self.mirror.setdefault(name, {}), self.changes.setdefault(name, Counter())
        if unit.truncated is not None:
            mirror.clear()
        rows = [row for batch in batches for row in batch.to_pylist()]
        for row in sorted(rows, key=lambda row: (row["_epoch"], row["_seq"])):
            if unit.truncated is not None and (row["_epoch"], row["_seq"]) < unit.truncated:
                continue
            key = tuple(row[column] for column in unit.table.key_columns)
            told[(row["_position"], key, row["_op"])] += 1
            if row["_op"] in (Op.DELETE, Op.UPDATE_DELETE):
                mirror.pop(key, None)
            else:
                mirror[key] = {column: row[column] for column in unit.table.schema.names}

    def _take_history(self, unit: SplitUnit, batches: list[pa.RecordBatch]) -> None:
        name = unit.table.full_name
        if self.tokens.get(name, Committed()).plan >= unit.plan:
            return
        mirror, told = self.mirror.setdefault(name, {}), self.history.setdefault(name, Counter())
        if unit.replaces and unit.columns is None:
            self._clear(unit, mirror)
        for batch in batches:
            for row in batch.to_pylist():
                key = tuple(row[column] for column in unit.table.key_columns)
                told[key] += 1
                if unit.columns is None:
                    mirror[key] = row
                elif key in mirror:
                    mirror[key] |= row

    def _take_kept(self, unit: SnapshotUnit, batches: list[pa.RecordBatch]) -> None:
        """Rows of a table that we keep: each of them is new."""
        name = unit.table.full_name
        if self.tokens.get(name, Committed()).plan >= unit.plan:
            return
        mirror, told = self.mirror.setdefault(name, {}), self.history.setdefault(name, Counter())
        for batch in batches:
            for row in batch.to_pylist():
                key = tuple(row[column] for column in unit.table.key_columns)
                assert key not in mirror
                told[key] += 1
                mirror[key] = row

    def _clear(self, unit: SplitUnit, mirror: dict[Key, dict[str, Any]]) -> None:
        """The rows of the unit's ranges go."""
        if unit.ranges == (KeyRange(),):
            mirror.clear()
            return
        names = unit.table.key_columns
        fields = [unit.table.schema.field(name) for name in names]
        keys = list(mirror)
        batch = pa.RecordBatch.from_pylist(
            [dict(zip(names, key, strict=True)) for key in keys], schema=pa.schema(fields)
        )
        order = open_snapshots(self.source).order(unit.table)
        for part in unit.ranges:
            cuts = [cut for cut in (part.start, part.end) if cut is not None]
            for key, place in zip(keys, order.places(batch, cuts), strict=True):
                if place == (part.start is not None):
                    mirror.pop(key, None)


class Delivering:
    """One query over a running capture."""

    def __init__(
        self, capture: RunningCapture, *tables: str, known_sink: bool = True, parallelism: int = 2, **options: Any
    ) -> None:
        self.capture, self.parallelism = capture, parallelism
        self.options = QueryOptions(
            **{"store": str(capture.store), "source": capture.database.dsn, "query": "mirror", "tables": tables}
            | options
        )
        self.sink = MemorySink(source=capture.database.dsn)
        self._known = known_sink
        self.checkpoint: QueryOffset | None = None
        self.logged: QueryOffset | None = None
        self.batches = 0
        self.read_rows = 0
        self.start()

    def start(self) -> None:
        committed = self.sink.committed if self._known else None
        self.planner = QueryPlanner(self.options, committed=committed, takeover=True, slots=lambda: self.parallelism)

    def crash(self) -> None:
        """As kill -9 of the driver: everything in memory goes."""
        self.planner.close()
        self.start()

    def batch(self, timeout: float = 1.0, between: Callable[[str], None] = lambda step: None) -> bool:
        """Deliver one batch as Spark does it; whether there was one. *between* may raise to crash there."""
        start = self.checkpoint or self.planner.initial()
        if self.logged is not None and self.logged != start:
            end = self.logged
        else:
            end = next_batch(self.planner, start, timeout)
        if end == start:
            return False
        between("planned")
        self.logged = end  # Spark does not keep where the first batch begins
        between("logged")
        units = units_of(self.planner, start, end)
        between("units")
        read = [(unit, self.read(unit)) for unit in units]
        between("read")
        self.sink.commit(read, end)
        between("committed")
        self.checkpoint = end
        self.batches += 1
        return True

    def read(self, unit: Unit) -> list[pa.RecordBatch]:
        if isinstance(unit, LogUnit):
            return list(read_changes(self.options, unit))
        assert not isinstance(unit, UpstreamUnit)
        batches = list(read_history(self.options, unit))
        self.read_rows += sum(batch.num_rows for batch in batches)
        return batches

    @property
    def logs(self) -> StoreLogs:
        """What its planner plans from."""
        logs = self.planner._logs
        assert isinstance(logs, StoreLogs)
        return logs

    def run_until(self, done: Callable[[], bool], seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, self.planner.status()
            self.batch(timeout=0.2)

    def finish(self, seconds: float = 60.0) -> None:
        """Until history is done, and everything that the source has committed by now is delivered."""
        self.run_until(self.planner.is_history_done, seconds)
        self.capture.catch_up()
        end = time.monotonic() + seconds
        while self.batch(timeout=0.1) or not self.planner.is_history_done():  # a change of columns is read once more
            assert time.monotonic() < end, self.planner.status()

    def assert_equal(self, *tables: str) -> None:
        """The mirror is the source, each row of history came once, each change once."""
        for name in tables or self.options.tables:
            source = open_source(self.options.source, spill=self.capture.folder / "unused")
            (table,) = source.tables([name])
            source.close()
            expected = {
                tuple(row[column] for column in table.key_columns): row
                for row in self.capture.selected(table).to_pylist()
            }
            found = self.sink.mirror.get(name, {})
            assert found.keys() == expected.keys(), (
                len(found.keys() - expected.keys()),
                len(expected.keys() - found.keys()),
                sorted(found.keys() ^ expected.keys())[:5],
            )
            wrong = [key for key, row in expected.items() if found[key] != row]
            assert not wrong, (len(wrong), wrong[:5])
            assert all(count == 1 for count in self.sink.changes.get(name, Counter()).values())

    def close(self) -> None:
        self.planner.close()

"""A kept table without a database and without Spark: its log is written by hand, and folded when the test says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.logs import LogConsumer
from tests.store.sinks.file_sinks import ORDERS, POSITION, history_part, own_rows, position

from headwater.log_store import KvLogStoreFactory, LogView
from headwater.log_store.log_events import TRUNCATE, events_of
from headwater.sinks.kept_tables import KeptTables
from headwater.sinks.sink import Token
from headwater.sources.table import SourceTable
from headwater.state import open_reader, open_writer
from headwater.stream import Chunk, Epoch, EpochPair
from headwater.stream.op import Op
from headwater.versioned import VersionedTable

Rows = dict[tuple[Any, ...], dict[str, Any]]
QUERY, BACKFILL = "keep", "b1"


class WrittenTable:
    """The table *table*, kept in *folder*: epochs are written to its log, and folded into it."""

    def __init__(
        self, folder: Path, table: SourceTable = ORDERS, location: str | None = None, generation: int = 0, **sink: Any
    ) -> None:
        self.table = table
        self._generation = generation
        self.location = location or str(folder / "store")
        self.root = folder / "tables"
        self.sink = KeptTables(str(self.root), **{"retention_seconds": 0.0, **sink})
        self.store = open_writer(self.location, takeover=True)
        self._factory = KvLogStoreFactory(self.store)
        self._log = self._factory.log(table.full_name, table.log_schema(POSITION), table.key_columns)
        self._writer = self._factory.writer(self._log)
        before = self.store.committed_epoch()
        self._writer.init(EpochPair(Epoch.from_ms(before.ms + 1) if before else Epoch.from_ms(1), before))
        self._plan = 0
        self.write()
        self._consumer = LogConsumer.open(self.location, table.full_name, QUERY, takeover=True)

    @property
    def newest(self) -> int:
        return int(self.store.committed_epoch())

    def write(self, *changes: tuple[Any, ...] | str) -> int:
        """An epoch of changes ``(op, values, names of unavailable columns)``, or ``"truncate"``; the epoch."""
        epoch = self._writer.epoch
        rows: list[tuple[Any, ...]] = []
        for change in (*changes, None):
            if change is None or isinstance(change, str):
                if rows:
                    self._writer.write_chunk(self._chunk(rows, int(epoch)))
                    rows = []
                if change is not None:
                    self._writer.note(TRUNCATE, {})
            else:
                rows.append(change)
        self._writer.end_epoch(Epoch.from_ms(epoch.ms + 1))
        self._factory.sealer.seal(epoch)
        return int(epoch)

    def _chunk(self, rows: Sequence[tuple[Any, ...]], epoch: int) -> Chunk:
        own = {name: [row[1].get(name) for row in rows] for name in self.table.schema.names}
        own["_position"] = [position(epoch >> 16)] * len(rows)
        own["_commit_timestamp"] = [epoch >> 16] * len(rows)
        own["_unavailable"] = [row[2] if len(row) > 2 else None for row in rows]
        batch = pa.RecordBatch.from_pydict(own, schema=self.table.log_schema(POSITION))
        ops = pa.array([int(row[0]) for row in rows], pa.int8())
        return Chunk.build(batch, ops, self.table.key_columns, self._log.vnode_count)

    def history(self, rows: Sequence[dict[str, Any]]) -> None:
        """History, which is complete with it."""
        self._plan += 1
        token = Token(QUERY, BACKFILL, self.newest, self.newest, self._plan, generation=self._generation)
        staged = self.sink.stage_history(self.table, token, history_part(), iter([own_rows(self.table, rows)]))
        assert self.sink.commit(self.table, token, [staged])
        self.complete()

    def complete(self) -> None:
        self.sink.complete(self.table, QUERY, BACKFILL, self.newest)

    def fold(self, upto: int | None = None) -> int:
        """A batch of changes, as far as pins let it go; the epoch."""
        after = int(self._consumer.delivered())
        end = self.sink.choose([self.table.full_name], self.newest if upto is None else upto)
        if end > after:
            token = Token(QUERY, BACKFILL, after, end, self._plan, generation=self._generation)
            with open_reader(self.location) as reader, reader.snapshot() as view:
                log = LogView.open(view, self.table.full_name)
                rows = list(log.read_range(after, end))
            truncated = self._truncated(after, end)
            staged = self.sink.stage_changes(self.table, token, iter(rows), truncated)
            assert self.sink.commit(self.table, token, [staged])
            self._consumer.commit(Epoch(end))
        return end

    def _truncated(self, after: int, upto: int) -> tuple[int, int] | None:
        with open_reader(self.location) as reader, reader.snapshot() as view:
            found = [event for event in events_of(view, self.table.full_name, after, upto) if event.kind == TRUNCATE]
        return (int(found[-1].epoch), found[-1].seq) if found else None

    def open(self) -> VersionedTable:
        return VersionedTable.open(self.location, self.table.full_name, self.root)

    def close(self) -> None:
        self._consumer.close()
        self._factory.close()
        self.store.close()


def rows_at(table: VersionedTable, epoch: int, key: Sequence[str] = ("id",)) -> Rows:
    """The rows at *epoch*; each key is there once."""
    found = [row for batch in table.snapshot(epoch, (0, table.vnode_count)) for row in batch.to_pylist()]
    made = {tuple(row[name] for name in key): row for row in found}
    assert len(made) == len(found)
    return made


def applied(rows: Rows, changes: Iterator[pa.RecordBatch], key: Sequence[str] = ("id",)) -> Rows:
    """*rows* after net *changes*, which must fit them; each key is told once."""
    now, told = dict(rows), set()
    before: dict[str, Any] | None = None
    for batch in changes:
        for row in batch.to_pylist():
            op = Op(row.pop("_op"))
            row.pop("_vnode")
            name = tuple(row[column] for column in key)
            if op is Op.UPDATE_INSERT:
                assert before is not None
                assert tuple(before[column] for column in key) == name
                now[name] = row
                before = None
                continue
            assert before is None
            assert name not in told
            told.add(name)
            if op is Op.INSERT:
                assert name not in now
                now[name] = row
            else:
                assert {column: now[name].get(column) for column in row} == row
                before = row if op is Op.UPDATE_DELETE else None
                if op is Op.DELETE:
                    del now[name]
    assert before is None
    return now

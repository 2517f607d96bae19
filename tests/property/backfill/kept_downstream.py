"""A downstream of a table that we really keep: a log, runs, pins and compactions on disk.

What a task of Spark would read is read as it does; the model in memory is the truth.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
from tests.logs import LogConsumer
from tests.store.sinks.file_sinks import DELETE, INSERT, UPDATE, table_of
from tests.store.versioned.written import WrittenTable
from tests.unit.backfill.snapshot.memory_table import MemoryTable
from tests.unit.backfill.snapshot.runner import Downstream

from headwater.backfill.query import QueryOptions
from headwater.backfill.reader import read_changes, read_history
from headwater.backfill.snapshot.parts import VnodeFilter, VnodePart
from headwater.backfill.units import LogUnit, SnapshotUnit
from headwater.stream import Epoch, vnodes_of
from headwater.versioned.compaction import compact

NUMBERS = table_of({"id": pa.int64(), "v": pa.int64()}, key=("id",))


class KeptTable(MemoryTable):
    """Every epoch is written to the log of a kept table as well, and that is what is read."""

    def __init__(self, first: Mapping[int, int]) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self.kept = WrittenTable(self._folder, NUMBERS, f"memory://{uuid.uuid4()}", merge_runs=3)
        self.kept.history([{"id": key, "v": value} for key, value in first.items()])
        self.opened = self.kept.open()
        super().__init__(self.opened.vnode_count)
        self._versions = {self.kept.newest: dict(first)}
        self._consumer = LogConsumer.open(self.kept.location, NUMBERS.full_name, "downstream")

    def commit(self, epoch: int, upserts: Mapping[int, int] | None = None, deletes: tuple[int, ...] = ()) -> None:
        """The next epoch, which the log numbers."""
        now = dict(self.rows(self.newest_epoch))
        told = [(DELETE, {"id": key, "v": now.pop(key)}) for key in deletes if key in now]
        for key, value in (upserts or {}).items():
            told.append((UPDATE if key in now else INSERT, {"id": key, "v": value}))
            now[key] = value
        self._versions[self.kept.write(*told)] = now

    def hold(self, epoch: int) -> None:
        self.opened.pin("downstream", epoch, name="downstream")

    def forget(self, epoch: int) -> None:
        self._consumer.commit(Epoch(epoch))

    def compact(self) -> None:
        """Fold what no pin needs, and make one run of all; the truth is remembered."""
        self.kept.fold()
        compact(self.kept.sink.folder(NUMBERS), 2, everything=True, kept_seconds=0)
        self.base_epoch = self.opened.base_epoch

    def blocks(self, epoch: int, vnodes: tuple[int, int]) -> list[tuple[int, bytes, int, int]]:
        return list(self.opened.blocks(epoch, vnodes))

    def vnodes(self, rows: pa.RecordBatch, epoch: int) -> pa.UInt16Array:
        return vnodes_of(rows, NUMBERS.key_columns, self.vnode_count)

    def close(self) -> None:
        self._consumer.close()
        self.opened.close()
        self.kept.close()
        shutil.rmtree(self._folder)


class KeptDownstream(Downstream):
    """Its parts and its changes are read as a task of Spark reads them."""

    def __init__(self, table: KeptTable, budget: int) -> None:
        self._kept = table
        kept = table.kept
        names = (NUMBERS.full_name,)
        self._query = QueryOptions(kept.location, "", "downstream", names, history=False, kept=str(kept.root))
        super().__init__(table, budget=budget)

    def _read(self, part: VnodePart, epoch: int) -> Iterator[pa.RecordBatch]:
        unit = SnapshotUnit(self._kept.opened.table(epoch), epoch, (part,), 1, 0, b"", 0, part.rows)
        yield from read_history(self._query, unit)

    def _changes(self, after: int, upto: int, handed_out: VnodeFilter | None) -> Iterator[pa.RecordBatch]:
        for first, end in pairwise((0, 64, 128, 192, 256)):
            unit = LogUnit(self._kept.opened.table(upto), after, upto, first, end, 1, handed_out)
            yield from read_changes(self._query, unit)

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
from tests.store.sinks.file_sinks import DELETE, INSERT, UPDATE, table_of
from tests.store.versioned.written import WrittenTable
from tests.unit.backfill.snapshot.memory_table import MemoryTable
from tests.unit.backfill.snapshot.runner import Downstream

from headwater.backfill.query import QueryOptions
from headwater.backfill.reader import read_history
from headwater.backfill.snapshot.parts import VnodePart
from headwater.backfill.units import SnapshotUnit
from headwater.stream import OP_COLUMN, Chunk, Op, VnodeBitmap, vnodes_of
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

    def compact(self) -> None:
        """Fold what no pin needs, and make one run of all; the truth is remembered."""
        self.kept.fold()
        compact(self.kept.sink.folder(NUMBERS), 2, everything=True, kept_seconds=0)
        self.base_epoch = self.opened.base_epoch

    def blocks(self, epoch: int, vnodes: tuple[int, int]) -> list[tuple[int, bytes, int, int]]:
        return list(self.opened.blocks(epoch, vnodes))

    def close(self) -> None:
        self.opened.close()
        self.kept.close()
        shutil.rmtree(self._folder)


class KeptDownstream(Downstream):
    """Its parts are read as a task of Spark reads them, its changes by ranges of vnodes."""

    def __init__(self, table: KeptTable, owners: tuple[str, ...], budget: int) -> None:
        self._kept = table
        super().__init__(table, owners=owners, budget=budget)

    def _read(self, part: VnodePart, epoch: int) -> list[Chunk]:
        kept = self._kept.kept
        unit = SnapshotUnit(self._kept.opened.table(epoch), epoch, (part,), 1, 0, b"", 0, part.rows)
        options = QueryOptions(
            kept.location, "", "downstream", (NUMBERS.full_name,), history=False, kept=str(kept.root)
        )
        made = [_chunk(rows) for rows in read_history(options, unit)]
        self.read_rows += sum(chunk.rows.num_rows for chunk in made)
        return made

    def _changes(self, after: int, upto: int, vnodes: VnodeBitmap) -> list[Chunk]:
        return [_chunk(rows) for owned in _ranges(vnodes) for rows in self._kept.opened.changes(after, upto, owned)]


def _chunk(rows: pa.RecordBatch) -> Chunk:
    own = rows.select(NUMBERS.schema.names)
    is_log = OP_COLUMN in rows.schema.names
    ops = rows.column(OP_COLUMN) if is_log else pa.array([int(Op.INSERT)] * rows.num_rows, pa.int8())
    return Chunk(own, ops, vnodes_of(own, NUMBERS.key_columns, 256))


def _ranges(vnodes: VnodeBitmap) -> Iterator[tuple[int, int]]:
    """Neighbours as one range."""
    owned = list(vnodes)
    starts = [0, *(place + 1 for place, (one, following) in enumerate(pairwise(owned)) if following != one + 1)]
    for first, end in pairwise([*starts, len(owned)] if owned else []):
        yield owned[first], owned[end - 1] + 1

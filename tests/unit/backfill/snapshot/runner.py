"""A downstream of a versioned table in memory: batches are planned, read and committed as a query does, without Spark.

The sink takes each row strictly: an insert of a key that it has, or a change of a row that it has not, is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple

import pyarrow as pa
from tests.unit.backfill.snapshot.memory_table import SCHEMA, MemoryTable, position

from headwater.backfill.snapshot.executor import SnapshotBackfillExecutor, SnapshotOptions
from headwater.backfill.snapshot.mark import ALL_KEYS, KeySpan, apply_mark, mark_chunk
from headwater.backfill.snapshot.parts import Layout, VnodePart
from headwater.backfill.snapshot.record import SnapshotPhase, SnapshotTables
from headwater.backfill.snapshot.vnode_stream import VnodeStream
from headwater.state import Catalog, WriteBatch, open_writer
from headwater.stream import (
    OP_COLUMN,
    Barrier,
    BarrierKind,
    Chunk,
    Epoch,
    EpochPair,
    Mutation,
    Op,
    UpdateVnodeBitmap,
    VnodeBitmap,
)

NAME: Final = "public.orders"
_stores = count()


class Block(NamedTuple):
    vnode: int
    first: bytes
    rows: int
    bytes: int


@dataclass(slots=True)
class StrictSink:
    """What was committed, and in which offset."""

    rows: dict[int, int] = field(default_factory=dict)
    offset: tuple[int, int] = (0, 0)
    trace: list[tuple[int, int, list[tuple[int, int, int]]]] = field(default_factory=list)

    def commit(self, offset: tuple[int, int], chunks: list[Chunk]) -> None:
        """Once: a batch that comes again changes nothing."""
        if offset <= self.offset:
            return
        told: list[tuple[int, int, int]] = []
        for chunk in chunks:
            columns = chunk.rows.to_pydict()
            for op, key, value in zip(chunk.ops.to_pylist(), columns["id"], columns["v"], strict=True):
                self._apply(Op(op), key, value)
                told.append((op, key, value))
        self.offset = offset
        self.trace.append((*offset, told))

    def _apply(self, op: Op, key: int, value: int) -> None:
        if op is Op.INSERT:
            assert key not in self.rows, f"{key} came twice"
            self.rows[key] = value
        elif op is Op.UPDATE_INSERT:
            self.rows[key] = value
        else:
            assert self.rows.get(key) == value, f"the old row of {key} is another"
            if op is Op.DELETE:
                del self.rows[key]


class Downstream:
    """A query of one table.

    :param owners: names of those who share its vnodes.
    """

    def __init__(
        self,
        table: MemoryTable,
        *,
        owners: tuple[str, ...] = ("",),
        budget: int = 4,
        options: SnapshotOptions | None = None,
        span: KeySpan = ALL_KEYS,
        epochs_per_batch: int = 1,
    ) -> None:
        self.table, self.budget, self.span = table, budget, span
        self.sink = StrictSink()
        self.now = 0.0
        self.read_rows = 0
        self._options = options
        self._epochs_per_batch = epochs_per_batch
        self._store = open_writer(f"memory://snapshot-backfill-{next(_stores)}")
        self._seals = count(1)
        self._barriers = count(1)
        self._bitmaps = dict(zip(owners, VnodeBitmap.full(table.vnode_count).split(len(owners)), strict=True))
        self.at = (0, 0)
        self.planned: tuple[int, int] | None = None
        self._has_more = True
        self.executors = self._open()

    # -- life ------------------------------------------------------------------------------------------------------

    def _open(self) -> dict[str, SnapshotBackfillExecutor]:
        with self._store.snapshot() as view:
            tables = SnapshotTables(Catalog.load(view), WriteBatch())
            made = {
                owner: SnapshotBackfillExecutor(NAME, tables, view, vnodes, self._options, owner=owner)
                for owner, vnodes in self._bitmaps.items()
            }
        for executor in made.values():
            executor.wants(self.now)
            executor.on_barrier(self._barrier(BarrierKind.INITIAL))
        return made

    def crash(self, *, kept: bool) -> None:
        """Everything in memory is gone. :param kept: whether the offset of the batch that was planned is known."""
        self.executors, self._has_more = self._open(), True
        if self.planned is not None and not kept and self.planned > self.sink.offset:
            self.planned = None

    def save(self) -> None:
        batch = WriteBatch()
        for executor in self.executors.values():
            executor.save(batch)
        self._store.seal(Epoch.from_ms(next(self._seals)), batch)

    def barrier(self, mutation: Mutation | None = None, kind: BarrierKind = BarrierKind.CHECKPOINT) -> None:
        for executor in self.executors.values():
            executor.on_barrier(self._barrier(kind, mutation))
        if kind.is_durable:
            self.save()

    def _barrier(self, kind: BarrierKind, mutation: Mutation | None = None) -> Barrier:
        number = next(self._barriers)
        return Barrier(EpochPair(Epoch.from_ms(number + 1), Epoch.from_ms(number)), kind, mutation)

    def rescale(self, bitmaps: dict[str, VnodeBitmap]) -> None:
        """Between two batches. Owners that are new begin where the others are."""
        assert self.planned is None
        mutation = UpdateVnodeBitmap.of(bitmaps)
        for executor in self.executors.values():
            executor.roll_back(self.at[1])
            executor.deliver(self.at[1])
            executor.on_barrier(self._barrier(BarrierKind.CHECKPOINT, mutation))
        self.save()
        known = min(self.executors.values(), key=lambda one: list(SnapshotPhase).index(one.phase))
        with self._store.snapshot() as view:
            tables = SnapshotTables(Catalog.load(view), WriteBatch())
            record = tables.record(view, NAME, known.owner)
            assert record is not None
            for owner in bitmaps.keys() - self.executors.keys():
                batch = WriteBatch()
                tables.put(batch, NAME, owner, record)
                self._store.seal(Epoch.from_ms(next(self._seals)), batch)
        for owner, executor in self.executors.items():
            if owner in bitmaps:
                with self._store.snapshot() as view:
                    executor.move(view)
        self._bitmaps = bitmaps
        before = self.executors
        self.executors = self._open() | {owner: before[owner] for owner in sorted(bitmaps.keys() & before.keys())}
        self.save()

    # -- batches ---------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> SnapshotPhase:
        return min((one.phase for one in self.executors.values()), key=list(SnapshotPhase).index)

    def plan(self) -> bool:
        """Whether there is a batch."""
        for executor in self.executors.values():
            executor.roll_back(self.at[1])
            executor.deliver(self.at[1])
        if self.phase is SnapshotPhase.CHANGE_LOG or self.phase is SnapshotPhase.LIVE:
            for executor in self.executors.values():
                executor.consume(self.at[0], has_more=self._has_more)
        epoch, plan = self.at
        if self.phase is SnapshotPhase.WAITING:
            epoch = self.table.newest_epoch
            self.table.hold(epoch)
            self.at = (epoch, plan)
            for executor in self.executors.values():
                executor.begin(epoch, self._layout())
        handed = False
        if self.phase is SnapshotPhase.SNAPSHOT:
            for executor in self.executors.values():
                executor.see(self._layout())
                executor.wants(self.now)
                handed |= bool(executor.hand_out(plan + 1, self.budget))
            self.planned = (epoch, plan + 1) if handed else None
        else:
            self.table.hold(epoch)  # the snapshot is over; the log is held from here on
            allowed = min(executor.allows(self.now) for executor in self.executors.values())
            later = sorted(one for one in self.table.epochs() if one > epoch) if allowed else []
            end = later[: self._epochs_per_batch][-1] if later else epoch
            for executor in self.executors.values():
                executor.lag(len([one for one in later if one > end]))
            self.planned = (end, plan) if end > epoch else None
            self._has_more = end < self.table.newest_epoch
            if allowed and not later:
                for executor in self.executors.values():
                    executor.consume(epoch, has_more=False)
        self.save()
        return self.planned is not None

    def _layout(self) -> Layout:
        epoch = self.at[0]
        return Layout(Block(*block) for block in self.table.blocks(epoch, (0, self.table.vnode_count)))

    def deliver(self) -> None:
        """The batch that was planned is read and committed."""
        assert self.planned is not None
        start, end = self.at, self.planned
        chunks: list[Chunk] = []
        for owner, executor in self.executors.items():
            if end[1] > start[1]:
                for part in executor.handed_out(end[1]):
                    chunks += self._read(part, end[0])
            if end[0] > start[0]:
                chunks += self._changes(start[0], end[0], self._bitmaps[owner])
        self.sink.commit(end, chunks)

    def _changes(self, after: int, upto: int, vnodes: VnodeBitmap) -> list[Chunk]:
        owned = ((part.start, part.stop) for part in vnodes.ranges())
        return [self._chunk(rows) for part in owned for rows in self.table.changes(after, upto, part)]

    def _read(self, part: VnodePart, epoch: int) -> list[Chunk]:
        stream = VnodeStream(self.table, epoch, (part.first, part.end), start=part.start, end=part.stop)
        made = [self._chunk(rows) for rows in stream]
        self.read_rows += sum(chunk.rows.num_rows for chunk in made)
        return made

    def _chunk(self, rows: pa.RecordBatch) -> Chunk:
        """What the downstream takes of *rows*."""
        own = rows.select(SCHEMA.names)
        inserts = pa.array([int(Op.INSERT)] * rows.num_rows, pa.int8())
        ops = rows.column(OP_COLUMN) if OP_COLUMN in rows.schema.names else inserts
        chunk = Chunk(own, ops, self.table.vnodes(own, 0))
        return apply_mark(chunk, mark_chunk(chunk, self.table.positions(own, 0), self.span))

    def batch(self) -> bool:
        """One whole batch; whether there was one."""
        if self.planned is None and not self.plan():
            return False
        self.deliver()
        assert self.planned is not None
        self.at, self.planned = self.planned, None
        return True

    def run(self, batches: int = 1000) -> int:
        """Until there is nothing more to do; how many batches it took."""
        for made in range(batches):
            if not self.batch():
                return made
        raise AssertionError("it does not end")

    def expected(self) -> dict[int, int]:
        """What the sink must have."""
        rows = self.table.rows(self.at[0])
        keys = pa.array([position(key) for key in rows], pa.binary())
        return {key: value for (key, value), kept in zip(rows.items(), self.span.contains(keys), strict=True) if kept}

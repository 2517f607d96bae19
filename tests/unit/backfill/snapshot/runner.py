"""A downstream of a versioned table in memory: batches are planned, read and committed as a query does, without Spark.

The sink takes each row strictly: an insert of a key that it has, or a change of a row that it has not, is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple

import pyarrow as pa
from tests.unit.backfill.snapshot.memory_table import MemoryTable

from headwater.backfill.cdc.mark import kept_rows
from headwater.backfill.snapshot.executor import SnapshotBackfillExecutor, SnapshotOptions
from headwater.backfill.snapshot.mark import mark_chunk
from headwater.backfill.snapshot.parts import Layout, VnodeFilter, VnodePart, groups
from headwater.backfill.snapshot.record import SnapshotPhase, SnapshotTables
from headwater.backfill.snapshot.vnode_stream import VnodeStream
from headwater.state import Catalog, WriteBatch, open_writer
from headwater.stream import OP_COLUMN, Barrier, BarrierKind, Epoch, EpochPair, Mutation, Op

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

    def commit(self, offset: tuple[int, int], batches: list[pa.RecordBatch]) -> bool:
        """Once: a batch that comes again changes nothing."""
        if offset <= self.offset:
            return False
        applied: list[tuple[int, int, int]] = []
        for batch in batches:
            ops = batch.column(OP_COLUMN).to_pylist() if OP_COLUMN in batch.schema.names else [1] * batch.num_rows
            columns = batch.to_pydict()
            for op, key, value in zip(ops, columns["id"], columns["v"], strict=True):
                self._apply(Op(op), key, value)
                applied.append((op, key, value))
        self.offset = offset
        self.trace.append((*offset, applied))
        return True

    def _apply(self, op: Op, key: int, value: int) -> None:
        if op is Op.INSERT:
            assert key not in self.rows, f"{key} came twice"
            self.rows[key] = value
        elif op is Op.UPDATE_INSERT:
            assert key in self.rows, f"{key} is not there"
            self.rows[key] = value
        else:
            assert self.rows.get(key) == value, f"the old row of {key} is another"
            if op is Op.DELETE:
                del self.rows[key]


class Downstream:
    """A query of one table.

    :param tasks: how many tasks read the parts of a plan. :ivar parts: what was read and committed.
    """

    def __init__(
        self,
        table: MemoryTable,
        *,
        budget: int = 4,
        options: SnapshotOptions | None = None,
        epochs_per_batch: int = 1,
        tasks: int = 1,
    ) -> None:
        self.table, self.budget, self.tasks = table, budget, tasks
        self.sink = StrictSink()
        self.now = 0.0
        self.read_rows = 0
        self.parts: list[VnodePart] = []
        self._options = options
        self._epochs_per_batch = epochs_per_batch
        self._store = open_writer(f"memory://snapshot-backfill-{next(_stores)}")
        self._seals = count(1)
        self._barriers = count(1)
        self.at = (0, 0)
        self.planned: tuple[int, int] | None = None
        self.executor = self._open()

    # -- life ------------------------------------------------------------------------------------------------------

    def _open(self) -> SnapshotBackfillExecutor:
        with self._store.snapshot() as view:
            tables = SnapshotTables(Catalog.load(view), WriteBatch())
            executor = SnapshotBackfillExecutor(NAME, tables, view, self.table.vnode_count, self._options)
        executor.wants(self.now)
        executor.on_barrier(self._barrier(BarrierKind.INITIAL))
        return executor

    def crash(self, *, kept: bool) -> None:
        """Everything in memory is gone. :param kept: whether the offset of the batch that was planned is known."""
        self.executor = self._open()
        if self.planned is not None and not kept and self.planned > self.sink.offset:
            self.planned = None

    def save(self) -> None:
        batch = WriteBatch()
        self.executor.save(batch)
        self._store.seal(Epoch.from_ms(next(self._seals)), batch)

    def barrier(self, mutation: Mutation | None = None, kind: BarrierKind = BarrierKind.CHECKPOINT) -> None:
        self.executor.on_barrier(self._barrier(kind, mutation))
        if kind.is_durable:
            self.save()

    def _barrier(self, kind: BarrierKind, mutation: Mutation | None = None) -> Barrier:
        number = next(self._barriers)
        return Barrier(EpochPair(Epoch.from_ms(number + 1), Epoch.from_ms(number)), kind, mutation)

    # -- batches ---------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> SnapshotPhase:
        return self.executor.phase

    def plan(self) -> bool:
        """Whether there is a batch."""
        executor = self.executor
        if self.at == (0, 0):
            self.at = (self.table.newest_epoch, 0)
        epoch, plan = self.at
        executor.roll_back(plan)
        executor.deliver(plan, epoch)
        self.table.forget(epoch)
        later = sorted(known for known in self.table.epochs() if known > epoch)
        end = later[: self._epochs_per_batch][-1] if later else epoch
        executor.lag(len([known for known in later if known > end]))
        if not later:
            executor.reach()
        handed = False
        if executor.wants(self.now) > 0:
            self.table.hold(end)
            handed = bool(executor.hand_out(plan + 1, self.budget, end, self._layout(end)))
        self.planned = (end, plan + handed) if handed or end > epoch else None
        self.save()
        return self.planned is not None

    def _layout(self, epoch: int) -> Layout:
        return Layout(Block(*block) for block in self.table.blocks(epoch, (0, self.table.vnode_count)))

    def deliver(self) -> None:
        """The batch that was planned is read and committed."""
        assert self.planned is not None
        (after, before), (end, plan) = self.at, self.planned
        batches: list[pa.RecordBatch] = []
        parts = self.executor.handed_out(plan) if plan > before else []
        for task in groups(parts, self.executor.layout or self._layout(end), self.tasks):
            for part in task:
                read = list(self._read(part, end))
                self.read_rows += sum(rows.num_rows for rows in read)
                batches += read
        if end > after:
            batches += self._changes(after, end, self.executor.filter())
        if self.sink.commit(self.planned, batches):
            self.parts += parts

    def _read(self, part: VnodePart, epoch: int) -> Iterator[pa.RecordBatch]:
        yield from VnodeStream(self.table, epoch, (part.first, part.end), start=part.start, end=part.stop)

    def _changes(self, after: int, upto: int, handed_out: VnodeFilter | None) -> Iterator[pa.RecordBatch]:
        """As :func:`headwater.backfill.reader.read_changes` does."""
        for rows in self.table.log(after, upto):
            if handed_out is None:
                yield rows
                continue
            vnodes = self.table.vnodes(rows, upto).to_numpy()
            yield kept_rows(rows, mark_chunk(rows, handed_out, vnodes, ("id",)))

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
        for number in range(batches):
            if not self.batch():
                return number
        raise AssertionError("it does not end")

    def check(self) -> None:
        """The sink has every row of the vnodes and keys that are read as it is at the epoch that it claims."""
        rows = self.table.rows(self.sink.offset[0]) if self.parts else {}
        batch = pa.RecordBatch.from_pydict({"id": list(rows)}, schema=pa.schema([("id", pa.int64())]))
        vnodes = self.table.vnodes(batch, self.sink.offset[0]).to_pylist() if rows else []
        keys = self.table.positions(batch, self.sink.offset[0]).to_pylist() if rows else []
        read = {
            key: value
            for (key, value), vnode, place in zip(rows.items(), vnodes, keys, strict=True)
            if any(_has(part, vnode, place) for part in self.parts)
        }
        assert self.sink.rows == read


def _has(part: VnodePart, vnode: int, key: bytes) -> bool:
    inside = part.first <= vnode < part.end
    return inside and (part.start is None or key >= part.start) and (part.stop is None or key < part.stop)

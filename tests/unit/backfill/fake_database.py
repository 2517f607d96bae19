"""A database in memory with transactions, snapshots and a log, as the backfill sees one.

Transactions interleave, and a commit is in the log before other sessions see it. A row is locked until then. Keys are
tuples of integers; the two values of a row are integers. With blocks: a new version of a row goes into another block.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources import snapshots
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import SnapshotMark
from headwater.sources.splits import Cut, KeyRange, Split, SplitKind, SplitPlan
from headwater.sources.table import SourceColumn, SourceTable
from headwater.stream import Op

Key = tuple[int, ...]
Row = tuple[int, int]
LogRow = tuple[Key, Row, bytes, int, int, int]
"""Key, values, position, op, seq and epoch."""

_POSITION = struct.Struct(">QII")
VNODES = 4
snapshots._MARKS["Fake"] = f"{__name__}:FakeMark"


@dataclass(frozen=True, slots=True, eq=False)
class FakeOffset(CdcOffset):
    """Everything that committed below *lsn* is before it."""

    kind: ClassVar[str] = "Fake"
    lsn: int

    def rank(self) -> tuple[int, ...]:
        return (self.lsn,)

    def to_fields(self) -> dict[str, Any]:
        return {"lsn": self.lsn}

    def position_after(self, last: bytes | None) -> bytes:
        return _POSITION.pack(self.lsn, 0, 0) if last is None else last

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> FakeOffset:
        return cls(fields["lsn"])


def xids_of(positions: pa.FixedSizeBinaryArray) -> NDArray[np.uint32]:
    return np.array([_POSITION.unpack(position)[2] for position in positions.to_pylist()], np.uint32)


@dataclass(frozen=True, slots=True)
class FakeMark(SnapshotMark):
    """Transactions below *xmax* that are not in *xip*."""

    kind: ClassVar[str] = "Fake"

    xmax: int
    xip: tuple[int, ...]
    lsn: int

    @property
    def low(self) -> FakeOffset:
        return FakeOffset(0)

    @property
    def high(self) -> FakeOffset:
        return FakeOffset(self.lsn)

    def contains(self, positions: pa.FixedSizeBinaryArray) -> NDArray[np.bool_]:
        xids = xids_of(positions)
        has: NDArray[np.bool_] = (xids < self.xmax) & ~np.isin(xids, np.array(self.xip, np.uint32))
        return has

    def has(self, xid: int) -> bool:
        return xid < self.xmax and xid not in self.xip

    def to_fields(self) -> dict[str, Any]:
        return {"xmax": self.xmax, "xip": list(self.xip), "lsn": self.lsn}

    def to_json(self) -> str:
        return json.dumps({self.kind: self.to_fields()})

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> FakeMark:
        return cls(fields["xmax"], tuple(fields["xip"]), fields["lsn"])


def lies_before(cut: Cut, key: Key) -> bool:
    """Whether *cut* lies before *key*."""
    values = tuple(int(value) for value in cut.values)
    front = key[: len(values)]
    return front > values if cut.after else front >= values


def is_in(part: KeyRange, key: Key) -> bool:
    after = part.start is None or lies_before(part.start, key)
    return after and (part.end is None or not lies_before(part.end, key))


class FakeOrder:
    """The order of tuples of integers."""

    def places(self, keys: pa.RecordBatch, cuts: Sequence[Cut]) -> NDArray[np.int64]:
        rows = zip(*(column.to_pylist() for column in keys.columns), strict=True)
        return np.array([sum(lies_before(cut, key) for cut in cuts) for key in rows], np.int64)


def table_of(width: int = 1, name: str = "orders", source_id: int = 7) -> SourceTable:
    """A table with *width* key columns and the values ``a`` and ``b``."""
    names = [f"k{place}" for place in range(width)]
    columns = tuple(SourceColumn(text, pa.int64(), "bigint", 1 + n) for n, text in enumerate([*names, "a", "b"]))
    return SourceTable("public", name, columns, tuple(names), source_id)


@dataclass(slots=True)
class Transaction:
    """What one transaction did, in order: key, new row or ``None``, block."""

    xid: int
    writes: list[tuple[Key, Row | None, int]] = field(default_factory=list)
    log: list[tuple[Key, Row, Op]] = field(default_factory=list)
    truncates: bool = False
    commit_lsn: int = 0
    is_visible: bool = False


class FakeSnapshot:
    """What the visible transactions have made."""

    def __init__(self, database: FakeDatabase, name: str) -> None:
        open_xids = [t.xid for t in (*database.open.values(), *database.commits) if not t.is_visible]
        self.name = name
        self.mark = FakeMark(database.next_xid, tuple(sorted(open_xids)), database.lsn)
        self.rows, self.blocks = database.state(mark=self.mark)
        self.keys = sorted(self.rows)
        self.is_held = True
        self._database = database

    def has_key(self, table: SourceTable) -> bool:
        return True

    def files(self, table: SourceTable) -> str:
        return ""

    def is_open(self) -> bool:
        return self.is_held

    def table(self, table: SourceTable) -> SourceTable:
        return table

    def within(self, kind: SplitKind, part: KeyRange) -> list[Key]:
        if kind is SplitKind.KEY:
            return [key for key in self.keys if is_in(part, key)]
        found = [key for key in self.keys if is_in(part, (self.blocks[key],))]
        return sorted(found, key=lambda key: self.blocks[key])

    def plan(self, table: SourceTable, *, split_rows: int, kind: SplitKind | None = None) -> SplitPlan:
        kind = kind or SplitKind.KEY
        starts: Sequence[Key] = self.keys if kind is SplitKind.KEY else sorted({(b,) for b in self.blocks.values()})
        places = range(split_rows, len(starts), split_rows)
        cuts = [_cut(starts[place]) for place in places]
        if kind is SplitKind.KEY and self.keys:
            cuts = [_cut(self.keys[0]), *cuts, Cut(_texts(self.keys[-1]), after=True)]
            for place in places:
                before, gap = starts[place - 1], starts[place]
                if gap[0] > before[0] + 1:
                    cuts.append(Cut(_texts(before), after=True))  # an empty split between others
            cuts.sort(key=lambda cut: (tuple(map(int, cut.values)), cut.after))
        edges = [None, *cuts, None]
        ranges = [KeyRange(start, end) for start, end in pairwise(edges)]
        counts = [len(self.within(kind, part)) for part in ranges]
        splits = tuple(
            Split(n, part, rows, rows == 0) for n, (part, rows) in enumerate(zip(ranges, counts, strict=True))
        )
        return SplitPlan(kind, splits, len(self.keys), 100 * len(self.keys), "a fake")

    def page_end(self, table: SourceTable, kind: SplitKind, part: KeyRange, rows: int) -> Cut | None:
        found = self.within(kind, part)
        if len(found) <= rows:
            return None
        if kind is SplitKind.KEY:
            return Cut(_texts(found[rows - 1]), after=True)
        end = Cut((str(self.blocks[found[rows - 1]]),), after=True)
        return end if len(self.within(kind, KeyRange(part.start, end))) < len(found) else None

    def close(self) -> None:
        self.is_held = False
        self._database.snapshots.pop(self.name, None)


class FakeDatabase:
    """One table, its transactions, and the log that a capture has of them."""

    def __init__(self, table: SourceTable, *, tells_old: bool = True) -> None:
        self.table = table
        self.tells_old = tells_old
        self.next_xid = 1
        self.lsn = 1
        self.blocks = 1
        self.open: dict[int, Transaction] = {}
        self.commits: list[Transaction] = []
        self.epochs: list[tuple[int, FakeOffset]] = [(0, FakeOffset(1))]
        self.snapshots: dict[str, FakeSnapshot] = {}
        self.exported = 0

    # -- transactions ----------------------------------------------------------------------------------------------

    def state(self, *, mark: FakeMark | None = None, upto: int = 0) -> tuple[dict[Key, Row], dict[Key, int]]:
        """Rows and their blocks: of the first *upto* commits and of those that *mark* has."""
        rows: dict[Key, Row] = {}
        blocks: dict[Key, int] = {}
        for place, transaction in enumerate(self.commits):
            if place < upto or (mark is not None and mark.has(transaction.xid)):
                if transaction.truncates:
                    rows.clear()
                for key, row, block in transaction.writes:
                    if row is None:
                        rows.pop(key, None)
                    else:
                        rows[key], blocks[key] = row, block
        return rows, {key: blocks[key] for key in rows}

    def locked(self) -> set[Key]:
        busy = [*self.open.values(), *(t for t in self.commits if not t.is_visible)]
        return {key for transaction in busy for key, _, _ in transaction.writes}

    def begin(self) -> int:
        xid, self.next_xid = self.next_xid, self.next_xid + 1
        self.open[xid] = Transaction(xid)
        return xid

    def put(self, xid: int, key: Key, row: Row | None) -> bool:
        """Insert, update or delete; ``False`` when another transaction has the row, or there is none to delete."""
        mine = self.open[xid]
        own = {written: new for written, new, _ in mine.writes}
        if key in self.locked() and key not in own:
            return False
        old = own[key] if key in own else self.state(upto=len(self.commits))[0].get(key)
        if row is None and old is None:
            return False
        self.lsn += 1
        self.blocks += self.lsn % 3 == 0
        block = self.blocks if self.lsn % 2 else self.lsn * 7 % (self.blocks + 1)
        mine.writes.append((key, row, block))
        if row is None:
            assert old is not None
            mine.log.append((key, old, Op.DELETE))
        elif old is None:
            mine.log.append((key, row, Op.INSERT))
        else:
            if self.tells_old:
                mine.log.append((key, old, Op.UPDATE_DELETE))
            mine.log.append((key, row, Op.UPDATE_INSERT))
        return True

    def move(self, xid: int, key: Key, other: Key) -> bool:
        """Change the key of a row: the log has a delete and an insert."""
        own = {written: new for written, new, _ in self.open[xid].writes}
        rows = {**self.state(upto=len(self.commits))[0], **own}
        row = rows.get(key)
        if row is None or rows.get(other) is not None or other in self.locked() - own.keys():
            return False
        return self.put(xid, key, None) and self.put(xid, other, row)

    def truncate(self) -> bool:
        """In a transaction of its own, which waits for everybody else."""
        if self.open or self.snapshots or any(not t.is_visible for t in self.commits):
            return False
        xid = self.begin()
        self.open[xid].truncates = True
        self.commit(xid)
        self.show(xid)
        return True

    def commit(self, xid: int) -> None:
        """The commit is in the log; others see it when it is shown."""
        transaction = self.open.pop(xid)
        self.lsn += 1
        transaction.commit_lsn = self.lsn
        self.lsn += 1
        self.commits.append(transaction)

    def roll_back(self, xid: int) -> None:
        self.open.pop(xid)

    def show(self, xid: int) -> None:
        next(t for t in self.commits if t.xid == xid).is_visible = True

    def run(self, *writes: tuple[Key, Row | None]) -> int:
        """One transaction, committed and seen."""
        xid = self.begin()
        for key, row in writes:
            assert self.put(xid, key, row)
        self.commit(xid)
        self.show(xid)
        return xid

    # -- the log ---------------------------------------------------------------------------------------------------

    @property
    def newest(self) -> int:
        """The newest sealed epoch; epochs are counted."""
        return len(self.epochs) - 1

    def seal(self, commits: int | None = None) -> int:
        """Seal an epoch with everything that committed, or the next *commits*; the place goes on with idle ones."""
        before = self.epochs[-1][0]
        count = len(self.commits) if commits is None else min(len(self.commits), before + commits)
        place = FakeOffset(self.lsn if count == len(self.commits) else self.commits[count].commit_lsn)
        self.epochs.append((count, place))
        return self.newest

    def place(self, epoch: int) -> FakeOffset:
        return self.epochs[epoch][1]

    def rows_at(self, epoch: int) -> dict[Key, Row]:
        return self.state(upto=self.epochs[epoch][0])[0]

    def changes(self, after: int, upto: int) -> pa.RecordBatch:
        """The rows of the log of the epochs in ``(after, upto]``, each epoch's by vnode."""
        rows: list[LogRow] = []
        for epoch in range(after + 1, upto + 1):
            found: list[LogRow] = []
            for transaction in self.commits[self.epochs[epoch - 1][0] : self.epochs[epoch][0]]:
                for seq, (key, row, op) in enumerate(transaction.log):
                    position = _POSITION.pack(transaction.commit_lsn, seq, transaction.xid)
                    found.append((key, row, position, op, len(found), epoch))
            rows += sorted(found, key=lambda row: sum(row[0]) % VNODES)
        return log_batch(self.table, rows)

    def truncated(self, after: int, upto: int) -> tuple[int, int] | None:
        """Epoch and seq of the last TRUNCATE in the epochs ``(after, upto]``."""
        last = None
        for epoch in range(after + 1, upto + 1):
            seq = 0
            for transaction in self.commits[self.epochs[epoch - 1][0] : self.epochs[epoch][0]]:
                if transaction.truncates:
                    last = (epoch, seq)
                seq += len(transaction.log)
        return last

    # -- SnapshotSource --------------------------------------------------------------------------------------------

    def export(self) -> FakeSnapshot:
        self.exported += 1
        made = FakeSnapshot(self, f"s{self.exported}")
        self.snapshots[made.name] = made
        return made

    def order(self, table: SourceTable) -> FakeOrder:
        return FakeOrder()

    def key_range(self, table: SourceTable, part: KeyRange) -> KeyRange:
        return part

    def read(
        self,
        table: SourceTable,
        kind: SplitKind,
        part: KeyRange,
        snapshot: str | None,
        *,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        assert snapshot is not None
        held = self.snapshots[snapshot]
        names = [name for name in table.schema.names if columns is None or name in (*table.key_columns, *columns)]
        for key in held.within(kind, part):
            values = dict(zip(table.schema.names, (*key, *held.rows[key]), strict=True))
            yield pa.RecordBatch.from_pydict({name: [values[name]] for name in names})


def log_batch(table: SourceTable, rows: Sequence[LogRow]) -> pa.RecordBatch:
    """Rows of a log."""
    names = table.schema.names
    values = [(*key, *row) for key, row, *_ in rows]
    columns: dict[str, Any] = {
        name: pa.array([value[n] for value in values], pa.int64()) for n, name in enumerate(names)
    }
    columns["_position"] = pa.array([row[2] for row in rows], pa.binary(16))
    columns["_op"] = pa.array([int(row[3]) for row in rows], pa.int8())
    columns["_seq"] = pa.array([row[4] for row in rows], pa.uint32())
    columns["_epoch"] = pa.array([row[5] for row in rows], pa.uint64())
    return pa.RecordBatch.from_pydict(columns)


def position(lsn: int, xid: int, seq: int = 0) -> bytes:
    return _POSITION.pack(lsn, seq, xid)


def filled(keys: Sequence[int], *, tells_old: bool = True) -> FakeDatabase:
    """A database with these keys, all seen and sealed."""
    database = FakeDatabase(table_of(), tells_old=tells_old)
    if keys:
        database.run(*(((key,), (key, 0)) for key in keys))
    database.seal()
    return database


def _texts(key: Key) -> tuple[str, ...]:
    return tuple(str(value) for value in key)


def _cut(key: Key) -> Cut:
    return Cut(_texts(key))

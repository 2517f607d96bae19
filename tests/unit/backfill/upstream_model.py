"""An upstream table in memory, and a downstream that believes nothing: each row must fit what it has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import pyarrow as pa

from headwater.backfill.snapshot.consume_upstream.errors import ChangeLogGone, UpstreamDropped, VersionExpired
from headwater.backfill.snapshot.consume_upstream.upstream_table import Cut, Part, PartKind, UpstreamTable, VnodeRange
from headwater.log_store.columns import EPOCH, OP, VNODE
from headwater.sources.table import SourceColumn, SourceTable
from headwater.stream import Epoch, Op, vnodes_of

Rows = dict[int, int]
Change = tuple[int, Op, int]
"""Key, op, value."""

TABLE = SourceTable(
    "memory",
    "numbers",
    (SourceColumn("id", pa.int64(), "bigint", 1, nullable=False), SourceColumn("v", pa.int64(), "bigint", 2)),
    ("id",),
)
_SIGN = 1 << 63


def epoch(number: int) -> int:
    """Epochs of tests are small numbers."""
    return int(Epoch.from_ms(number))


def position(key: int) -> bytes:
    return (key + _SIGN).to_bytes(8, "big")


def key_of(place: bytes) -> int:
    return int.from_bytes(place[-8:], "big") - _SIGN


@cache
def vnode_of(key: int, count: int) -> int:
    return int(vnodes_of(pa.table({"id": pa.array([key], pa.int64())}), ["id"], count)[0].as_py())


@dataclass
class MemoryUpstream:
    """Epoch by epoch, all rows.

    :ivar piece_rows: so many rows are read by themselves; 0: a vnode has no cuts.
    :ivar oldest: snapshots from this epoch on are kept, and the changes after it.
    """

    vnode_count: int = 8
    piece_rows: int = 2
    versions: dict[int, Rows] = field(default_factory=lambda: {epoch(1): {}})
    oldest: int = 0
    dropped: bool = False
    holds: dict[str, int] = field(default_factory=dict)
    name: str = "memory:numbers"
    identity: str = "1"

    # -- what happens upstream -------------------------------------------------------------------------------------

    def commit(self, changes: dict[int, int | None], number: int | None = None) -> int:
        """The next epoch: rows come, become others, or go (``None``)."""
        newest = self.newest_epoch()
        made = dict(self.versions[newest])
        for key, value in changes.items():
            if value is None:
                made.pop(key, None)
            else:
                made[key] = value
        following = int(Epoch(newest).next()) if number is None else epoch(number)
        self.versions[following] = made
        return following

    def compact(self, upto: int | None = None) -> None:
        """Forget old epochs, as far as nobody holds them; rows are cut otherwise from now on."""
        self.oldest = max(self.oldest, min([self.newest_epoch() if upto is None else upto, *self.holds.values()]))
        self.piece_rows = self.piece_rows % 3 + 1

    # -- the protocol ----------------------------------------------------------------------------------------------

    def table(self, epoch: int) -> SourceTable:
        return TABLE

    def newest_epoch(self) -> int:
        if self.dropped:
            raise UpstreamDropped("The table is gone.")
        return max(self.versions)

    def next_epoch(self, after: int, upto: int | None = None) -> int | None:
        if after < self.oldest:
            raise ChangeLogGone("The change log is gone.", next_step="Read the table once more.")
        newest = self.newest_epoch()
        found = min((known for known in self.versions if after < known <= newest), default=None)
        return None if found is None or (upto is not None and found > upto) else found

    def wait_for_epoch(self, after: int, timeout: float) -> None:
        pass

    def commit_version(self, epoch: int) -> int:
        return epoch

    def epoch_of_version(self, version: int) -> int:
        return version

    def commit_time_us(self, epoch: int) -> int:
        return Epoch(epoch).unix_ms * 1000

    def epoch_at(self, time_ms: int) -> int | None:
        return min((known for known in self.versions if Epoch(known).unix_ms >= time_ms), default=None)

    def check_changes(self, after: int) -> None:
        """They are always written."""

    def check_snapshot(self, epoch: int) -> None:
        if epoch < self.oldest or epoch not in self.versions:
            raise VersionExpired("The version is gone.", next_step="Read the table once more.")

    def snapshot_cuts(self, epoch: int, vnodes: VnodeRange) -> Sequence[Cut]:
        return self._cuts(sorted(self.versions[epoch]), vnodes)

    def change_cuts(self, after: int, epoch: int, vnodes: VnodeRange) -> Sequence[Cut]:
        if any(found <= self.oldest for found in self._epochs(after, epoch)):
            raise ChangeLogGone("The change log is gone.")
        keys = {key for found in self._epochs(after, epoch) for key, _, _ in self._changes(found)}
        return self._cuts(sorted(keys), vnodes)

    def _cuts(self, keys: list[int], vnodes: VnodeRange) -> list[Cut]:
        made = []
        for vnode in range(*vnodes):
            own = [key for key in keys if vnode_of(key, self.vnode_count) == vnode]
            size = self.piece_rows or len(own) or 1
            for first in range(0, len(own), size):
                made.append(Cut(vnode, position(own[first]) if first else None, len(own[first : first + size])))
        return made

    def snapshot(
        self, epoch: int, vnodes: VnodeRange, *, start: bytes | None = None, end: bytes | None = None
    ) -> Iterator[pa.RecordBatch]:
        self.check_snapshot(epoch)
        rows = self.versions[epoch]
        found = [(key, rows[key]) for key in self._of(sorted(rows), vnodes, start, end)]
        yield pa.record_batch(
            {
                "id": pa.array([key for key, _ in found], pa.int64()),
                "v": pa.array([value for _, value in found], pa.int64()),
                VNODE: pa.array([vnode_of(key, self.vnode_count) for key, _ in found], pa.uint16()),
            }
        )

    def change_log(
        self, after: int, upto: int, vnodes: VnodeRange, *, start: bytes | None = None, end: bytes | None = None
    ) -> Iterator[pa.RecordBatch]:
        if upto <= self.oldest:
            raise ChangeLogGone("The change log is gone.")
        for each in self._epochs(after, upto):
            changes = self._changes(each)
            wanted = set(self._of(sorted({key for key, _, _ in changes}), vnodes, start, end))
            found = [change for change in changes if change[0] in wanted]
            yield pa.record_batch(
                {
                    "id": pa.array([key for key, _, _ in found], pa.int64()),
                    "v": pa.array([value for _, _, value in found], pa.int64()),
                    OP: pa.array([int(op) for _, op, _ in found], pa.int8()),
                    VNODE: pa.array([vnode_of(key, self.vnode_count) for key, _, _ in found], pa.uint16()),
                    EPOCH: pa.array([each] * len(found), pa.uint64()),
                }
            )

    def hold(self, owner: str, epoch: int) -> None:
        self.holds[owner] = epoch

    def release(self, owner: str) -> None:
        self.holds.pop(owner, None)

    def _epochs(self, after: int, upto: int) -> list[int]:
        return sorted(known for known in self.versions if after < known <= upto)

    def _changes(self, number: int) -> list[Change]:
        """Net, in key order."""
        before = max((known for known in self.versions if known < number), default=None)
        old, new = {} if before is None else self.versions[before], self.versions[number]
        made: list[Change] = []
        for key in sorted(old.keys() | new.keys()):
            if key not in old:
                made.append((key, Op.INSERT, new[key]))
            elif key not in new:
                made.append((key, Op.DELETE, old[key]))
            elif old[key] != new[key]:
                made += [(key, Op.UPDATE_DELETE, old[key]), (key, Op.UPDATE_INSERT, new[key])]
        return made

    def _of(self, keys: list[int], vnodes: VnodeRange, start: bytes | None, end: bytes | None) -> list[int]:
        return [
            key
            for key in keys
            if vnodes[0] <= vnode_of(key, self.vnode_count) < vnodes[1]
            and (start is None or position(key) >= start)
            and (end is None or position(key) < end)
        ]


class Unexplained(AssertionError):
    """The downstream was told something that does not follow from what it has."""


@dataclass
class Downstream:
    """What was told, row by row; each must follow from the rows that are there.

    :ivar told: epoch and key of each row of the change log, by vnode; rows of a snapshot have its epoch.
    """

    rows: Rows = field(default_factory=dict)
    told: set[tuple[int, int, int, int]] = field(default_factory=set)

    def copy(self) -> Downstream:
        return Downstream(dict(self.rows), set(self.told))

    def read(self, table: UpstreamTable, part: Part) -> None:
        """Read *part* and apply it."""
        ends = {"start": part.start, "end": part.end}
        if part.kind is PartKind.SNAPSHOT:
            for batch in table.snapshot(part.epoch, part.vnodes, **ends):
                for row in batch.to_pylist():
                    self._insert(part.epoch, row)
            return
        for batch in table.change_log(part.after, part.epoch, part.vnodes, **ends):
            for row in batch.to_pylist():
                match Op(row[OP]):
                    case Op.INSERT | Op.UPDATE_INSERT:
                        self._insert(row[EPOCH], row)
                    case _:
                        self._remove(row[EPOCH], row)

    def _insert(self, number: int, row: dict[str, int]) -> None:
        if row["id"] in self.rows:
            raise Unexplained(f"key {row['id']} comes at epoch {number}, and is there")
        self._tell(number, row, 1)
        self.rows[row["id"]] = row["v"]

    def _remove(self, number: int, row: dict[str, int]) -> None:
        if self.rows.get(row["id"]) != row["v"]:
            raise Unexplained(f"key {row['id']} goes at epoch {number} with another value than it has")
        self._tell(number, row, 0)
        del self.rows[row["id"]]

    def _tell(self, number: int, row: dict[str, int], is_new: int) -> None:
        record = (row[VNODE], number, row["id"], is_new)
        if record in self.told:
            raise Unexplained(f"key {row['id']} is told twice at epoch {number}")
        self.told.add(record)

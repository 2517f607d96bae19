"""A versioned table in memory: a table of ``id`` and ``v`` by vnode, with every epoch of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import pyarrow as pa

from headwater.log_store.columns import EPOCH
from headwater.stream import OP_COLUMN, Op
from headwater.versioned.key_positions import keys

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.int64())])
LOG_SCHEMA = pa.schema([*SCHEMA, (OP_COLUMN, pa.int8()), (EPOCH, pa.uint64())])


def position(key: int) -> bytes:
    """As a versioned table has it."""
    found: bytes = keys(pa.RecordBatch.from_arrays([pa.array([key], pa.int64())], ["id"]), ("id",))[0].as_py()
    return found


class MemoryTable:
    """The vnode of a row is its key modulo the number of vnodes.

    :param batch_rows: of the batches that reads give, at most.
    """

    def __init__(self, vnode_count: int = 4, batch_rows: int = 3) -> None:
        self.vnode_count = vnode_count
        self.batch_rows = batch_rows
        self.base_epoch = 0
        self.pinned: dict[str, int] = {}
        self._versions: dict[int, dict[int, int]] = {0: {}}
        self.reads = 0

    @property
    def newest_epoch(self) -> int:
        return max(self._versions)

    def commit(self, epoch: int, upserts: Mapping[int, int] | None = None, deletes: tuple[int, ...] = ()) -> None:
        """One more epoch."""
        assert epoch > self.newest_epoch
        rows = dict(self._versions[self.newest_epoch])
        for key in deletes:
            rows.pop(key, None)
        self._versions[epoch] = rows | dict(upserts or {})

    def hold(self, epoch: int) -> None:
        """Keep *epoch*, and no longer the one that was held before."""
        self.pinned["downstream"] = epoch

    def forget(self, epoch: int) -> None:
        """The log up to *epoch* was delivered."""
        self.pinned["log"] = epoch

    def epochs(self) -> list[int]:
        """Those that are kept."""
        return list(self._versions)

    def rows(self, epoch: int) -> dict[int, int]:
        """The table as it was at the end of *epoch*."""
        return self._versions[max(known for known in self._versions if known <= epoch)]

    def compact(self) -> None:
        """Forget what no pin needs."""
        self.base_epoch = min([*self.pinned.values(), self.newest_epoch])
        kept = self.rows(self.base_epoch)
        self._versions = {e: rows for e, rows in self._versions.items() if e > self.base_epoch}
        self._versions[self.base_epoch] = kept

    def snapshot(
        self,
        epoch: int,
        vnodes: tuple[int, int],
        *,
        start: bytes | None = None,
        end: bytes | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        assert epoch >= self.base_epoch, "the version is gone"
        for vnode in range(*vnodes):
            found = sorted(
                (key, value)
                for key, value in self.rows(epoch).items()
                if key % self.vnode_count == vnode
                and _within(key, start if vnode == vnodes[0] else None, end if vnode == vnodes[1] - 1 else None)
            )
            for first in range(0, len(found), self.batch_rows):
                part = found[first : first + self.batch_rows]
                self.reads += len(part)
                yield pa.RecordBatch.from_arrays(
                    [pa.array([key for key, _ in part], pa.int64()), pa.array([v for _, v in part], pa.int64())],
                    schema=SCHEMA,
                )

    def vnodes(self, rows: pa.RecordBatch, epoch: int) -> pa.UInt16Array:
        return pa.array([key % self.vnode_count for key in rows.column("id").to_pylist()], pa.uint16())

    def positions(self, rows: pa.RecordBatch, epoch: int) -> pa.BinaryArray:
        return pa.array([position(key) for key in rows.column("id").to_pylist()], pa.binary())

    def log(self, after: int, upto: int) -> Iterator[pa.RecordBatch]:
        """Every change after *after*, epoch by epoch, by vnode and key."""
        assert after >= self.base_epoch, "the log is gone"
        epochs = sorted(epoch for epoch in self.epochs() if after < epoch <= upto)
        for before, epoch in pairwise([after, *epochs]):
            old, new = self.rows(before), self.rows(epoch)
            changes: list[tuple[int, int, Op]] = []
            for key in sorted(old.keys() | new.keys(), key=lambda key: (key % self.vnode_count, key)):
                if key in old and key in new and old[key] != new[key]:
                    changes += [(key, old[key], Op.UPDATE_DELETE), (key, new[key], Op.UPDATE_INSERT)]
                elif key not in new:
                    changes.append((key, old[key], Op.DELETE))
                elif key not in old:
                    changes.append((key, new[key], Op.INSERT))
            rows = [{"id": key, "v": value, OP_COLUMN: int(op), EPOCH: epoch} for key, value, op in changes]
            yield pa.RecordBatch.from_pylist(rows, schema=LOG_SCHEMA)

    def blocks(self, epoch: int, vnodes: tuple[int, int]) -> list[tuple[int, bytes, int, int]]:
        made: list[tuple[int, bytes, int, int]] = []
        for vnode in range(*vnodes):
            found = sorted(key for key in self.rows(epoch) if key % self.vnode_count == vnode)
            for first in range(0, len(found), self.batch_rows):
                part = found[first : first + self.batch_rows]
                made.append((vnode, position(part[0]), len(part), 16 * len(part)))
        return made


def _within(key: int, start: bytes | None, end: bytes | None) -> bool:
    return (start is None or position(key) >= start) and (end is None or position(key) < end)

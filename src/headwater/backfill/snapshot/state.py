"""BackfillState: how far each vnode of one table is, one row per vnode.

``epoch`` is what is being consumed: the snapshot's, later one of the change log. ``position`` is the **next** key to
read, inclusive, as its memcomparable bytes; none where the epoch is finished. A vnode without a row has read nothing.
A position is kept as it is given: its order is that of its bytes.

====================  ===================================================================================
before                what may follow
====================  ===================================================================================
no row                anything
an epoch, consuming   the same epoch with a later position and no fewer rows, or finished; a later epoch
an epoch, finished    a later epoch
the same progress     nothing is written
====================  ===================================================================================

A plan that nobody kept is taken back with :meth:`BackfillState.take_back`, which is no progress and is not checked.
Rows are written when they have changed, and only those.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from headwater.backfill.snapshot.errors import ProgressWentBack, VnodeStateCorrupt
from headwater.state import Catalog, Field, FieldType, Snapshot, StateTable, TableSchema, WriteBatch
from headwater.stream import VnodeBitmap

VNODES: Final = TableSchema(
    "snapshot_backfill_vnodes",
    1,
    key=(Field("table", FieldType.TEXT), Field("vnode", FieldType.UINT)),
    value=(
        Field("epoch", FieldType.UINT),
        Field("row_count", FieldType.INT),
        Field("finished", FieldType.BOOL),
        Field("position", FieldType.BYTES, nullable=True),
    ),
)


@dataclass(frozen=True, slots=True)
class VnodeProgress:
    """How far one vnode is.

    :ivar row_count: rows of *epoch* so far; an update pair counts two.
    :ivar position: the next key to read; ``None``: the epoch is finished.
    """

    epoch: int
    row_count: int
    position: bytes | None = None

    @property
    def is_finished(self) -> bool:
        return self.position is None

    def check_follows(self, before: VnodeProgress, vnode: int) -> None:
        """:raises ProgressWentBack: this may not come after *before*."""
        if self.epoch > before.epoch or self == before:
            return
        why = ""
        if self.epoch < before.epoch:
            why = f"epoch {self.epoch} after epoch {before.epoch}"
        elif before.position is None:
            why = f"epoch {self.epoch} was finished before"
        elif self.row_count < before.row_count:
            why = f"{self.row_count} rows of epoch {self.epoch} after {before.row_count}"
        elif self.position is not None and self.position <= before.position:
            why = f"an earlier key of epoch {self.epoch}"
        if why:
            raise ProgressWentBack(
                f"The progress of vnode {vnode} went back: {why}.",
                next_step="Start the query again: it goes on from what is stored. If it comes again, two processes"
                " run it: headwater status",
            )


class BackfillState:
    """The vnodes of *table* that one owner has, in memory; :meth:`save` writes what has changed.

    :param rows: what is stored of them.
    """

    def __init__(
        self, states: StateTable, table: str, vnodes: VnodeBitmap, rows: Mapping[int, VnodeProgress] | None = None
    ) -> None:
        self._states = states
        self._table = table
        self._stored = dict(rows or {})
        self._rows = dict(self._stored)
        self.vnodes = vnodes

    @staticmethod
    def open_table(catalog: Catalog, batch: WriteBatch) -> StateTable:
        """The state table that all backfills of one store share."""
        return catalog.open_or_create(VNODES, batch)

    @classmethod
    def load(cls, states: StateTable, view: Snapshot, table: str, vnodes: VnodeBitmap) -> BackfillState:
        """What is stored of *table*, for those of its *vnodes* that have a row.

        :raises VnodeStateCorrupt: a row cannot be read.
        """
        found = {vnode: row for vnode, row in _stored(states, view, table) if vnode in vnodes}
        return cls(states, table, vnodes, found)

    # -- looking ---------------------------------------------------------------------------------------------------

    def get(self, vnode: int) -> VnodeProgress | None:
        """``None``: nothing was read of it."""
        return self._rows.get(vnode)

    def items(self) -> Iterator[tuple[int, VnodeProgress | None]]:
        """Every vnode of this owner in order, with its progress."""
        for part in self.vnodes.ranges():
            for vnode in part:
                yield vnode, self._rows.get(vnode)

    @property
    def is_changed(self) -> bool:
        return self._rows != self._stored

    @property
    def is_finished(self) -> bool:
        """Whether every vnode has finished what it was reading."""
        return all(row is not None and row.is_finished for _, row in self.items())

    @property
    def row_count(self) -> int:
        """How many rows the vnodes have read of what they are reading."""
        return sum(row.row_count for _, row in self.items() if row is not None)

    def has_finished(self, epoch: int) -> bool:
        """Whether every vnode has finished *epoch*, or is beyond it."""
        return all(
            row is not None and (row.epoch > epoch or (row.epoch == epoch and row.is_finished))
            for _, row in self.items()
        )

    def rows_of(self, epoch: int) -> int:
        """How many rows of *epoch* the vnodes have read that are at it."""
        return sum(row.row_count for _, row in self.items() if row is not None and row.epoch == epoch)

    # -- changing --------------------------------------------------------------------------------------------------

    def update(self, vnode: int, progress: VnodeProgress) -> bool:
        """*vnode* has come to *progress*; whether that is news.

        :raises ProgressWentBack: it does not follow what was known. :raises ValueError: another owner's vnode.
        """
        if vnode not in self.vnodes:
            raise ValueError(f"vnode {vnode} is not owned")
        before = self._rows.get(vnode)
        if before is not None:
            progress.check_follows(before, vnode)
        self._rows[vnode] = progress
        return progress != before

    def finish(self, epoch: int, row_count: int = 0) -> None:
        """Every vnode has finished *epoch*."""
        for vnode, _ in list(self.items()):
            self.update(vnode, VnodeProgress(epoch, row_count))

    def take_back(self, vnode: int, progress: VnodeProgress | None) -> None:
        """What was planned for *vnode* was not read after all: it stands at *progress* again."""
        if progress is None:
            self._rows.pop(vnode, None)
        else:
            self._rows[vnode] = progress

    def clear(self) -> None:
        """The backfill begins anew."""
        self._rows.clear()

    def save(self, batch: WriteBatch) -> int:
        """Write the rows that have changed; returns how many."""
        changed = 0
        for vnode, row in self._rows.items():
            if self._stored.get(vnode) != row:
                values = (row.epoch, row.row_count, row.is_finished, row.position)
                self._states.put(batch, 0, (self._table, vnode), values)
                changed += 1
        for vnode in self._stored.keys() - self._rows.keys():
            self._states.delete(batch, 0, (self._table, vnode))
            changed += 1
        self._stored = dict(self._rows)
        return changed

    @staticmethod
    def forget(states: StateTable, batch: WriteBatch, table: str) -> None:
        """Nothing of *table* stays."""
        states.delete_range(batch, 0, (table,), (table + "\0",))


def _stored(states: StateTable, view: Snapshot, table: str) -> Iterator[tuple[int, VnodeProgress]]:
    for (_, vnode), values in states.scan_prefix(view, 0, (table,)):
        yield vnode, _progress(vnode, values)


def _progress(vnode: int, values: tuple[Any, ...]) -> VnodeProgress:
    epoch, row_count, finished, position = values
    if row_count < 0 or (not finished and position is None):
        raise VnodeStateCorrupt(
            f"The stored progress of vnode {vnode} cannot be read: it is not finished and has no next key."
        )
    # a position of a finished epoch means nothing, whoever wrote it
    return VnodeProgress(epoch, row_count, None if finished else position)

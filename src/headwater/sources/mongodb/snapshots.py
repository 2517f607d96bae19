"""MongoSnapshots: reads collections at a cluster time; see :mod:`.offset` and :mod:`.part`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pyarrow as pa

from headwater.sources.errors import InvalidRange
from headwater.sources.mongodb.connection import Dsn, shared
from headwater.sources.mongodb.export import MongoSnapshot
from headwater.sources.mongodb.key_order import MongoKeyOrder
from headwater.sources.mongodb.key_values import order_key, read_value
from headwater.sources.mongodb.offset import MongoMark
from headwater.sources.mongodb.part import PartReader
from headwater.sources.splits import Cut, KeyRange, SplitKind
from headwater.sources.table import SourceTable


class MongoSnapshots:
    """The snapshots of one deployment; see :class:`~headwater.sources.snapshots.SnapshotSource`.

    :param dsn: ``mongodb://user:password@host:27017/database?replicaSet=rs0``.
    :raises InvalidDsn: it cannot be read.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = Dsn(dsn)
        self._remarks: dict[str, list[str]] = {}

    def __repr__(self) -> str:
        return f"MongoSnapshots({str(self._dsn)!r})"

    def export(self) -> MongoSnapshot:
        """A new snapshot of this moment. :raises SourceUnreachable: no answer."""
        return MongoSnapshot(self._dsn)

    def order(self, table: SourceTable) -> MongoKeyOrder:
        """The order of its keys. :raises UnsupportedTable: they are of a type whose order is not known."""
        return MongoKeyOrder.of(table)

    def key_range(self, table: SourceTable, part: KeyRange) -> KeyRange:
        """*part* as a person named it, its values as cuts have them. :raises InvalidRange: it has no such."""
        start, end = (None if cut is None else _read(table, cut) for cut in (part.start, part.end))
        if start is not None and end is not None and order_key(start.values[0]) > order_key(end.values[0]):
            raise InvalidRange(
                f"The range of keys of {table.full_name} ends before it begins.",
                next_step="Name the smaller key first.",
            )
        return KeyRange(start, end)

    def read(
        self,
        table: SourceTable,
        kind: SplitKind,
        part: KeyRange,
        snapshot: str | None,
        *,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of *part* inside *snapshot*; see :class:`~headwater.sources.snapshots.SnapshotSource`."""
        at = None if snapshot is None else MongoMark.from_fields(json.loads(snapshot)["MongoDb"]).at.time
        wanted = table.columns if columns is None else tuple(table.column(name) for name in columns)
        remarks = self._remarks.setdefault(table.full_name, [])
        return PartReader(self._dsn, shared(self._dsn), table, part, at, wanted, remarks).batches()

    def take_remarks(self, table: SourceTable) -> list[str]:
        """See :class:`~headwater.sources.snapshots.RemarkingSnapshots`: values that columns did not take."""
        found = self._remarks.get(table.full_name, [])
        taken, found[:] = list(found), []  # a read that goes on adds to the same list
        return taken


def _read(table: SourceTable, cut: Cut) -> Cut:
    if len(cut.values) != 1:
        raise InvalidRange(
            f"The key of {table.full_name} is one value; received {len(cut.values)}.", next_step="Give one value."
        )
    return Cut((read_value(table, cut.values[0]),), cut.after)

"""SnapshotReader: the rows of a table's ranges, inside one exported snapshot."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from headwater.backfill.cdc.upstream_table.external import ExternalStorageTable
from headwater.backfill.units import SplitUnit


class SnapshotReader:
    """Reads units of one table, one range after the other.

    :ivar rows: how many were read.
    """

    def __init__(self, external: ExternalStorageTable) -> None:
        self._external = external
        self.rows = 0

    def read(self, unit: SplitUnit) -> Iterator[pa.RecordBatch]:
        """The rows of *unit*, in no order.

        :raises SnapshotExpired: it must be planned anew. :raises SourceUnreachable: no connection could be had.
        """
        source, table = self._external.source, unit.table
        for part in unit.ranges:
            for batch in source.read(table, unit.kind, part, unit.snapshot, columns=unit.columns):
                self.rows += batch.num_rows
                yield batch

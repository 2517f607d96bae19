"""ExternalStorageTable: a table of a database, with the way to it and the order of its keys."""

from __future__ import annotations

from functools import cached_property

from headwater.sources.snapshots import KeyOrder, SnapshotSource
from headwater.sources.table import SourceTable


class ExternalStorageTable:
    """One table and where it is. It can be pickled; it holds no connection."""

    def __init__(self, table: SourceTable, source: SnapshotSource) -> None:
        self.table = table
        self.source = source

    @cached_property
    def order(self) -> KeyOrder:
        """The order of its keys, asked for once. :raises UnsupportedTable: it cannot be had."""
        return self.source.order(self.table)

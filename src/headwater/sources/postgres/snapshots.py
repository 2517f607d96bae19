"""PostgresSnapshots: reads parts of tables inside exported snapshots, over connections that may break.

A read whose connection broke enters the snapshot once more and runs the same statement, with the same plan: no parallel
workers, no scans that start in the middle. What was given before comes again; its checksums are compared and it is
passed over, and the read goes on after it. Where they differ the order changed, and nothing is made up:
:class:`SnapshotExpired`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from time import sleep
from typing import Final

import pyarrow as pa

from headwater.errors import TransientError
from headwater.log_store.chunk_codec import checksum
from headwater.sources.errors import SnapshotExpired
from headwater.sources.postgres.connection import Dsn
from headwater.sources.postgres.export import PostgresSnapshot
from headwater.sources.postgres.key_order import PostgresKeyOrder, read_order, with_session
from headwater.sources.postgres.key_range import printed_range
from headwater.sources.postgres.part import PartSession
from headwater.sources.postgres.snapshot import BATCH_BYTES, RowFormat, parsed
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceColumn, SourceTable
from headwater.system.retry import Retries

CHANGED_TRIES: Final = 3


class PostgresSnapshots:
    """The snapshots of one database; see :class:`~headwater.sources.snapshots.SnapshotSource`.

    :param dsn: a libpq connection string.
    :param lock_seconds: how long a snapshot waits for a locked table while it plans; ``None``: until it is free.
    :raises InvalidDsn: it cannot be read.
    """

    def __init__(self, dsn: str, lock_seconds: float | None = None) -> None:
        self._dsn = Dsn(dsn)
        self._lock_seconds = lock_seconds

    def __repr__(self) -> str:
        return f"PostgresSnapshots({str(self._dsn)!r})"

    def export(self) -> PostgresSnapshot:
        """A new snapshot of this moment. :raises SourceUnreachable: no answer."""
        return PostgresSnapshot(self._dsn, self._lock_seconds)

    def order(self, table: SourceTable) -> PostgresKeyOrder:
        """The order of its keys. :raises UnsupportedTable: they have none."""
        return read_order(self._dsn, table)

    def key_range(self, table: SourceTable, part: KeyRange) -> KeyRange:
        """*part* as a person named it, its values as the source prints them. :raises InvalidRange: it has no such."""
        return with_session(self._dsn, lambda session: printed_range(session, table, part))

    def read(
        self,
        table: SourceTable,
        kind: SplitKind,
        part: KeyRange,
        snapshot: str | None,
        *,
        columns: Sequence[str] | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of *part* inside *snapshot*; see :class:`~headwater.sources.snapshots.SnapshotSource`."""
        wanted = table.columns if columns is None else tuple(table.column(name) for name in columns)
        reading = _Reading(self._dsn, table, kind, part, snapshot, wanted)
        with contextlib.closing(reading.blocks(batch_bytes)) as blocks:
            yield from parsed(blocks)


class _Reading:
    """One read, over as many connections as it takes."""

    def __init__(
        self,
        dsn: Dsn,
        table: SourceTable,
        kind: SplitKind,
        part: KeyRange,
        snapshot: str | None,
        columns: Sequence[SourceColumn],
    ) -> None:
        self._dsn, self._table, self._kind, self._part = dsn, table, kind, part
        self._snapshot, self._columns = snapshot, columns
        self._given: list[tuple[int, int]] = []

    def blocks(self, size: int) -> Generator[tuple[RowFormat, bytes]]:
        """Whole rows and their format, about *size* bytes at a time.

        :raises SnapshotExpired: the snapshot is gone, or does not show the table as it was.
        :raises SourceUnreachable: the connection broke again and again.
        """
        retries, changes = Retries(sleep=sleep), 0
        while True:
            try:
                with PartSession(self._dsn, self._snapshot) as session:
                    statement, form = session.prepare(self._table, self._kind, self._part, self._columns)
                    for block in self._after_given(session.blocks(statement, size)):
                        yield form, block
                        self._given.append((len(block), checksum(block)))
                        retries.progressed()
                    session.require_unchanged(self._table)
                    return
            except SnapshotExpired:
                changes += 1
                if self._snapshot is not None or self._given or changes == CHANGED_TRIES:
                    raise
            except TransientError as error:
                if self._given and self._snapshot is None:
                    raise
                retries.wait_after(error)

    def _after_given(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        """*blocks* without what was given before."""
        held = b""
        for length, expected in self._given:
            while len(held) < length and (more := next(blocks, b"")):
                held += more
            if len(held) < length or checksum(held[:length]) != expected:
                raise SnapshotExpired(
                    f"Table {self._table.full_name} came in another order when its read was tried again.",
                    next_step="Take a new snapshot.",
                )
            held = held[length:]
        if held:
            yield held
        yield from blocks

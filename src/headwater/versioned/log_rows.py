"""What the log of a table says after its base: net rows of a range of epochs, the columns at an epoch, truncations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from headwater.log_store import LogView
from headwater.log_store.columns import EPOCH, SEQ
from headwater.log_store.consumers import CONSUMERS, Consumer
from headwater.log_store.log import LogRegistry
from headwater.log_store.log_events import RENEWED, SCHEMA, TRUNCATE, events_of
from headwater.log_store.progress import LogStoreVnodeProgress
from headwater.sources.table import FIELD_ID, SourceTable
from headwater.state import Catalog, Snapshot
from headwater.stream import Epoch, VnodeBitmap
from headwater.versioned.fitting import fitted
from headwater.versioned.net_rows import Piece, merge, net, of_log

PIECE_BYTES: Final = 32 << 20


class TableLog:
    """The log of one table in one snapshot of its store."""

    def __init__(self, view: Snapshot, known: SourceTable) -> None:
        self._view = view
        self._known = known
        self._log = LogView(view, LogRegistry.load(view).get(known.full_name))

    @property
    def vnode_count(self) -> int:
        return self._log.log.vnode_count

    @property
    def sealed(self) -> int:
        return int(self._view.epoch)

    def delivered(self, query: str) -> int | None:
        """Up to where *query* has taken it; ``None``: it does not."""
        catalog = Catalog.load(self._view)
        row = None
        if CONSUMERS.name in catalog.names():
            row = catalog.open(CONSUMERS).get(self._view, 0, (self._known.full_name, query))
        if row is None:
            return None
        progress, started = row
        known = Consumer(self._known.full_name, query, LogStoreVnodeProgress.from_json(progress), Epoch(started))
        return int(known.delivered())

    def exact_upto(self, after: int) -> int:
        """The newest epoch that follows from a base at *after*.

        From where the table is captured anew, or gets a column whose values for its rows the log does not tell, it is
        not known until its history was read once more.
        """
        for event in events_of(self._view, self._known.full_name, after, self.sealed):
            told = event.detail
            if event.kind == SCHEMA and (RENEWED in told or (told.get("defaults") is not None and told["added"])):
                return int(event.epoch) - 1
        return self.sealed

    def truncated(self, after: int, upto: int) -> tuple[int, int] | None:
        """Epoch and seq of the last TRUNCATE in ``(after, upto]``."""
        found = [event for event in events_of(self._view, self._known.full_name, after, upto) if event.kind == TRUNCATE]
        return (int(found[-1].epoch), found[-1].seq) if found else None

    def table(self, after: int, epoch: int) -> SourceTable:
        """The table as it is at *epoch*, which is not before *after*."""
        version = None
        for end in self._log.epochs(after, epoch):
            version = end.schema_version
        log = self._log.log
        if version is None:  # no epoch of the range has a word on it: the next one has
            following = next(iter(self._log.epochs(epoch)), None)
            version = log.schema_version if following is None else following.first_schema_version
        schema = log.schema_of(version)
        by_id = {
            field.metadata[FIELD_ID]: field.name for field in schema if field.metadata and FIELD_ID in field.metadata
        }
        keys = tuple(by_id[log.schema.field(name).metadata[FIELD_ID]] for name in log.key_columns)
        return SourceTable.of_log(self._known.namespace, self._known.name, schema, keys, self._known.source_id)

    def rows(self, after: int, upto: int) -> int:
        """How many changes ``(after, upto]`` has."""
        return sum(end.rows for end in self._log.epochs(after, upto))

    def piece(self, table: SourceTable, after: int, upto: int, vnodes: tuple[int, int]) -> Piece:
        """What the epochs in ``(after, upto]`` come to for each key of *vnodes*, in the columns of *table*.

        :raises EpochGone: the log no longer holds it.
        """
        keys, schema = table.key_columns, table.schema
        levels: list[list[Piece]] = []
        for batches in self._portions(table, after, upto, vnodes):
            _add(levels, net(batches, keys, schema))
        pieces = [piece for level in reversed(levels) for piece in level]
        return merge(pieces) if pieces else net([], keys, schema)

    def _portions(
        self, table: SourceTable, after: int, upto: int, vnodes: tuple[int, int]
    ) -> Iterator[list[pa.RecordBatch]]:
        if upto <= after:
            return
        count = self.vnode_count
        wanted = None if vnodes == (0, count) else VnodeBitmap.from_ranges([range(*vnodes)], count)
        truncated = self.truncated(after, upto)
        schema = table.schema
        held: list[pa.RecordBatch] = []
        size = 0
        for batch in self._log.read_range(after, upto, wanted):
            left = _valid(batch, truncated)
            if left.num_rows:
                held.append(of_log(left, fitted(left, schema), schema))
                size += left.nbytes
            if size >= PIECE_BYTES:
                yield held
                held, size = [], 0
        if held:
            yield held


def _add(levels: list[list[Piece]], piece: Piece) -> None:
    """Keep a few pieces of about one size each: a row is merged a few times only."""
    place = 0
    while True:
        if place == len(levels):
            levels.append([])
        levels[place].append(piece)
        if len(levels[place]) < 4:
            return
        piece = merge(levels[place])
        levels[place] = []
        place += 1


def _valid(batch: pa.RecordBatch, truncated: tuple[int, int] | None) -> pa.RecordBatch:
    if truncated is None:
        return batch
    epochs, seqs = batch.column(EPOCH).to_numpy(), batch.column(SEQ).to_numpy()
    left = (epochs > truncated[0]) | ((epochs == truncated[0]) & (seqs >= truncated[1]))
    return batch if left.all() else batch.filter(pa.array(np.asarray(left)))

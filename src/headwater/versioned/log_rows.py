"""What the log of a table says after its base: net rows of a range of epochs, the columns at an epoch, truncations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Final

import pyarrow as pa

from headwater.log_store import LogView
from headwater.log_store.columns import VNODE, valid_rows
from headwater.log_store.consumers import Consumers
from headwater.log_store.log import LogRegistry
from headwater.log_store.log_events import RENEWED, SCHEMA, TRUNCATE, events_of
from headwater.sources.table import FIELD_ID, SourceTable
from headwater.state import Snapshot
from headwater.stream import DEFAULT_VNODE_COUNT, VnodeBitmap, vnodes_of
from headwater.versioned.fitting import fitted
from headwater.versioned.net_rows import Piece, merge, net, of_log

PIECE_BYTES: Final = 32 << 20
VNODES: Final = DEFAULT_VNODE_COUNT
"""Of every kept table; a log that has others is read as a whole."""


class TableLog:
    """The log of one table in one snapshot of its store."""

    def __init__(self, view: Snapshot, known: SourceTable) -> None:
        self._view = view
        self._known = known
        self._log = LogView(view, LogRegistry.load(view).get(known.full_name))

    @property
    def sealed(self) -> int:
        return int(self._view.epoch)

    @property
    def gone(self) -> int:
        """The newest epoch that the log has forgotten."""
        return int(self._log.bounds().gone)

    @property
    def dropped(self) -> int:
        """The newest epoch that it has forgotten though somebody had not read it."""
        return int(self._log.bounds().dropped)

    def exact_upto(self, after: int) -> int:
        """The newest epoch that follows from a base at *after*.

        From where the table is captured anew, or gets a column whose values for its rows the log does not tell, it is
        not known until its history was read once more.
        """
        for event in events_of(self._view, self._known.full_name, after, self.sealed):
            told = event.detail
            if event.kind == SCHEMA and (RENEWED in told or (told.get("defaults") is not None and told["added"])):
                return int(event.epoch.prev())
        return self.sealed

    def truncated(self, after: int, upto: int) -> tuple[int, int] | None:
        """Epoch and seq of the last TRUNCATE in ``(after, upto]``."""
        found = [event for event in events_of(self._view, self._known.full_name, after, upto) if event.kind == TRUNCATE]
        return (int(found[-1].epoch), found[-1].seq) if found else None

    def table(self, epoch: int) -> SourceTable:
        """The table as it is at the end of *epoch*."""
        log = self._log.log
        schema = log.schema_of(self._log.schema_version_at(epoch))
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
        return net_of(table, self._portions(table, after, upto, vnodes))

    def _portions(
        self, table: SourceTable, after: int, upto: int, vnodes: tuple[int, int]
    ) -> Iterator[list[pa.RecordBatch]]:
        if upto <= after:
            return
        count = self._log.log.vnode_count
        is_same = count == VNODES
        wanted = VnodeBitmap.from_ranges([range(*vnodes)], count) if is_same and vnodes != (0, VNODES) else None
        truncated = self.truncated(after, upto)
        schema = table.schema
        held: list[pa.RecordBatch] = []
        size = 0
        for batch in self._log.read_range(after, upto, wanted):
            left = valid_rows(batch, truncated)
            if left.num_rows:
                own = fitted(left, schema)
                rows = of_log(left, own, schema, left.column(VNODE) if is_same else _vnodes(own, table))
                held.append(rows if is_same else _within(rows, vnodes))
                size += left.nbytes
            if size >= PIECE_BYTES:
                yield held
                held, size = [], 0
        if held:
            yield held


def net_of(table: SourceTable, portions: Iterable[list[pa.RecordBatch]]) -> Piece:
    """The piece that portions of rows come to, which have the columns of a piece; later ones are newer."""
    levels: list[list[Piece]] = []
    for batches in portions:
        _add(levels, net(batches, table.key_columns, table.schema))
    pieces = [piece for level in reversed(levels) for piece in level]
    return merge(pieces) if pieces else net([], table.key_columns, table.schema)


def delivered_to(location: str, log: str, query: str) -> tuple[int, int] | None:
    """Where *query* began in the log, and up to where it has it; ``None``: it does not read it."""
    with closing(Consumers(location)) as consumers:
        found = next((one for one in consumers.of(log) if one.name == query and not one.unreadable), None)
    return None if found is None else (int(found.started), int(found.delivered()))


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


def _vnodes(own: list[pa.Array], table: SourceTable) -> pa.UInt16Array:
    return vnodes_of(pa.RecordBatch.from_arrays(own, schema=table.schema), table.key_columns, VNODES)


def _within(rows: pa.RecordBatch, vnodes: tuple[int, int]) -> pa.RecordBatch:
    found = rows.column(VNODE).to_numpy()
    inside = (found >= vnodes[0]) & (found < vnodes[1])
    return rows if inside.all() else rows.filter(pa.array(inside))

"""Lookup: rows by their keys, a few at a time. What was read once stays in memory: blocks of runs, and the log's rows.

The log after the base is kept as a few pieces, to which what was sealed since is added.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from headwater.sources.table import UNAVAILABLE_COLUMN, SourceTable
from headwater.stream import vnodes_of
from headwater.versioned.fitting import cast
from headwater.versioned.key_positions import positions
from headwater.versioned.log_rows import VNODES
from headwater.versioned.merge import place_of
from headwater.versioned.net_rows import GONE, KIND, ROW, VNODE_FIELD, Piece, merge, net
from headwater.versioned.run_file import RunReader
from headwater.versioned.version import Version, Versions, found_pieces

FEW: Final = 256
"""Up to so many keys are searched one by one."""
CACHED_BLOCKS: Final = 256
WINDOW: Final = 32 * 1024
CACHED_EPOCHS: Final = 4
OVERLAYS: Final = 8


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a lookup at one epoch goes by. :ivar overlays: what the log says after the base, the oldest first."""

    table: SourceTable
    base: int
    epoch: int
    runs: tuple[RunReader, ...]
    overlays: tuple[Piece, ...]
    schema_number: int


class Lookup:
    """Of one table; one thread."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._blocks: OrderedDict[tuple[str, int, int], Piece] = OrderedDict()
        self._prepared: OrderedDict[int | None, tuple[tuple[int, str], _Prepared]] = OrderedDict()
        self._schemas: dict[bytes, int] = {}

    def find(self, wanted: pa.Table, epoch: int | None, columns: Sequence[str] | None) -> pa.Table:
        """The rows of the keys *wanted*, in their order."""
        ready = self._ready(epoch)
        table = ready.table
        places = _positions(wanted, table)
        names = table.schema.names if columns is None else list(columns)
        if len(places) > FEW:
            return _many(ready.runs, ready.overlays, places, table).select(names)
        found: list[pa.RecordBatch] = []
        sources: list[RunReader | Piece] = [*ready.runs, *ready.overlays]
        for position in places.to_pylist():
            row = self._row(sources, position, ready)
            if row is not None:
                found.append(row)
        if not found:
            return table.schema.empty_table().select(names)
        return pa.Table.from_batches(found).select(names)

    def _ready(self, epoch: int | None) -> _Prepared:
        mark = self._versions.mark()
        known = self._prepared.get(epoch)
        if known is not None and known[0] == mark:
            return known[1]
        with self._versions.at(epoch) as version:
            table = version.table
            number = self._schemas.setdefault(table.schema.serialize().to_pybytes(), len(self._schemas))
            overlays = self._overlays(version, None if known is None else known[1], number)
            made = _Prepared(table, version.base, version.epoch, version.runs(), overlays, number)
        self._prepared[epoch] = (mark, made)
        if len(self._prepared) > CACHED_EPOCHS:
            self._prepared.popitem(last=False)
        return made

    def _overlays(self, version: Version, known: _Prepared | None, number: int) -> tuple[Piece, ...]:
        """What the log says after the base: what was known, and what came since."""
        after = version.base
        kept: tuple[Piece, ...] = ()
        if (
            known is not None
            and (known.base, known.schema_number) == (version.base, number)
            and known.epoch <= version.epoch
            and version.log.truncated(known.epoch, version.epoch) is None
        ):
            after, kept = known.epoch, known.overlays
        fresh = version.overlay(after, version.epoch, (0, VNODES))
        if not len(fresh):
            return kept
        return (*kept, fresh) if len(kept) < OVERLAYS else (merge([*kept, fresh]),)

    def _row(self, sources: Sequence[RunReader | Piece], position: bytes, ready: _Prepared) -> pa.RecordBatch | None:
        older: list[Piece] = []
        for source in reversed(sources):
            piece = source if isinstance(source, Piece) else self._block(source, position, ready)
            if piece is None or not len(piece):
                continue
            place = place_of(piece.positions, position)
            if place == len(piece) or piece.positions[place].as_py() != position:
                continue
            older.insert(0, piece.slice(place, place + 1))
            kind = piece.rows.column(KIND)[place].as_py()
            is_whole = kind == ROW and not piece.rows.column(UNAVAILABLE_COLUMN)[place].is_valid
            if kind == GONE or is_whole:
                break
        if not older:
            return None
        net = merge(older) if len(older) > 1 else older[0]
        return net.rows if net.rows.column(KIND)[0].as_py() == ROW else None

    def _block(self, run: RunReader, position: bytes, ready: _Prepared) -> Piece | None:
        block = run.block_of(position)
        if block is None:
            return None
        key = (run.info.name, block, ready.schema_number)
        piece = self._blocks.get(key)
        if piece is None:
            rows = run.read(block, ready.table.schema)
            piece = self._blocks[key] = Piece(rows, positions(rows, ready.table.key_columns))
            if len(self._blocks) > CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(key)
        return piece


def _positions(wanted: pa.Table, table: SourceTable) -> pa.BinaryArray:
    names = list(table.key_columns)
    batch = wanted.select(names).combine_chunks()
    columns = [
        cast(batch.column(name).combine_chunks(), table.column(name).type)
        if batch.num_rows
        else pa.nulls(0, table.column(name).type)
        for name in names
    ]
    rows = pa.RecordBatch.from_arrays(columns, names)
    vnodes = vnodes_of(rows, names, VNODES)
    return positions(rows.append_column(VNODE_FIELD, vnodes), names)


def _many(runs: Sequence[RunReader], overlays: Sequence[Piece], places: pa.BinaryArray, table: SourceTable) -> pa.Table:
    ordered = pc.unique(places)
    ordered = ordered.take(pc.array_sort_indices(ordered))
    nothing = net([], table.key_columns, table.schema)
    overlay = merge(overlays) if overlays else nothing
    found = list(found_pieces(table, runs, overlay, ordered, WINDOW))
    rows = pa.Table.from_batches([piece.rows for piece in found], None if found else nothing.rows.schema)
    there = pa.concat_arrays([piece.positions for piece in found]) if found else ordered.slice(0, 0)
    order = pc.index_in(places, value_set=there).drop_null()
    return rows.take(order)

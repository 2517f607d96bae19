"""Lookup: rows by their keys, a few at a time. What was read once stays in memory: blocks of runs, and the log's rows.

The log after the base is kept as a few pieces, to which what was sealed since is added.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from headwater.sources.table import UNAVAILABLE_COLUMN, SourceTable
from headwater.stream import vnodes_of
from headwater.versioned.fitting import cast
from headwater.versioned.key_positions import positions
from headwater.versioned.log_rows import VNODES
from headwater.versioned.merge import place_of
from headwater.versioned.net_rows import GONE, KIND, ROW, VNODE_FIELD, Piece, merge
from headwater.versioned.run_file import RunReader
from headwater.versioned.version import Version, Versions

FEW: Final = 256
"""Up to so many keys are searched one by one."""
CACHED_BLOCKS: Final = 256
CACHED_OVERLAYS: Final = 4


class Lookup:
    """Of one table; one thread."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._blocks: OrderedDict[tuple[str, int, int], Piece] = OrderedDict()
        self._overlays: OrderedDict[tuple[int, int], list[Piece]] = OrderedDict()
        self._schemas: dict[bytes, int] = {}

    def find(self, wanted: pa.Table, epoch: int | None, columns: Sequence[str] | None) -> pa.Table:
        """The rows of the keys *wanted*, in their order."""
        with self._versions.at(epoch) as version:
            table = version.table
            places = _positions(wanted, table)
            overlays = self._overlay(version)
            runs = version.runs()
        names = table.schema.names if columns is None else list(columns)
        if not len(places):
            return table.schema.empty_table().select(names)
        if len(places) > FEW:
            return _many(version, runs, overlays, places).select(names)
        found: list[pa.RecordBatch] = []
        sources: list[RunReader | Piece] = [*runs, *overlays]
        for position in places.to_pylist():
            row = self._row(sources, position, table)
            if row is not None:
                found.append(row)
        if not found:
            return table.schema.empty_table().select(names)
        return pa.Table.from_batches(found).select(names)

    def _row(self, sources: Sequence[RunReader | Piece], position: bytes, table: SourceTable) -> pa.RecordBatch | None:
        older: list[Piece] = []
        for source in reversed(sources):
            piece = source if isinstance(source, Piece) else self._block(source, position, table)
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

    def _block(self, run: RunReader, position: bytes, table: SourceTable) -> Piece | None:
        block = run.block_of(position)
        if block is None:
            return None
        key = (run.info.name, block, self._schema_number(table))
        piece = self._blocks.get(key)
        if piece is None:
            rows = run.read(block, table.schema)
            piece = self._blocks[key] = Piece(rows, positions(rows, table.key_columns))
            if len(self._blocks) > CACHED_BLOCKS:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(key)
        return piece

    def _schema_number(self, table: SourceTable) -> int:
        return self._schemas.setdefault(table.schema.serialize().to_pybytes(), len(self._schemas))

    def _overlay(self, version: Version) -> list[Piece]:
        """What the log says after the base, the oldest first."""
        key = (version.base, version.epoch)
        found = self._overlays.get(key)
        if found is None:
            piece = version.overlay(version.base, version.epoch, (0, VNODES))
            found = self._overlays[key] = [piece] if len(piece) else []
            if len(self._overlays) > CACHED_OVERLAYS:
                self._overlays.popitem(last=False)
        return found


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


def _many(version: Version, runs: Sequence[RunReader], overlays: Sequence[Piece], places: pa.BinaryArray) -> pa.Table:
    ordered = pc.unique(places)
    ordered = ordered.take(pc.array_sort_indices(ordered))
    overlay = merge(overlays) if overlays else version.nothing()
    found = list(version.found(runs, overlay, ordered, 32 * 1024))
    rows = pa.Table.from_batches([piece.rows for piece in found], None if found else version.nothing().rows.schema)
    there = pa.concat_arrays([piece.positions for piece in found]) if found else ordered.slice(0, 0)
    order = pc.index_in(places, value_set=there).drop_null()
    return rows.take(order)

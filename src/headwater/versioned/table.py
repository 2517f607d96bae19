"""VersionedTable: a table of ours at any epoch from its base on: the base, and what its log says after it.

The base is sorted runs, the newest last (:mod:`headwater.versioned.run_file`), kept by a sink of kind ``table``, which
folds the log into it. It may be read in any process, and pickled; what it needs is opened where it is used. Whoever
needs an epoch for longer than one call pins it: the base does not go past a pin.

Rows come in the order of their positions: by vnode, then by key, ascending, texts by their bytes. A *start* or *end* is
the position of a key within its vnode (:meth:`VersionedTable.positions`), as bytes: *start*, inclusive, in the first
vnode of the range, *end*, exclusive, in the last one.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from headwater.sources.table import UNAVAILABLE_COLUMN, SourceTable
from headwater.stream import vnodes_of
from headwater.stream.epoch import PHYSICAL_SHIFT
from headwater.versioned import pins as pin_files
from headwater.versioned.changes import changes_schema, paired
from headwater.versioned.errors import BaseGone, UnknownVnodes
from headwater.versioned.fitting import cast
from headwater.versioned.folder import TableFolder
from headwater.versioned.key_positions import keys, positions, vnode_position
from headwater.versioned.log_rows import VNODES
from headwater.versioned.merge import BlockHead, PieceHead, between, merged, piece_heads, place_of, run_heads
from headwater.versioned.net_rows import GONE, KIND, ROW, VNODE_FIELD, Piece, merge, net
from headwater.versioned.pins import Pin, PinInfo
from headwater.versioned.run_file import RunReader
from headwater.versioned.version import Version, Versions, finished_pieces, found_pieces

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
    """Rows of one table by their keys, a few at a time; one thread.

    What was read once stays in memory: blocks of runs, and the log's rows. The log after the base is kept as a few
    pieces, to which what was sealed since is added.
    """

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


_PIN_SECONDS: Final = 2.0
OVERLAY_ROWS: Final = 1_000_000
"""About so many changes of the log are in memory at a time."""


class Block(NamedTuple):
    """Some rows that lie together: those of *vnode* from *first* on, up to the next block."""

    vnode: int
    first: bytes
    rows: int
    bytes: int


class VersionedTable:
    """One kept table.

    :raises TableNotKept: there is none of that name. :raises NotComplete: its history is not read yet.
    """

    def __init__(self, store: str, table: str, folder: str | Path) -> None:
        self._store, self._name, self._root = store, table, Path(folder)
        self._folder = TableFolder(folder, table)
        self._versions = Versions(store, self._folder)
        self._lookup = Lookup(self._versions)

    def __reduce__(self) -> tuple[Any, ...]:
        return VersionedTable, (self._store, self._name, self._root)

    @classmethod
    def open(cls, store: str, table: str, folder: str | Path) -> VersionedTable:
        """The table *table* (``schema.name``) of the log store *store*, among the kept tables in *folder*."""
        made = cls(store, table, folder)
        with made._versions.at():
            return made

    def close(self) -> None:
        """Let go of the store; it is opened again when it is needed."""
        self._versions.close()

    # -- what there is ---------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._name

    @property
    def base_epoch(self) -> int:
        """The oldest epoch that can be read."""
        with self._versions.at() as version:
            return version.base

    @property
    def newest_epoch(self) -> int:
        """The newest epoch that can be read: the newest that is sealed."""
        with self._versions.at() as version:
            return version.newest

    @property
    def vnode_count(self) -> int:
        return VNODES

    def table(self, epoch: int) -> SourceTable:
        """The table with the columns that it has at *epoch*. :raises BaseGone: :raises NotYet: as :meth:`snapshot`."""
        with self._versions.at(epoch) as version:
            return version.table

    def positions(self, rows: pa.RecordBatch, epoch: int) -> pa.BinaryArray:
        """The position of each row within its vnode; *rows* have the key columns."""
        return keys(rows, self.table(epoch).key_columns)

    def vnodes(self, rows: pa.RecordBatch, epoch: int) -> pa.UInt16Array:
        """The vnode of each row; *rows* have the key columns."""
        with self._versions.at(epoch) as version:
            return vnodes_of(rows, version.table.key_columns, VNODES)

    # -- rows ------------------------------------------------------------------------------------------------------

    def snapshot(
        self,
        epoch: int,
        vnodes: tuple[int, int],
        *,
        start: bytes | None = None,
        end: bytes | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of *vnodes* (half-open) as they are at *epoch*, with the columns of :meth:`table` or *columns*.

        :raises BaseGone: the epoch is before the base. :raises NotYet: it is not sealed, or not known yet.
        """
        for part in self._parts(epoch, vnodes):
            with self._versions.at(epoch) as version:
                wanted = _wanted(version.table, columns)
                low, high = _bounds(part, vnodes, start, end)
                overlay = between(version.overlay(version.base, epoch, part), low, high)
                runs = version.runs()
            names = version.table.schema.names if columns is None else list(columns)
            for rows in _merged(version, runs, overlay, low, high, wanted):
                kept = rows.finished() if isinstance(rows, Piece) else rows
                if kept.num_rows:
                    yield kept.select(names)

    def changes(
        self,
        after: int,
        upto: int,
        vnodes: tuple[int, int],
        *,
        start: bytes | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """What became of the rows of *vnodes* from *after* to *upto*: one record for each key that was changed.

        An insert, a delete, or an ``update_delete`` and the ``update_insert`` right after it, with the columns of
        :meth:`table` at *upto* or *columns*, then ``_op`` and ``_vnode``.

        :raises BaseGone: *after* is before the base. :raises NotYet: *upto* is not sealed, or not known yet.
        """
        for part in self._parts(upto, vnodes, after):
            with self._versions.at(after, upto) as version:
                low, high = _bounds(part, vnodes, start, None)
                fresh = between(version.overlay(after, upto, part), low, high)
                before = between(version.overlay(version.base, after, part), low, high)
                is_truncated = version.log.truncated(after, upto) is not None
                runs = version.runs(after)
            schema = changes_schema(version.table.schema, columns)
            if is_truncated:
                whole = _merged(version, runs, before, low, high, version.table.schema)
                old: Iterator[Piece] = finished_pieces(version.table, whole)
            else:
                old = found_pieces(version.table, runs, before, fresh.positions, WINDOW)
            for rows in paired(old, fresh, schema):
                if rows.num_rows:
                    yield rows

    def lookup(self, rows: pa.Table, epoch: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of these keys at *epoch* (the newest), in the order of the keys; those that are not there are not.

        :param rows: the key columns.
        """
        return self._lookup.find(rows, epoch, columns)

    def blocks(self, epoch: int, vnodes: tuple[int, int]) -> list[Block]:
        """About how the rows of *vnodes* at *epoch* lie, for whoever plans: a read may begin at each of them."""
        with self._versions.at(epoch) as version:
            runs = version.runs()
        made: list[Block] = []
        first, last = vnodes
        low, high = vnode_position(first), vnode_position(last)
        largest = max(runs, key=lambda run: run.info.size, default=None)
        starts = [vnode_position(vnode) for vnode in range(first, last)]
        if largest is not None:
            starts += [at for at in largest.firsts if low < at < high]
        for place, at in enumerate(bounds := [*sorted(set(starts)), high]):
            if at == high:
                break
            rows, size = version.share(runs, at, bounds[place + 1])
            made.append(Block(int.from_bytes(at[:2], "big"), at[2:], rows, size))
        return made

    # -- pins ------------------------------------------------------------------------------------------------------

    def pin(self, owner: str, epoch: int | None = None, *, name: str | None = None) -> Pin:
        """Keep *epoch* (the newest) readable until the pin is released.

        :param owner: who needs it, for ``status``.
        :param name: of a pin that outlives its process: who comes later pins it again, or releases it
            (:meth:`release`). Without one it goes with its process.
        :raises BaseGone: the epoch is folded, or about to be. :raises NotComplete: the history is being read.
        """
        end = time.monotonic() + _PIN_SECONDS
        while True:
            with self._versions.at(epoch) as version:
                chosen = version.newest if epoch is None else epoch
            whole = max(version.base, chosen >> PHYSICAL_SHIFT << PHYSICAL_SHIFT)  # batches end at epochs
            try:
                return pin_files.put_pin(self._root, self._folder.path, self._name, owner, whole, name)
            except BaseGone:
                if epoch is not None or time.monotonic() > end:
                    raise
                time.sleep(0.01)  # a newer epoch was sealed and chosen meanwhile

    def release(self, name: str) -> None:
        """Release the pin that was called so; one that is gone is no error."""
        Pin(self._folder.path / pin_files.FOLDER / f"{name}.json", 0).release()

    def pins(self) -> list[PinInfo]:
        """All pins of the table, the lowest epoch first."""
        return pin_files.pins_in(self._folder.path)

    # -- within ----------------------------------------------------------------------------------------------------

    def _parts(self, upto: int, vnodes: tuple[int, int], after: int | None = None) -> Iterator[tuple[int, int]]:
        """*vnodes* in parts of which the log has little enough."""
        with self._versions.at(upto if after is None else after, upto) as version:
            _check_vnodes(vnodes)
            share = version.log.rows(version.base, upto) * (vnodes[1] - vnodes[0]) // VNODES
        parts = max(1, min(vnodes[1] - vnodes[0], share // OVERLAY_ROWS))
        cuts = [vnodes[0] + (vnodes[1] - vnodes[0]) * part // parts for part in range(parts + 1)]
        yield from pairwise(cuts)


def _merged(
    version: Version, runs: Sequence[Any], overlay: Piece, low: bytes, high: bytes, wanted: pa.Schema
) -> Iterator[pa.RecordBatch | Piece]:
    names = [*wanted.names, *(field for field in overlay.rows.schema.names if field not in version.table.schema.names)]
    keys_of = version.table.key_columns
    sources: list[Iterator[BlockHead | PieceHead]] = [run_heads(run, low, high, wanted, keys_of) for run in runs]
    if len(overlay):
        sources.append(piece_heads(Piece(overlay.rows.select(names), overlay.positions)))
    for rows in merged(sources):
        if isinstance(rows, Piece):
            yield rows
        else:
            yield rows if all(run.info.plain for run in runs) else Piece(rows, _NO_POSITIONS)


_NO_POSITIONS: Final = pa.nulls(0, pa.binary())


def _wanted(table: SourceTable, columns: Sequence[str] | None) -> pa.Schema:
    """The fields to be read: those that are asked for, and the key."""
    names = table.schema.names if columns is None else [*columns, *(k for k in table.key_columns if k not in columns)]
    return pa.schema([table.schema.field(name) for name in names])


def _bounds(
    part: tuple[int, int], whole: tuple[int, int], start: bytes | None, end: bytes | None
) -> tuple[bytes, bytes]:
    low, high = vnode_position(part[0]), vnode_position(part[1])
    if start is not None and part[0] == whole[0]:
        low += start
    if end is not None and part[1] == whole[1]:
        high = vnode_position(whole[1] - 1) + end
    return low, high


def _check_vnodes(vnodes: tuple[int, int]) -> None:
    if not 0 <= vnodes[0] < vnodes[1] <= VNODES:
        raise UnknownVnodes(f"Received the vnodes {vnodes[0]} to {vnodes[1]}; the table has {VNODES}.")

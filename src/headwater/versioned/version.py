"""Version: a kept table in one snapshot of its log store: base, runs, log; Versions: what a process keeps open of them.

The snapshot of the log is taken first and the newest manifest is read after it, so that what the log has forgotten is
in the runs. A table that had no changes for a while has an old manifest: up to where its query has delivered nothing
was missed, and that is its base.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from headwater.sources.table import SourceTable
from headwater.state import StateReader, open_reader
from headwater.versioned.errors import BaseGone, NotComplete, NotYet, TableNotKept
from headwater.versioned.folder import TableFolder
from headwater.versioned.key_positions import positions
from headwater.versioned.log_rows import TableLog, delivered_to
from headwater.versioned.manifest import Manifest
from headwater.versioned.merge import place_of
from headwater.versioned.net_rows import Piece, merge
from headwater.versioned.run_file import RunReader

READ_ATTEMPTS: Final = 20


class Version:
    """A table at an epoch, for as long as its snapshot is open."""

    def __init__(
        self, log: TableLog, manifest: Manifest, base: int, epoch: int | None, opened: Sequence[RunReader]
    ) -> None:
        self.log, self.manifest, self.base = log, manifest, base
        self._epoch = epoch
        self._runs = tuple(opened)
        self._table: SourceTable | None = None
        self._void = self.epoch > base and log.truncated(base, self.epoch) is not None

    @cached_property
    def newest(self) -> int:
        return self.log.exact_upto(self.base)

    @cached_property
    def epoch(self) -> int:
        return self.newest if self._epoch is None else self._epoch

    @property
    def table(self) -> SourceTable:
        """As it is at the epoch."""
        if self._table is None:
            self._table = self.log.table(self.epoch)
        return self._table

    def runs(self, epoch: int | None = None) -> tuple[RunReader, ...]:
        """The runs that count at *epoch*, the oldest first: none after a TRUNCATE."""
        if epoch is None:
            is_void = self._void
        else:
            is_void = self.log.truncated(self.base, epoch) is not None
        return () if is_void else self._runs

    def overlay(self, after: int, upto: int, vnodes: tuple[int, int]) -> Piece:
        """What the log says of ``(after, upto]``, in the columns of :attr:`table`."""
        return self.log.piece(self.table, after, upto, vnodes)

    def share(self, runs: Sequence[RunReader], low: bytes, high: bytes) -> tuple[int, int]:
        """About how many rows and bytes lie in ``[low, high)``: a block counts where it begins."""
        rows = size = 0
        for run in runs:
            for block in run.blocks(low, high):
                if run.firsts[block] >= low:
                    rows += run.block_rows[block]
                    size += run.block_bytes[block]
        return rows, size


def found_pieces(
    table: SourceTable, runs: Sequence[RunReader], overlay: Piece, wanted: pa.BinaryArray, window: int
) -> Iterator[Piece]:
    """The rows at the sorted positions *wanted*, as pieces of whole rows, *window* positions at a time."""
    keys, schema = table.key_columns, table.schema
    for start in range(0, len(wanted), window):
        some = wanted.slice(start, window)
        low, high = some[0].as_py(), some[-1].as_py()
        pieces: list[Piece] = []
        for run in runs:
            for block in run.blocks(low, high + b"\x00"):
                rows = run.read(block, schema)
                places = positions(rows, keys)
                chosen = pc.is_in(places, value_set=some)
                if pc.any(chosen).as_py():
                    pieces.append(Piece(rows.filter(chosen), places.filter(chosen)))
        part = overlay.slice(place_of(overlay.positions, low), place_of(overlay.positions, high + b"\x00"))
        if len(part):
            chosen = pc.is_in(part.positions, value_set=some)
            pieces.append(Piece(part.rows.filter(chosen), part.positions.filter(chosen)))
        if pieces:
            yield from finished_pieces(table, [merge(pieces)])


def finished_pieces(table: SourceTable, merged: Iterable[pa.RecordBatch | Piece]) -> Iterator[Piece]:
    """The rows that are there, with their positions."""
    for found in merged:
        rows = found.finished() if isinstance(found, Piece) else found
        if rows.num_rows:
            yield Piece(rows, positions(rows, table.key_columns))


class Versions:
    """Opens versions of one table; keeps the store and the files of the newest one open."""

    def __init__(self, store: str, folder: TableFolder) -> None:
        self._store, self._folder = store, folder
        self._reader: StateReader | None = None
        self._pid = 0
        self._manifest = Manifest()
        self._passed: tuple[str, int] | None = None
        self._runs: dict[str, RunReader] = {}

    @contextmanager
    def at(self, epoch: int | None = None, upto: int | None = None) -> Iterator[Version]:
        """The table at *upto*, of which *epoch* must be kept as well; by default at the newest epoch.

        :raises BaseGone: *epoch* is before the base. :raises NotYet: *upto* is not sealed, or not known yet.
        :raises TableNotKept: :raises NotComplete: it cannot be read.
        """
        for _ in range(READ_ATTEMPTS):
            with self._open().snapshot() as view:
                manifest = self._newest()
                if manifest.epoch > view.epoch:  # folded after the snapshot was taken
                    continue
                log = TableLog(view, self._checked(manifest))
                base = self._base(manifest, log)
                try:
                    runs = self._opened(manifest)
                except FileNotFoundError:  # merged into others meanwhile
                    self._manifest = Manifest()
                    continue
                version = Version(log, manifest, base, epoch if upto is None else upto, runs)
                self._check(version, epoch)
                yield version
                return
        raise NotYet(f"The files of {self._folder.name} change all the time.", next_step="Try again.")

    def _base(self, manifest: Manifest, log: TableLog) -> int:
        """The epoch of the runs, or up to where the log went on without a change of this table."""
        gone = log.gone
        if gone <= manifest.epoch:
            return manifest.epoch
        if self._passed != (manifest.id, gone):
            found = delivered_to(self._store, self._folder.name, manifest.query)
            if found is None or found[0] > manifest.epoch or found[1] < gone or log.dropped > manifest.epoch:
                raise self._not_kept(
                    f"The kept table {self._folder.name} is at epoch {manifest.epoch}, and its log begins at {gone}: "
                    "nobody keeps it any more."
                )
            self._passed = (manifest.id, gone)
        return gone

    def mark(self) -> tuple[int, str]:
        """Changes when there is something new."""
        return int(self._open().committed_epoch()), self._newest().id

    def _check(self, version: Version, epoch: int | None) -> None:
        if epoch is not None and epoch < version.base:
            raise BaseGone(
                f"The kept table {self._folder.name} is folded up to epoch {version.base}: epoch {epoch} is gone.",
                version.base,
                next_step=f"Read epoch {version.base} or a later one, and pin it for as long as you need it.",
            )
        if version.epoch > version.newest:
            why = "is not sealed yet" if version.epoch > version.log.sealed else "is known once its history is read"
            raise NotYet(
                f"Epoch {version.epoch} of {self._folder.name} {why}: the newest is {version.newest}.",
                next_step="Wait, or read an earlier epoch.",
            )

    def _checked(self, manifest: Manifest) -> SourceTable:
        if manifest.table is None:
            raise self._not_kept(f"The table {self._folder.name} is not kept in {self._folder.root}.")
        if manifest.exact is None:
            told = self._folder.progress()
            shown = f" ({told['rows']} of about {told['total']} rows)" if told.get("total") else ""
            raise NotComplete(
                f"The history of {self._folder.name} is not kept as a whole yet{shown}.",
                told,
                next_step="Wait until headwater status shows that its history is read.",
            )
        return manifest.table

    def _not_kept(self, message: str) -> TableNotKept:
        return TableNotKept(message, next_step='Add a sink with kind = "table" to the pipeline, and run it.')

    def _open(self) -> StateReader:
        if self._reader is None or self._pid != os.getpid():
            self._reader, self._pid = open_reader(self._store), os.getpid()
        return self._reader

    def _newest(self) -> Manifest:
        known = self._manifest
        if not known.number or not self._folder.is_newest(known.number):
            self._manifest = self._folder.newest()
        return self._manifest

    def _opened(self, manifest: Manifest) -> list[RunReader]:
        if self._runs.keys() != {run.name for run in manifest.runs}:
            self._runs = {run.name: self._runs.get(run.name) or self._folder.open(run) for run in manifest.runs}
        return [self._runs[run.name] for run in manifest.runs]

    def close(self) -> None:
        if self._reader is not None and self._pid == os.getpid():
            self._reader.close()
        self._reader = None
        self._runs = {}

"""The check of one table: what the source has against what the mirror shows, while both move.

All rows of both sides are read once and compared by their digests. What differs may only be on its way, so it is read
again, round after round: first at the source, in a snapshot; then, when everything up to that snapshot has been
delivered, at the mirror. A key that the source shows unchanged before and after such a read of the mirror, and that is
different there, :data:`STRIKES` times in a row, is a difference. One that goes on changing is never counted: it is
*unsettled*.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.backfill.units import covered
from headwater.pipeline.verify.digests import (
    KEY,
    PAIR,
    ROWS_PER_PART,
    DigestFiles,
    Digests,
    Hashes,
    by_key,
    differing,
    digests_of,
    pairs,
)
from headwater.sources.errors import UnsupportedTable
from headwater.sources.offset import CdcOffset
from headwater.sources.snapshots import ExportedSnapshot, SnapshotSource
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import SourceTable
from headwater.stream.vnode import hash_keys

STRIKES: Final = 2
SPLIT_ROWS: Final = 100_000


class Mirror(Protocol):
    """Where the tables of a source can be seen again."""

    def sent(self, table: SourceTable, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the source in the types in which the mirror has them."""
        ...

    def received(self, table: SourceTable, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the mirror in the types of the source."""
        ...

    def read(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """All rows that it shows now; null where it does not have a column yet."""
        ...


Delivered = Callable[[CdcOffset, float], bool]
"""Waits until the mirror shows all that committed up to a position, at most so many seconds; whether it does."""
Progress = Callable[[int, int], None]
"""How many rows of how many were read."""


@dataclass(frozen=True, slots=True)
class Options:
    """How a table is checked.

    :ivar rounds: how often what differs is read again, at most.
    :ivar patience: seconds to wait for the mirror in each of them.
    :ivar keys: how many keys of differences are told.
    """

    split_rows: int = SPLIT_ROWS
    rounds: int = 12
    patience: float = 60.0
    keys: int = 0


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found of one table.

    :ivar mismatches: rows with another value at the mirror. :ivar missing: rows that it does not have.
    :ivar extra: rows that only it has. :ivar doubled: keys that it has more often than the source.
    :ivar unsettled: keys that differed whenever they were looked at and did not rest; no differences.
    :ivar is_behind: the mirror did not come up to the source while it was waited for: differences may be on their way.
    :ivar ranges: where the differences are. :ivar keys: some of them, where they were asked for.
    :ivar sink: the label of the mirror, where there are several.
    """

    table: str
    source_rows: int
    mirror_rows: int
    mismatches: int = 0
    missing: int = 0
    extra: int = 0
    doubled: int = 0
    unsettled: int = 0
    rounds: int = 0
    seconds: float = 0.0
    is_behind: bool = False
    ranges: tuple[KeyRange, ...] = ()
    keys: tuple[dict[str, Any], ...] = ()
    sink: str = ""

    @property
    def differences(self) -> int:
        return self.mismatches + self.missing + self.extra + self.doubled

    @property
    def is_right(self) -> bool:
        return not self.differences and not self.is_behind


def check_table(
    source: SnapshotSource,
    table: SourceTable,
    mirror: Mirror,
    delivered: Delivered,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Findings:
    """Compare *table* at *source* with what *mirror* shows of it.

    :raises SourceNotFound: the source has no such table. :raises SourceUnreachable: no answer.
    """
    began = time.monotonic()
    with closing(source.export()) as snapshot:
        here = _Here(source, snapshot.table(table), snapshot, options or Options())
    check = _Check(here, _There(mirror, here.table), delivered, options or Options())
    check.compare(progress or (lambda _done, _total: None))
    check.settle()
    return check.findings(time.monotonic() - began)


class _Here:
    """The table at the source, split as *snapshot* plans it."""

    def __init__(
        self, source: SnapshotSource, table: SourceTable, snapshot: ExportedSnapshot, options: Options
    ) -> None:
        self.source, self.table = source, table
        self.columns = [column.name for column in table.columns if not column.dropped]
        self.ranges: tuple[KeyRange, ...] = (KeyRange(),)
        try:
            plan = snapshot.plan(table, split_rows=options.split_rows, kind=SplitKind.KEY)
        except UnsupportedTable:
            self.rows = 0
        else:
            self.ranges = tuple(split.range for split in plan.splits)
            self.rows = plan.rows

    def read(self, split: int, snapshot: str) -> Iterator[pa.RecordBatch]:
        return self.source.read(self.table, SplitKind.KEY, self.ranges[split], snapshot, columns=self.columns)

    def read_now(self, split: int) -> Iterator[pa.RecordBatch]:
        """In a snapshot of this moment: a connection that breaks is made anew, and nothing comes twice."""
        with closing(self.source.export()) as snapshot:
            yield from self.read(split, snapshot.name)

    def splits_of(self, keys: pa.RecordBatch) -> NDArray[np.int64]:
        """In which split each key lies."""
        if len(self.ranges) == 1:
            return np.zeros(keys.num_rows, np.int64)
        cuts = [part.end for part in self.ranges[:-1] if part.end is not None]
        return self.source.order(self.table).places(keys, cuts)


class _There:
    """The table at the mirror."""

    def __init__(self, mirror: Mirror, table: SourceTable) -> None:
        self._mirror, self._table = mirror, table

    def sent(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return self._mirror.sent(self._table, rows)

    def received(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return self._mirror.received(self._table, rows)

    def read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        return self._mirror.read(self._table, columns)


class _Check:
    def __init__(self, here: _Here, there: _There, delivered: Delivered, options: Options) -> None:
        self._here, self._there = here, there
        self._delivered, self._options = delivered, options
        self._keys = here.table.key_columns
        self._source_rows = self._mirror_rows = self._rounds = 0
        self._open: Digests = np.empty(0, PAIR)
        self._found: Digests = np.empty(0, PAIR)
        self._is_behind = False

    def compare(self, progress: Progress) -> None:
        """Everything, once."""
        parts = 1 + self._here.rows // ROWS_PER_PART
        with tempfile.TemporaryDirectory(prefix="headwater-verify-") as made, ThreadPoolExecutor(1) as pool:
            here, there = DigestFiles(Path(made, "source"), parts), DigestFiles(Path(made, "mirror"), parts)
            with closing(here), closing(there):
                reading = pool.submit(_fill, there, self._read_there())
                for split in range(len(self._here.ranges)):
                    for digests in self._digests(split, self._here.read_now(split)):
                        here.add(digests)
                        progress(here.rows, max(self._here.rows, here.rows))
                reading.result()
            self._source_rows, self._mirror_rows = here.rows, there.rows
            self._open = np.concatenate([differing(here.part(part), there.part(part)) for part in range(parts)])
        self._locate()

    def _digests(self, split: int, batches: Iterator[pa.RecordBatch]) -> Iterator[Digests]:
        for batch in batches:
            yield digests_of(self._there.sent(batch), self._keys, split)

    def _read_there(self) -> Iterator[Digests]:
        for batch in self._there.read(self._here.columns):
            yield digests_of(batch, self._keys)

    def _locate(self) -> None:
        """Find the splits of keys that only the mirror has."""
        lone = self._open["rows"] == 0
        if not lone.any():
            return
        for batch in self._there.read(self._keys):
            hashes = hash_keys(batch, self._keys)
            wanted = np.isin(hashes, self._open["key"][lone])
            if wanted.any():
                splits = self._here.splits_of(self._there.received(batch.filter(pa.array(wanted))))
                self._open["split"][np.searchsorted(self._open["key"], hashes[wanted])] = splits

    def settle(self) -> None:
        """Look again at what differs, until it is equal, or is known to be different."""
        strikes = np.zeros(len(self._open), np.int64)
        before: Digests = np.empty(0, PAIR)
        was_settled = False
        while len(self._open) and self._rounds < self._options.rounds:
            self._rounds += 1
            both, is_settled = self._again()
            if len(before):
                rested = (both["rows"] == before["rows"]) & (both["sum"] == before["sum"])
                strikes = np.where(rested & was_settled, strikes + 1, 0)
            differs = (both["rows"] != both["rows_there"]) | (both["sum"] != both["sum_there"])
            found = differs & (strikes >= STRIKES)
            self._found = np.concatenate([self._found, both[found]])
            kept = differs & ~found
            self._open, before, strikes, was_settled = both[kept], both[kept], strikes[kept], is_settled
            if not is_settled:
                self._is_behind = bool(len(self._open))
                return

    def _again(self) -> tuple[Digests, bool]:
        """The keys that are open, anew: first at the source, then at the mirror when it has what the source had."""
        wanted: Hashes = self._open["key"]
        with closing(self._here.source.export()) as snapshot:
            splits = np.unique(self._open["split"]).tolist()
            rows = (self._digests(split, self._here.read(split, snapshot.name)) for split in splits)
            here = _only(chain.from_iterable(rows), wanted)
            high = snapshot.mark.high
        is_settled = self._delivered(high, self._options.patience)
        both = pairs(here, _only(self._read_there(), wanted))
        made = self._open.copy()
        for name in ("rows", "sum", "rows_there", "sum_there"):
            made[name] = 0
            made[name][np.searchsorted(wanted, both["key"])] = both[name]
        return made, is_settled

    def findings(self, seconds: float) -> Findings:
        found = self._found
        here, there = found["rows"].astype(np.int64), found["rows_there"].astype(np.int64)
        splits = np.unique(found["split"]).tolist()
        return Findings(
            self._here.table.full_name,
            self._source_rows,
            self._mirror_rows,
            mismatches=int((here == there).sum()),
            missing=int((here - there)[there < here].sum()),
            extra=int(there[here == 0].sum()),
            doubled=int(((there > here) & (here > 0)).sum()),
            unsettled=len(self._open),
            rounds=self._rounds,
            seconds=round(seconds, 3),
            is_behind=self._is_behind,
            ranges=tuple(covered([self._here.ranges[split] for split in splits])),
            keys=tuple(self._told()) if self._options.keys and len(found) else (),
        )

    def _told(self) -> Iterator[dict[str, Any]]:
        """Keys of differences, as a person may look for them; each once."""
        left = self._found["key"][: self._options.keys]
        for split in np.unique(self._found["split"]).tolist():
            for batch in self._here.read_now(split):
                left = yield from _named(batch.select(self._keys), self._there.sent(batch), self._keys, left)
        for batch in self._there.read(self._keys):
            left = yield from _named(self._there.received(batch), batch, self._keys, left)


def _named(keys: pa.RecordBatch, hashed: pa.RecordBatch, names: Sequence[str], left: Hashes) -> Any:
    hashes = hash_keys(hashed, names)
    wanted = np.isin(hashes, left)
    if wanted.any():
        yield from keys.filter(pa.array(wanted)).to_pylist()
    return left[~np.isin(left, hashes[wanted])]


def _fill(files: DigestFiles, digests: Iterable[Digests]) -> None:
    for some in digests:
        files.add(some)


def _only(digests: Iterable[Digests], keys: Hashes) -> Digests:
    """Of these rows those of *keys*, by key."""
    kept = [some[np.isin(some["key"], keys)] for some in digests]
    return by_key(np.concatenate(kept)) if kept else np.empty(0, KEY)

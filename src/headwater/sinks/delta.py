"""DeltaSink: each table of a query as a Delta table in ``<root>/<namespace>.<name>``.

``MIRROR`` has the rows as they are now, one per key. ``CHANGES`` has every change, appended. One batch of one table is
one commit of the Delta log, with up to four application transactions in it:

===============================================  ================================================================
``headwater/<query>/<table>/changes``            the epoch up to which the table has the changes
``headwater/<query>/<backfill>/<table>/history`` the plan up to which it has the history
``headwater/<query>/<backfill>/<table>/attempt`` the attempt of that plan
``headwater/<query>/<backfill>/<table>/upsert``  1: there were rows before this backfill, its rows replace them
===============================================  ================================================================

Tasks write history as files of the table, which nobody sees before the commit. Changes are folded to one row per key
and staged apart; the commit writes those files anew that have one of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final
from zlib import crc32

import numpy as np
import pyarrow as pa

from headwater.sinks.batch import Batch, rows_after
from headwater.sinks.change_rows import change_rows, changes_schema, history_rows
from headwater.sinks.data_files import DataFile, FileWriter, read_rows
from headwater.sinks.delta_log import DeltaLog, delta_library
from headwater.sinks.errors import SinkBusy, SinkInputError
from headwater.sinks.fold import DELETED, fold, folded_schema
from headwater.sinks.rewrite import Rewrite
from headwater.sinks.sink import Capabilities, Committed, HistoryPart, Mode, Staged, Token
from headwater.sinks.staging import PART_BYTES, Part, Staging, stage_rows
from headwater.sinks.storage import Storage, directory_of
from headwater.sinks.table_schema import Evolution, evolve
from headwater.sinks.types import cast, conform, sink_schema
from headwater.sources.snapshots import KeyOrder
from headwater.sources.splits import KeyRange, SplitKind
from headwater.sources.table import UNAVAILABLE_COLUMN, SourceTable
from headwater.stream.vnode import hash_keys

COMMIT_ATTEMPTS: Final = 20
FILE_BYTES: Final = 4 << 20
LARGEST_FILE_BYTES: Final = 32 << 20
MANY_FILES: Final = 1000
CHANGES_FILE_BYTES: Final = 128 << 20
RETENTION_HOURS: Final = 1


@dataclass(frozen=True)
class DeltaSink:
    """Delta tables in the directory *path*. It can be pickled.

    :param path: a path, or the address of a directory in an object store.
    :param storage_options: of the object store; they may hold passwords and are never shown.
    :param file_bytes: how large a file gets: of a mirror small enough to be written anew for a change. The files of a
        table with many of them grow larger.
    :param retention_hours: how long files are kept that newer versions do not have: readers of an older one need them.
    """

    capabilities: ClassVar = Capabilities((Mode.MIRROR, Mode.CHANGES))

    path: str
    mode: Mode = Mode.MIRROR
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    file_bytes: int | None = None
    retention_hours: int = RETENTION_HOURS

    @property
    def name(self) -> str:
        return f"delta:{self.path}"

    def check(self) -> None:
        """:raises SinkError: the library is missing, or nothing can be written there."""
        delta_library()
        self._root.check()

    def committed(self, table: SourceTable, query: str, backfill: str) -> Committed:
        """What the Delta table of *table* has."""
        with self._log(table) as log:
            return _Apps(table, query, backfill).committed(log) if log.open() else Committed()

    def stage_changes(
        self, table: SourceTable, token: Token, batches: Iterator[pa.RecordBatch], truncated: tuple[int, int] | None
    ) -> Staged:
        """Mirror: the folded rows, as parts. Changes: files of the table."""
        own = sink_schema(table)
        if self.mode is Mode.CHANGES:
            after = max(token.after, self.committed(table, token.query, token.backfill).epoch)
            rows = (change_rows(rows_after(batch, after), own) for batch in batches)
            files, parts = stage_rows(
                self._writer(table, token, changes_schema(own)), self._staging(table, token), token, rows
            )
            return _staged(table, token, False, files=files, parts=parts, after=after)
        folded = fold(table, batches, truncated)
        parts = [self._staging(table, token).put(token, conform(folded, folded_schema(own)))] if folded.num_rows else []
        return _staged(table, token, False, parts=parts, truncated=truncated)

    def stage_history(
        self, table: SourceTable, token: Token, part: HistoryPart, batches: Iterator[pa.RecordBatch]
    ) -> Staged:
        """New rows: files of the table. Rows that it may have: parts."""
        own = sink_schema(table)
        if self.mode is Mode.CHANGES:
            rows = (history_rows(batch, own, part) for batch in batches)
            files, parts = stage_rows(
                self._writer(table, token, changes_schema(own)), self._staging(table, token), token, rows
            )
            return _staged(table, token, True, files=files, parts=parts)
        if part.columns is not None:
            others = [name for name in own.names if name not in {*part.columns, *table.key_columns}]
            parts = self._stage_parts(table, token, batches, ",".join(others) or None)
            return _staged(table, token, True, parts=parts, only_existing=True)
        apart = _Apart(table, part.changed)
        files = self._writer(table, token, own).write_all(conform(rows, own) for rows in apart.others(batches))
        parts = self._stage_parts(table, token, apart.taken, None)
        ranges = _replaced(table, part) if part.replaces else None
        return _staged(table, token, True, files=files, parts=parts, ranges=ranges, order=part.order)

    def commit(self, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        """One commit of the Delta log; the table is made or gets its new columns before.

        :raises OtherAttempt: it has the history of this plan from another attempt.
        :raises SinkSchemaError: the columns became what the Delta table cannot become.
        :raises SinkBusy: others committed all the time.
        """
        if not staged:
            return False
        with self._log(table) as log:
            return self._deliver(log, table, token, staged)

    def abort(self, table: SourceTable, query: str, generation: int) -> None:
        """Remove what is staged, and files of the table that were never committed."""
        Staging(self._root, directory_of(table), query).abort(generation)
        storage = self._table(table)
        left = [info.path for info in storage.list() if _is_left(info.path, query, generation)]
        if left:
            with self._log(table) as log:
                known = log.paths() if log.open() else frozenset()
            for path in left:
                if path not in known:
                    storage.remove(path)

    def shown(self, table: SourceTable, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of the newest version."""
        own = sink_schema(table)
        schema = own if self.mode is Mode.MIRROR else changes_schema(own)
        wanted = pa.schema([schema.field(name) for name in columns])
        with self._log(table) as log:
            files = log.files(()) if log.open() else []
        for file in files:
            yield from conform(read_rows(self._table(table), file.path, columns), wanted).to_batches()

    def clean(self, table: SourceTable, retention_hours: int = 168) -> list[str]:
        """Remove the files that no version of the last hours has, also those of attempts that failed.

        :param retention_hours: more than a batch can take, or its files go before they are committed.
        """
        with self._log(table) as log:
            return log.vacuum(retention_hours, all_files=True) if log.open() else []

    def _deliver(self, log: DeltaLog, table: SourceTable, token: Token, staged: Sequence[Staged]) -> bool:
        own = sink_schema(table)
        wanted = own if self.mode is Mode.MIRROR else changes_schema(own)
        if not log.open(newest=False):
            log.create(wanted, _configuration(self.retention_hours))
        apps = _Apps(table, token.query, token.backfill)
        since = log.version
        for _ in range(COMMIT_ATTEMPTS):
            batch = Batch.left_of(staged, token, apps.committed(log))
            if batch is None:
                self._staging(table, token).clean(token)
                return False
            evolution = evolve(table.full_name, log.schema(), wanted, is_mirror=self.mode is Mode.MIRROR)
            if evolution.added and not evolution.must_rewrite:
                if log.is_behind():
                    continue
                log.add_columns(evolution.added)
            if batch.is_empty and not evolution.must_rewrite:
                return True
            if self._commit(log, table, token, apps, batch, evolution):
                self._staging(table, token).clean(token)
                self._tidy(log, table, token, since)
                return True
        raise SinkBusy(
            f"The Delta table of {table.full_name} was committed to by others {COMMIT_ATTEMPTS} times in a row.",
            next_step="Look for another query or job that writes to it.",
        )

    def _commit(
        self, log: DeltaLog, table: SourceTable, token: Token, apps: _Apps, batch: Batch, evolution: Evolution
    ) -> bool:
        rewrite = self._rewrite(log, table, token, evolution.schema)
        transactions = apps.of(token, batch)
        overlaps = log.transaction(apps.upsert) == 1
        if batch.history and log.transaction(apps.history) is None and rewrite.files and self.mode is Mode.MIRROR:
            overlaps = True
            transactions[apps.upsert] = 1
        waste: list[DataFile] = []
        try:
            if evolution.must_rewrite:
                rewrite.recast(evolution.renamed)
            if self.mode is Mode.MIRROR:
                waste = self._apply(rewrite, table, token, batch, overlaps=overlaps)
            else:
                rewrite.append(file for one in batch.all for file in one.detail["files"])
                for rows in self._staging(table, token).gather(_parts(batch.all)):
                    rewrite.insert(rows)
        except BaseException:
            rewrite.discard()
            raise
        schema = evolution.schema if evolution.must_rewrite else None
        added = rewrite.files if evolution.must_rewrite else rewrite.added
        if not log.commit(added, rewrite.removed, transactions, schema=schema):
            return False
        rewrite.settle()
        for file in waste:
            self._table(table).remove(file.path)
        return True

    def _tidy(self, log: DeltaLog, table: SourceTable, token: Token, since: int) -> None:
        """Join small files, and away with what nobody needs. The batch is committed, whatever happens here."""
        rewrite = self._rewrite(log, table, token, log.schema())
        if self.mode is Mode.MIRROR and rewrite.compact():
            if log.commit(rewrite.added, rewrite.removed, {}, is_data_change=False):
                rewrite.settle()
            else:
                rewrite.discard()
        log.tidy(since, self.retention_hours)

    def _rewrite(self, log: DeltaLog, table: SourceTable, token: Token, schema: pa.Schema) -> Rewrite:
        files = log.files(table.key_columns)
        share = min(sum(file.size for file in files) // MANY_FILES, LARGEST_FILE_BYTES)
        target = max(self._file_bytes, share)
        prefix = _prefix(token.query, token.generation)
        return Rewrite(self._table(table), files, schema, table.key_columns, target, prefix)

    def _apply(
        self, rewrite: Rewrite, table: SourceTable, token: Token, batch: Batch, *, overlaps: bool
    ) -> list[DataFile]:
        """Changes, then history; the files that are not needed afterwards."""
        staging = self._staging(table, token)
        if batch.is_truncated:
            rewrite.truncate()
        for rows in staging.gather(_parts(batch.changes)):
            rewrite.upsert(rows)
        waste: list[DataFile] = []
        for one in batch.history:
            ranges, files = one.detail["ranges"], one.detail["files"]
            if ranges is not None:
                rewrite.delete(partial(_in_ranges, table, one.detail["order"], ranges))
            if overlaps and ranges is None:
                for file in files:
                    rewrite.upsert(_upserts(read_rows(self._table(table), file.path), None))
                waste += files
            else:
                rewrite.append(files)
            for rows in staging.gather(one.detail["parts"]):
                rewrite.upsert(rows, only_existing=one.detail["only_existing"])
        return waste

    def _stage_parts(
        self, table: SourceTable, token: Token, batches: Iterator[pa.RecordBatch], unavailable: str | None
    ) -> list[Part]:
        schema = folded_schema(sink_schema(table))
        staging = self._staging(table, token)
        parts: list[Part] = []
        held: list[pa.Table] = []
        size = 0
        for batch in batches:
            held.append(conform(_upserts(pa.Table.from_batches([batch]), unavailable), schema))
            size += held[-1].nbytes
            if size >= PART_BYTES:
                parts.append(staging.put(token, pa.concat_tables(held)))
                held, size = [], 0
        if held:
            parts.append(staging.put(token, pa.concat_tables(held)))
        return parts

    @property
    def _root(self) -> Storage:
        return Storage(self.path, self.storage_options)

    @property
    def _file_bytes(self) -> int:
        return self.file_bytes or (FILE_BYTES if self.mode is Mode.MIRROR else CHANGES_FILE_BYTES)

    def _table(self, table: SourceTable) -> Storage:
        return self._root.within(directory_of(table))

    def _log(self, table: SourceTable) -> DeltaLog:
        return DeltaLog(self._table(table), table.full_name)

    def _writer(self, table: SourceTable, token: Token, schema: pa.Schema) -> FileWriter:
        return FileWriter(self._table(table), schema, self._file_bytes, _prefix(token.query, token.generation))

    def _staging(self, table: SourceTable, token: Token) -> Staging:
        return Staging(self._root, directory_of(table), token.query)


def _prefix(query: str, generation: int) -> str:
    """Of the names of files that tasks of *query* write: they tell whose they are."""
    return f"part-{crc32(query.encode()):08x}-{generation}-"


def _is_left(path: str, query: str, generation: int) -> bool:
    """Whether a task of *query* of an earlier generation wrote it."""
    start, found, rest = path.partition(f"part-{crc32(query.encode()):08x}-")
    number = rest.partition("-")[0]
    return bool(found) and not start and number.isdigit() and int(number) < generation


def _configuration(retention_hours: int) -> dict[str, str]:
    """The log remembers removals an hour longer than files are kept, so that none is forgotten before its file goes."""
    return {
        "delta.checkpointInterval": "100",
        "delta.logRetentionDuration": f"interval {retention_hours + 1} hours",
        "delta.deletedFileRetentionDuration": f"interval {retention_hours + 1} hours",
    }


class _Apps:
    """The application transactions of one table."""

    def __init__(self, table: SourceTable, query: str, backfill: str) -> None:
        self.changes = f"headwater/{query}/{table.full_name}/changes"
        of_backfill = f"headwater/{query}/{backfill}/{table.full_name}"
        self.history, self.attempt, self.upsert = (f"{of_backfill}/{what}" for what in ("history", "attempt", "upsert"))

    def committed(self, log: DeltaLog) -> Committed:
        found = [log.transaction(app) or 0 for app in (self.changes, self.history, self.attempt)]
        return Committed(*found)

    def of(self, token: Token, batch: Batch) -> dict[str, int]:
        made = {self.changes: token.epoch} if batch.has_changes else {}
        return {**made, self.history: token.plan, self.attempt: token.attempt} if batch.history else made


class _Apart:
    """Rows whose key may be in the table already, kept apart from the others."""

    def __init__(self, table: SourceTable, changed: Any) -> None:
        self._keys = table.key_columns
        self._changed = None if changed is None else np.sort(np.asarray(changed, np.uint64))
        self._taken: list[pa.RecordBatch] = []

    @property
    def taken(self) -> Iterator[pa.RecordBatch]:
        return iter(self._taken)

    def others(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        for batch in batches:
            if self._changed is not None and self._changed.size:
                hashes = hash_keys(batch, self._keys)
                places = np.minimum(np.searchsorted(self._changed, hashes), self._changed.size - 1)
                is_known = self._changed[places] == hashes
                if is_known.any():
                    self._taken.append(batch.filter(pa.array(is_known)))
                    batch = batch.filter(pa.array(~is_known))
            yield pa.Table.from_batches([batch])


def _staged(
    table: SourceTable,
    token: Token,
    is_snapshot: bool,
    *,
    files: Sequence[DataFile] = (),
    parts: Sequence[Part] = (),
    truncated: tuple[int, int] | None = None,
    after: int | None = None,
    ranges: tuple[KeyRange, ...] | None = None,
    order: KeyOrder | None = None,
    only_existing: bool = False,
) -> Staged:
    detail = {"files": list(files), "parts": list(parts), "ranges": ranges, "order": order, "truncated": truncated}
    staged: list[DataFile | Part] = [*files, *parts]
    return Staged(
        table,
        token,
        is_snapshot,
        rows=sum(one.rows for one in staged),
        size=sum(one.size for one in staged),
        truncated=truncated is not None,
        detail={**detail, "only_existing": only_existing, "after": token.epoch if after is None else after},
    )


def _parts(staged: Sequence[Staged]) -> list[Part]:
    return [part for one in staged for part in one.detail["parts"]]


def _upserts(rows: pa.Table, unavailable: str | None) -> pa.Table:
    """Rows as folded ones."""
    gone = pa.repeat(pa.scalar(False), rows.num_rows)
    texts = pa.repeat(pa.scalar(unavailable, pa.string()), rows.num_rows)
    return rows.append_column(DELETED, gone).append_column(UNAVAILABLE_COLUMN, texts)


def _replaced(table: SourceTable, part: HistoryPart) -> tuple[KeyRange, ...]:
    is_all = any(one.start is None and one.end is None for one in part.ranges)
    if not is_all and (part.kind is not SplitKind.KEY or part.order is None):
        raise SinkInputError(
            f"Parts of {table.full_name} that are not ranges of its key cannot be replaced.",
            next_step="Take a new snapshot of the whole table.",
        )
    return part.ranges


def _in_ranges(table: SourceTable, order: KeyOrder | None, ranges: tuple[KeyRange, ...], keys: pa.Table) -> Any:
    """Which rows lie in *ranges*, given their key columns as the Delta table has them."""
    inside = np.zeros(keys.num_rows, np.bool_)
    names = list(table.key_columns)
    typed = pa.table([cast(keys.column(name), table.column(name).type) for name in names], names)
    batches = typed.combine_chunks().to_batches()
    for part in ranges:
        cuts = [cut for cut in (part.start, part.end) if cut is not None]
        if not cuts:
            return np.ones(keys.num_rows, np.bool_)
        assert order is not None
        places = np.concatenate([order.places(batch, cuts) for batch in batches] or [np.zeros(0, np.int64)])
        inside |= places == (0 if part.start is None else 1)
    return inside

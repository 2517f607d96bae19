"""SqlServerChangeStream: what change data capture shows, as what the capture is told (:mod:`headwater.sources.events`).

It is polled: the commits that follow the position, then the rows of each table in them. A commit is read as a whole,
over all tables, before a boundary is told. While nothing is changed the position goes on with the log
(:mod:`.log_watch`).

Commits that follow the last one that was really told are asked for each time, and not those that follow the position:

====================================  =======================================================================
a commit is shown that lies           what happens
====================================  =======================================================================
behind the position                   it is told
before it, after the last sealed one  the session ends, and the next one tells it, from the last seal on
before the last sealed position       :class:`CommitsCameLate`: whoever went by that position lacks it
====================================  =======================================================================
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.sources.errors import (
    CommitsCameLate,
    LogPurged,
    RefusedValue,
    SchemaStopped,
    SourceBusy,
    SourceError,
    SourceNotFound,
)
from headwater.sources.events import Boundary, Changes, Event, StreamStatus
from headwater.sources.offset import CdcOffset
from headwater.sources.special_values import told_before
from headwater.sources.sqlserver.connection import RESNAPSHOT, Dsn, Session
from headwater.sources.sqlserver.followed import FollowedTables, Stretch
from headwater.sources.sqlserver.instances import CaptureInstance, column_came, has_changes, read_instances
from headwater.sources.sqlserver.log_watch import LogWatch
from headwater.sources.sqlserver.offset import POSITION_TYPE, Lsn, SqlServerOffset, positions_of
from headwater.sources.sqlserver.server import Commit, commits_after, has_commits_after
from headwater.sources.sqlserver.server_clock import ServerClock
from headwater.sources.sqlserver.types import SqlType, Ticks, selected
from headwater.sources.sqlserver.values import broken_texts_named, column_of, forgiven_texts
from headwater.sources.table import SourceColumn, SourceTable, SpecialValues
from headwater.sources.unavailable import Mask, unavailable_texts, with_parked
from headwater.stream import Op

BLOCK_ROWS: Final = 8_192
_DELETED, _OLD, _NEW = 1, 3, 4
_OPS: Final = np.array([0, Op.DELETE, Op.INSERT, Op.UPDATE_DELETE, Op.UPDATE_INSERT], np.int8)
_NEVER_OLD: Final = ("text", "ntext", "image")
"""Change tables have none of their old values."""
_LOG: Final = ("__$start_lsn", "__$seqval", "__$operation")


class Interval:
    """Some commits, and how many rows of each were told so far, over all tables."""

    def __init__(self, commits: Sequence[Commit]) -> None:
        self.commits = commits
        self._times = {commit.lsn: commit.time_us for commit in commits}
        self._told: dict[int, int] = {}

    @property
    def last(self) -> Lsn:
        return self.commits[-1].lsn

    def place(self, starts: pa.Array) -> tuple[NDArray[np.uint64], NDArray[np.uint32], NDArray[np.int64]]:
        """Place, number in the commit, and time, for each row: *starts* are in order, as the server tells them."""
        encoded = starts.dictionary_encode()
        lsns = [Lsn.parse(value) for value in encoded.dictionary.to_pylist()]
        codes = encoded.indices.to_numpy().astype(np.int64)
        begins = np.searchsorted(codes, np.arange(len(lsns)))
        bases = np.array([self._told.get(lsn, 0) for lsn in lsns], np.int64)
        for lsn, count in zip(lsns, np.bincount(codes, minlength=len(lsns)), strict=True):
            self._told[lsn] = self._told.get(lsn, 0) + int(count)
        seq = np.arange(len(codes)) - begins[codes] + bases[codes]
        last = self.commits[-1].time_us
        places = np.array([lsn.place for lsn in lsns], np.uint64)[codes]
        times = np.array([self._times.get(lsn, last) for lsn in lsns], np.int64)[codes]
        return places, seq.astype(np.uint32), times


def read_stretch(session: Session, stretch: Stretch, interval: Interval, ticks: Ticks) -> Iterator[Changes]:
    """The rows of a stretch, a block at a time, no update in two blocks.

    :raises SpecialValue: see :mod:`.values`.
    """
    table = stretch.projection.table
    asked = [*(None for _ in _LOG), *stretch.columns]
    held: list[pa.Array] | None = None
    with broken_texts_named(table, asked):
        for block in session.columns(statement_of(stretch), BLOCK_ROWS, forgiven_texts(table, asked)):
            if held is not None:
                block = [_joined(one, other) for one, other in zip(held, block, strict=True)]
                held = None
            last = len(block[2]) - 1
            if block[2][last].as_py() == _OLD:
                held = [column.slice(last) for column in block]
                block = [column.slice(0, last) for column in block]
            if len(block[2]):
                yield from _told(stretch, block, interval, ticks)
    if held is not None:
        yield from _told(stretch, held, interval, ticks)


def _told(stretch: Stretch, block: list[pa.Array], interval: Interval, ticks: Ticks) -> Iterator[Changes]:
    """The rows of *block*. :raises SpecialValue: after those of the commits before it."""

    def changes(end: int) -> Changes:
        return changes_of(stretch, [column.slice(0, end) for column in block], interval, ticks)

    try:
        yield changes(len(block[0]))
    except (RefusedValue, SchemaStopped):
        end = told_before([0, *(np.flatnonzero(~_same(block[0])) + 1).tolist()], changes)
        if end:
            yield changes(end)
        raise


def _joined(one: pa.Array, other: pa.Array) -> pa.Array:
    """Two parts of a column; of one that is null throughout, the library's rows tell no type."""
    if pa.types.is_null(one.type):
        one = one.cast(other.type)
    elif pa.types.is_null(other.type):
        other = other.cast(one.type)
    return pa.concat_arrays([one, other])


def statement_of(stretch: Stretch) -> str:
    """What asks for the rows of a stretch, in the order of the changes."""
    asked = [f"[{name}]" for name in _LOG]
    asked += [f"{selected(column)} AS [c{place}]" for place, column in enumerate(stretch.columns)]
    ordinals = {column.number: ordinal for ordinal, column in enumerate(stretch.instance.columns, 1)}
    asked += [
        f"sys.fn_cdc_is_bit_set({ordinals[column.field_id]}, [__$update_mask]) AS [m{place}]"
        for place, column in _long(stretch)
    ]
    # the number of a change alone may have the insert of an update before its delete
    order = ("__$start_lsn", *(["__$command_id"] if stretch.instance.has_commands else []), *_LOG[1:])
    return (
        f"SELECT {', '.join(asked)} FROM {stretch.instance.between(stretch.first, stretch.last)}"
        f" ORDER BY {', '.join(f'[{name}]' for name in order)}"
    )


def _is_long(column: SourceColumn) -> bool:
    kind = SqlType.parse(column.source_type)
    return kind.size < 0 or kind.name in ("xml", "json", *_NEVER_OLD)


def _long(stretch: Stretch) -> list[tuple[int, SourceColumn]]:
    return [(place, column) for place, column in enumerate(stretch.columns) if _is_long(column)]


def _with_long_values(
    stretch: Stretch, columns: list[pa.Array], are_set: Sequence[pa.Array], operations: NDArray[np.int8], same: Mask
) -> dict[str, Mask]:
    """Put what did not change into old rows of *columns*; what they lack then, by name.

    :param same: for each row, whether the next one is of the same change.
    """
    names = {column.field_id: column.name for column in stretch.projection.table.columns if not column.dropped}
    paired = (operations == _OLD) & same & (np.append(operations[1:], 0) == _NEW)
    missing: dict[str, Mask] = {}
    for (place, column), is_set in zip(_long(stretch), are_set, strict=True):
        is_null = columns[place].is_null().to_numpy(zero_copy_only=False)
        was_set = is_set.cast(pa.bool_()).fill_null(True).to_numpy(zero_copy_only=False)
        copied = paired & is_null & ~was_set
        lacks = (operations == _OLD) & is_null & ~copied
        if SqlType.parse(column.source_type).name in _NEVER_OLD:
            lacks |= (operations == _DELETED) & is_null
        else:
            lacks &= ~was_set
        if copied.any():
            columns[place] = columns[place].take(pa.array(np.arange(len(operations)) + copied))
        if lacks.any() and column.field_id in names:
            missing[names[column.field_id]] = lacks
    return missing


def changes_of(stretch: Stretch, told: Sequence[pa.Array], interval: Interval, ticks: Ticks) -> Changes:
    """The columns that the server tells, as rows of the captured table's log.

    A change table has a row for each change, two for an update: the old row (3) and the new one (4). They are a pair
    where they stand together and have one key; otherwise they are a delete and an insert, which is the same. Long
    values are not in every old row: those that did not change are taken from the new row, others are named in
    ``_unavailable``.
    """
    table = stretch.projection.table
    start_lsns, changes, operations, *values = told
    are_set = values[len(stretch.columns) :]
    del values[len(stretch.columns) :]
    rows = len(start_lsns)
    columns = [column_of(table, column, given, ticks) for column, given in zip(stretch.columns, values, strict=True)]
    ops = operations.to_numpy(zero_copy_only=False).astype(np.int8)
    parked = {
        column.name: (ops != _DELETED)
        & (ops != _OLD)
        & pc.and_(made.is_null(), given.is_valid()).to_numpy(zero_copy_only=False)
        for column, made, given in zip(stretch.columns, columns, values, strict=True)
        if column.special_values is SpecialValues.PARK
    }
    missing = {name: np.ones(rows, np.bool_) for name in stretch.missing}
    if are_set:
        same = np.append(_same(start_lsns) & _same(changes), False)
        missing |= _with_long_values(stretch, columns, are_set, ops, same)
    projected = stretch.projection.apply(columns, rows)
    keys = [projected[place] for place in table.key_places]
    made_ops = ops_of(ops, start_lsns, changes, keys)
    places, seq, times = interval.place(start_lsns)
    batch = pa.RecordBatch.from_arrays(
        [
            *projected,
            positions_of(places, seq),
            pa.Array.from_buffers(pa.timestamp("us", tz="UTC"), rows, [None, pa.py_buffer(times)]),
            with_parked(unavailable_texts(missing, rows), parked),
        ],
        schema=table.log_schema(POSITION_TYPE),
    )
    return Changes(table, batch, pa.array(made_ops))


def ops_of(
    operations: NDArray[np.int8], starts: pa.Array, changes: pa.Array, keys: Sequence[pa.Array]
) -> NDArray[np.int8]:
    """The op of each row; halves of an update that do not stand together, or whose key changed, stand alone."""
    ops: NDArray[np.int8] = _OPS[operations]
    if len(operations) < 1:
        return ops
    pairs = (operations[:-1] == _OLD) & (operations[1:] == _NEW)
    if pairs.any():
        for column in (starts, changes, *keys):
            pairs &= _same(column)
    opens, closes = np.append(pairs, False), np.append(False, pairs)
    ops[(operations == _OLD) & ~opens] = Op.DELETE
    ops[(operations == _NEW) & ~closes] = Op.INSERT
    return ops


def _same(column: pa.Array) -> Mask:
    """For each value but the last, whether the next one is the same."""
    same = pc.equal(column.slice(0, len(column) - 1), column.slice(1)).fill_null(False)
    made: Mask = same.to_numpy(zero_copy_only=False)
    return made


MAX_ROWS: Final = 32_768
MAX_COMMITS: Final = 1_000
INTERVAL_ROWS: Final = 100_000
"""About how many rows are read before a boundary: transactions may be as large as they like, intervals need not."""
PAUSE_SECONDS: Final = 0.1
WATCH_SECONDS: Final = 0.5
INSTANCES_SECONDS: Final = 2.0


class SqlServerChangeStream:
    """The changes of *tables* after *start*.

    :param sleep: waits; for tests.
    """

    def __init__(
        self, dsn: Dsn, tables: FollowedTables, start: SqlServerOffset, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._dsn, self._tables, self._sleep = dsn, tables, sleep
        self._session = Session(dsn)
        self._told = self._sealed = start
        self._reading: Iterator[Event] | None = None
        self._after: dict[tuple[str, str], Lsn] = {}
        self._most = MAX_COMMITS
        self._clock = ServerClock(dsn.time_zone)
        self._watch = LogWatch()
        self._watched = 0.0
        self._looked = 0.0
        self._told_idle = False
        self._bytes = 0

    # -- tables ----------------------------------------------------------------------------------------------------

    def begin_at(self, table: SourceTable, position: SqlServerOffset) -> None:
        """What comes up to *position* of a table that is about to be added is not of interest."""
        self._after[table.namespace, table.name] = position.commit_lsn

    def add_table(self, table: SourceTable) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`. Call it at a boundary."""
        self._tables.add(table, self._after.pop((table.namespace, table.name), self._told.commit_lsn))

    def remove_table(self, table: SourceTable) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        self._tables.remove(table)

    def has_reached(self, position: SqlServerOffset) -> bool:
        """Whether all that was committed before *position* was told."""
        return self._told >= position

    # -- polling ---------------------------------------------------------------------------------------------------

    def poll(self, timeout: float, *, linger: float = 0.0, stop_at_boundary: bool) -> list[Event]:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        began = time.monotonic()
        end = began + timeout
        events: list[Event] = []
        while not (events := self._read(stop_at_boundary=stop_at_boundary, until=began + linger)):
            left = end - time.monotonic()
            if left <= 0:
                break
            self._sleep(min(left, PAUSE_SECONDS))
        return events

    def _read(self, *, stop_at_boundary: bool, until: float) -> list[Event]:
        """What is there now: up to a boundary, or as many rows as are told at once."""
        events: list[Event] = []
        rows = 0
        while rows < MAX_ROWS:
            if self._reading is None and not self._begin_interval():
                if not events:
                    self._tell_idle(events)
                break
            assert self._reading is not None
            event = next(self._reading, None)
            if event is None:
                self._reading = None
                continue
            events.append(event)
            if isinstance(event, Changes):
                rows += event.rows.num_rows
                self._bytes += event.rows.nbytes
            if isinstance(event, Boundary) and (stop_at_boundary or time.monotonic() >= until):
                break
        return events

    def _begin_interval(self) -> bool:
        """Whether there are commits that were not told. :raises CommitsCameLate: before the position that is sealed."""
        commits = commits_after(self._session, self._told, self._most, self._clock)
        if not commits:
            return False
        if commits[0].lsn <= self._told.commit_lsn:
            raise self._late(commits[0].lsn)
        self._reading = self._interval(Interval(commits))
        return True

    def _late(self, commit: Lsn) -> SourceError:
        if commit > self._sealed.commit_lsn:
            return SourceBusy(
                f"{self._dsn} showed the commit {commit.hex} late: the capture job was held back from the log.",
                next_step="Nothing is to be done: it is told from the last seal on.",
            )
        return CommitsCameLate(
            f"{self._dsn} showed the commit {commit.hex} only now, and we hold all up to"
            f" {self._sealed.commit_lsn.hex}: its capture job had found nothing while it was held back from the log.",
            next_step=f"{RESNAPSHOT}. What holds it back, such as a replica that is away: headwater doctor {self._dsn}",
        )

    def _interval(self, interval: Interval) -> Iterator[Event]:
        first, last = self._told.commit_lsn.following, interval.last
        instances = read_instances(self._session, self._tables.ids)
        read: list[Stretch] = []
        rows = 0
        for found in self._tables.stretches(
            instances,
            first,
            last,
            lambda instance, names, before: column_came(self._session, instance, names, before),
            lambda instance, begin, end: has_changes(self._session, instance, begin, end),
        ):
            if not isinstance(found, Stretch):
                yield found
                continue
            read.append(found)
            try:
                for changes in read_stretch(self._session, found, interval, self._dsn.ticks):
                    rows += changes.rows.num_rows
                    yield changes
            except SourceNotFound:
                if not self._session.is_open:
                    self._session = Session(self._dsn)
                read.remove(found)
                yield self._tables.removed(found.projection.table)
            except (RefusedValue, SchemaStopped) as error:
                if not self._session.is_open:
                    self._session = Session(self._dsn)
                read.remove(found)
                yield self._tables.stopped(found.projection.table, error)
        yield from self._require_kept(read)
        if rows > INTERVAL_ROWS:
            self._most = max(1, len(interval.commits) * INTERVAL_ROWS // rows)
        else:
            self._most = min(MAX_COMMITS, self._most * 2)
        self._told, self._told_idle = SqlServerOffset(last), False
        yield Boundary(self._told, interval.commits[-1].time_us, len(interval.commits))

    def _require_kept(self, read: list[Stretch]) -> Iterator[Event]:
        """Stops tables whose instance was made anew. :raises LogPurged: the cleanup job was at rows that were read."""
        if not read:
            return
        now: dict[str, CaptureInstance] = {
            instance.name: instance
            for instances in read_instances(self._session, self._tables.ids).values()
            for instance in instances
        }
        for stretch in read:
            instance = now.get(stretch.instance.name)
            if instance is None:
                continue  # all of it was read before it was removed
            if instance.change_id != stretch.instance.change_id:
                yield self._tables.removed(stretch.projection.table)
            elif instance.start > max(stretch.first, stretch.instance.start):
                raise LogPurged(
                    f"The cleanup job removed changes of {stretch.projection.table.full_name} while they were read.",
                    next_step=RESNAPSHOT,
                )

    def _tell_idle(self, events: list[Event]) -> None:
        """The log went on without changes of captured tables, or nothing happened at all."""
        now = time.monotonic()
        if now - self._watched < WATCH_SECONDS:
            return
        self._watched = now
        reached = self._watch.reached(self._session)
        goes_on = reached is not None and reached > self._told.commit_lsn
        if goes_on or now - self._looked >= INSTANCES_SECONDS:
            if has_commits_after(self._session, self._told):
                return  # of the time before that place, perhaps: they are told first
            self._looked = now
            instances = read_instances(self._session, self._tables.ids)
            events.extend(self._tables.uncovered(instances, self._told.commit_lsn.following))
        if goes_on:
            assert reached is not None
            self._told = SqlServerOffset(reached, told_lsn=self._told.told)
            events.append(Boundary(self._told, None, 0))
            self._told_idle = True
        elif not self._told_idle or events:
            events.append(Boundary(self._told, None, 0))
            self._told_idle = True

    def acknowledge(self, position: CdcOffset) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`: changes are kept by age, whoever has read them."""
        assert isinstance(position, SqlServerOffset)
        self._sealed = position

    def status(self) -> StreamStatus:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        return StreamStatus(self._bytes, None, None, 0)

    def close(self) -> None:
        """End the connection."""
        self._session.close()

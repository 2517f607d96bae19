"""MongoChangeStream: the events of a change stream as what the capture is told (:mod:`headwater.sources.events`).

Nothing in the stream says that a transaction is over, and what is written at once without one (``insertMany``) may come
as one, too. All events of it have one cluster time, which no other change of a replica set has, so it is over when
another time follows, or when the server has nothing more to tell. Until then its events wait here; a large one is told
in pieces, and no boundary before its end.

In a sharded cluster changes of several shards may have one time: there a time is over when the server says that it has
passed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa

from headwater.sources.errors import SourceError, UnsupportedTable
from headwater.sources.events import Boundary, Event, StreamStatus
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.mongodb.catalog import present, require_capturable
from headwater.sources.mongodb.connection import BadToken, Client, Dsn, server_errors
from headwater.sources.mongodb.documents.decoder import Conflict, RawArray
from headwater.sources.mongodb.documents.events import EVENT_SCHEMA, EventDecoder
from headwater.sources.mongodb.event_rows import token_of
from headwater.sources.mongodb.followed import FollowedTables
from headwater.sources.mongodb.lookup import Lookup
from headwater.sources.mongodb.names import CollectionName
from headwater.sources.mongodb.offset import UNKNOWN, MongoOffset, token_time
from headwater.sources.mongodb.raw_cursor import Batch, RawCursor
from headwater.sources.mongodb.server import Server
from headwater.sources.mongodb.watch import open_watch, require_events, watched_spaces, with_events
from headwater.sources.offset import CdcOffset
from headwater.sources.table import SourceTable

_FRAGMENT: Final = EVENT_SCHEMA.get_field_index("fragment")
_FRAGMENTS: Final = EVENT_SCHEMA.get_field_index("fragments")


class EventBatches:
    """Decodes the answers of one stream, in their order.

    An event of more than 16 MB comes as several, each with some of its fields (``$changeStreamSplitLargeEvent``): they
    are put together again.
    """

    def __init__(self) -> None:
        self._decoder = EventDecoder()
        self._parts: list[pa.RecordBatch] = []

    def decode(self, array: memoryview) -> pa.RecordBatch:
        """The whole events of an answer. :raises SourceProtocolError: these are no events."""
        made = self._decoder.decode(RawArray(array))
        if made.column(_FRAGMENT).null_count == made.num_rows and not self._parts:
            return made
        return self._joined(made)

    def _joined(self, made: pa.RecordBatch) -> pa.RecordBatch:
        rows: list[pa.RecordBatch] = []
        fragments, counts = made.column(_FRAGMENT).to_pylist(), made.column(_FRAGMENTS).to_pylist()
        for place, (fragment, count) in enumerate(zip(fragments, counts, strict=True)):
            row = made.slice(place, 1)
            if fragment is None:
                rows.append(row)
                continue
            self._parts.append(row)
            if fragment == count:
                rows.append(_whole(self._parts))
                self._parts = []
        if not rows:
            return made.slice(0, 0)
        return pa.Table.from_batches(rows, EVENT_SCHEMA).combine_chunks().to_batches()[0]


def _whole(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    """One event of its parts: each field is in one of them; the token is that of the last."""
    columns = []
    for place, field in enumerate(EVENT_SCHEMA):
        known = [part.column(place) for part in reversed(parts) if part.column(place).null_count == 0]
        is_number = place in (_FRAGMENT, _FRAGMENTS)
        columns.append(pa.nulls(1, field.type) if is_number or not known else known[0])
    return pa.RecordBatch.from_arrays(columns, schema=EVENT_SCHEMA)


MAX_ROWS: Final = 65_536
MAX_BYTES: Final = 32 << 20


class HeldEvents:
    """The events of one stream that came and were not told yet, in their order. Not for several threads.

    They wait until their transaction is whole, or until there are so many that a part of it has to be told.

    :ivar rows: how many there are.
    """

    def __init__(self) -> None:
        self._batches = EventBatches()
        self._queue: list[pa.RecordBatch] = []
        self._bytes = 0
        self.rows = 0

    @property
    def is_full(self) -> bool:
        """Whether no more should be taken."""
        return self.rows >= MAX_ROWS or self._bytes >= MAX_BYTES

    @property
    def newest_time(self) -> int:
        """The cluster time of the last one; 0 where there is none."""
        return int(self._queue[-1].column("cluster_time")[-1].as_py()) if self._queue else 0

    def take(self, documents: memoryview, after: int) -> bool:
        """Those of an answer, without what comes up to the cluster time *after*; whether there were any."""
        made = self._batches.decode(documents)
        times = made.column("cluster_time").to_numpy(zero_copy_only=False)
        if len(times) and times[0] <= after:
            made = made.slice(int(np.searchsorted(times, after, side="right")))
        if made.num_rows:
            self._queue.append(made)
            self.rows += made.num_rows
            self._bytes += len(documents)
        return bool(made.num_rows)

    def together(self) -> pa.RecordBatch:
        """All of them, of which there is one at least."""
        if len(self._queue) > 1:
            self._queue = pa.Table.from_batches(self._queue).combine_chunks().to_batches()
        assert len(self._queue) == 1
        return self._queue[0]

    def drop(self, count: int) -> None:
        """The first *count* of :meth:`together` were told."""
        batch = self.together()
        left = batch.num_rows - count
        self._queue = [batch.slice(count)] if left else []
        self._bytes = self._bytes * left // batch.num_rows
        self.rows = left


_MOMENT_US: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class _Last:
    """The last event that was told.

    :ivar events: by database: that of its last change of a document, see :func:`.watch.require_events`.
    """

    time: int
    token: str
    wall_us: int | None
    events: Mapping[str, str]


class MongoChangeStream:
    """The changes of *tables* after *start*.

    :param after: by collection: what comes up to this cluster time is not of interest.
    :param images: the server keeps those of one table at least.
    :ivar spaces: the databases that are watched.
    :raises LogPurged: the server no longer has them. :raises AccessDenied: the user may not watch.
    """

    def __init__(
        self,
        dsn: Dsn,
        client: Client,
        server: Server,
        tables: Iterable[SourceTable],
        start: MongoOffset,
        policy: SchemaPolicy = SchemaPolicy.EVOLVE,
        *,
        after: Mapping[CollectionName, int] | None = None,
        images: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dsn, self._client, self._server, self._images = dsn, client, server, images
        self._clock = clock
        self._followed = FollowedTables(
            tables,
            policy,
            Lookup(dsn, client),
            after,
            is_sharded=server.is_sharded,
            is_present=self._is_present,
        )
        self._told = start
        self.spaces = watched_spaces(dsn, self._followed.names, start)
        self._last: _Last | None = None
        self._is_half_told = False
        self._seq = 0
        self._is_idle = self._told_idle = False
        self._after: dict[CollectionName, int] = {}
        self._received = 0
        self._failure: SourceError | None = None
        self._cursor = self._open()

    def _open(self) -> RawCursor:
        self._held = HeldEvents()
        self._is_whole = True
        self._passed = ""
        self._is_stale = False
        if self._followed.names:
            self.spaces = watched_spaces(self._dsn, self._followed.names, self._told)
        return open_watch(
            self._dsn,
            self._client,
            self._followed.names,
            self.spaces,
            self._told,
            images=self._images,
            options=self._server.commit_options,
        )

    # -- tables ----------------------------------------------------------------------------------------------------

    def spaces_with(self, tables: Iterable[SourceTable]) -> list[str]:
        """The databases that will be watched when *tables* are added."""
        return sorted({name.namespace for name in self._followed.names}.union(table.namespace for table in tables))

    def begin_at(self, table: SourceTable, position: MongoOffset) -> None:
        """What comes before *position* of a table that is about to be added is not of interest."""
        self._after[CollectionName(table.namespace, table.name)] = position.time

    def _is_present(self, name: CollectionName) -> bool:
        with server_errors(self._dsn), suppress(UnsupportedTable):
            for collection in present(self._client, [name]).values():
                require_capturable(self._client, collection)
                return True
        return False

    def add_table(self, table: SourceTable) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`. Call it at a boundary: there the stream begins anew."""
        after = self._after.pop(CollectionName(table.namespace, table.name), 0)
        self._followed.add(table, max(after, self._told.time))
        self._is_stale = True

    def remove_table(self, table: SourceTable) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        self._followed.remove(table)

    def has_reached(self, position: MongoOffset) -> bool:
        """Whether all that was committed before *position* was told."""
        return self._told >= position

    def take_conflicts(self) -> dict[str, list[Conflict]]:
        """The values that columns did not take since this was last asked, by table."""
        found, self._followed.conflicts = self._followed.conflicts, {}
        return found

    # -- polling ---------------------------------------------------------------------------------------------------

    def poll(self, timeout: float, *, linger: float = 0.0, stop_at_boundary: bool) -> list[Event]:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        if self._failure is not None:
            raise self._failure
        if self._is_stale or (not self._cursor.is_open and not self._held.rows):
            self._cursor.close()
            self._cursor = self._open()
        events: list[Event] = []
        until = self._clock() + linger
        if not self._tell(events, stop_at_boundary=stop_at_boundary):
            if self._receive(timeout):
                self._linger(until)
            self._tell(events, stop_at_boundary=stop_at_boundary)
        return events

    def _linger(self, until: float) -> None:
        """Take more while it comes: many rows at once are cheaper."""
        while not self._held.is_full and (left := until - self._clock()) > 0:
            try:
                if not self._receive(left):
                    return
            except SourceError as error:
                self._failure = error  # what came before it is told first
                return

    def _receive(self, timeout: float) -> bool:
        """Take the next answer, if it comes in time; whether it had events."""
        try:
            batch = self._cursor.next(max(timeout, 0.0))
        except BadToken:
            if self._is_half_told or token_time(self._told.token) != self._told.time:
                raise
            self._go_on_by_time()
            return False
        if batch is None:
            return False
        self._received += len(batch.documents)
        if batch.is_empty:
            self._take_silence(batch)
            return False
        self._take(batch)
        return True

    def _go_on_by_time(self) -> None:
        """The server does not find the event of our token among those that are asked for now.

        At a boundary the time says the same, if it has the event at all.

        :raises SourceWentBack: it has another history than the one that we followed.
        """
        self._cursor.close()
        known = self._told if self._told.events else replace(self._told, events={UNKNOWN: self._told.token})
        require_events(self._dsn, self._client, self.spaces, known)
        self._told = replace(self._told, token="")
        self._cursor = self._open()

    def _take_silence(self, batch: Batch) -> None:
        """The server has told everything; how far that is."""
        self._passed = batch.token
        passed = token_time(batch.token) or 0
        self._is_whole = not self._server.is_sharded or passed > self._newest_time()
        self._is_idle = True

    def _newest_time(self) -> int:
        return self._held.newest_time or (0 if self._last is None else self._last.time)

    def _take(self, batch: Batch) -> None:
        self._passed = ""
        self._is_idle = False
        if self._held.take(batch.documents, self._told.time):
            self._is_whole = batch.is_last  # what was watched is gone: nothing follows

    # -- telling ---------------------------------------------------------------------------------------------------

    def _tell(self, events: list[Event], *, stop_at_boundary: bool) -> bool:
        """Tell what is whole, and its boundary; whether there was anything."""
        if self._held.rows:
            self._tell_rows(events, stop_at_boundary=stop_at_boundary)
        elif self._is_half_told and self._is_whole:
            self._tell_boundary(events, 1)
        elif self._is_idle and not self._is_half_told:
            self._tell_place(events)
        self._is_idle = False
        return bool(events)

    def _tell_rows(self, events: list[Event], *, stop_at_boundary: bool) -> None:
        batch = self._held.together()
        times = batch.column("cluster_time").to_numpy(zero_copy_only=False)
        goes_on = self._last is not None and int(times[0]) == self._last.time
        if self._is_half_told and not goes_on:
            self._tell_boundary(events, 1)
            if stop_at_boundary:
                return
        end = len(times) if self._is_whole else int(np.searchsorted(times, times[-1]))
        if stop_at_boundary and end:
            end = int(np.searchsorted(times, times[0], side="right"))
        is_boundary = end > 0
        if not is_boundary:
            if not self._held.is_full:
                return
            end = len(times)
        most = self._followed.most_at_once(batch)
        if most < end:  # up to a boundary; of one large transaction a part
            before = int(np.searchsorted(times, times[most]))
            end, is_boundary = (before, True) if before else (most, False)
        self._seq = self._followed.tell(batch.slice(0, end), self._seq if goes_on else 0, events)
        self._keep_last(batch.slice(0, end))
        self._held.drop(end)
        count = int((times[1:end] != times[: end - 1]).sum()) + (not (self._is_half_told and goes_on))
        self._is_half_told = True
        if is_boundary:
            self._tell_boundary(events, count)

    def _keep_last(self, events: pa.RecordBatch) -> None:
        last = events.slice(events.num_rows - 1)
        wall = last.column("wall_time").cast(pa.int64())[0].as_py()
        self._last = _Last(
            last.column("cluster_time")[0].as_py(),
            token_of(last, 0),
            None if wall is None else wall * 1000,
            with_events((self._last or self._told).events, events),
        )

    def _tell_boundary(self, events: list[Event], transactions: int) -> None:
        assert self._last is not None
        self._told = MongoOffset(self._last.time, self._last.token, events=self._last.events)
        self._is_half_told = self._told_idle = False
        events.append(Boundary(self._told, self._last.wall_us, transactions))

    def _tell_place(self, events: list[Event]) -> None:
        """Nothing came; the log has gone on to here."""
        # where the stream was opened is a time that may still come: nothing at it was looked at
        passed = None if self._passed == self._cursor.opened.token else token_time(self._passed)
        if passed is not None and self._server.is_sharded:
            passed -= 1  # of another shard something may follow at this very time
        moment = int(time.time() * 1e6)
        if passed is not None and passed > self._told.time:
            self._told, self._told_idle = MongoOffset(passed, self._passed, events=self._told.events), False
        if not self._told_idle or moment - (self._told.moment or 0) >= _MOMENT_US:
            self._told, self._told_idle = replace(self._told, moment=moment), True
            events.append(Boundary(self._told, None, 0))

    def acknowledge(self, position: CdcOffset) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`: a server keeps its log by size, whoever has read it."""

    def status(self) -> StreamStatus:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        return StreamStatus(self._received, None, None, 0)

    def close(self) -> None:
        """End the stream."""
        self._cursor.close()

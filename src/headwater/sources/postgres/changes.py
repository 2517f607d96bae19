"""PostgresChangeStream: the raw messages of a slot as events, in commit order.

Messages come in blocks. The row decoder takes rows and the borders of small transactions by itself; what it leaves is
handled here, one message at a time:

=====================  =========================================================================================
message                what happens
=====================  =========================================================================================
Relation               the rows held so far are told, then the table follows its new columns
Truncate               the rows held so far are told, then the truncation
Stream Start … Stop    the messages between go to the spill, unread
Stream Commit          the spilled transaction is replayed in pieces, through the same decoder
Stream Abort           the spilled transaction, or a savepoint of it, is dropped
Message, Origin, Type  nothing: heartbeats only make the log go on
=====================  =========================================================================================

A boundary is told where no transaction is half way. What lies before the start position is never told again.

The server describes a table once per connection, so descriptions of tables that are not captured are kept: one may be
added later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.sources.errors import RefusedValue, SchemaStopped, SourceError, TableLocked, UnsupportedTable
from headwater.sources.events import Boundary, Changes, Event, Stopped, StreamStatus, Truncated
from headwater.sources.evolution import Projection, SchemaPolicy, as_narrow, follow
from headwater.sources.offset import CdcOffset
from headwater.sources.postgres import pgoutput
from headwater.sources.postgres.decoder import RawRows, make_decoder
from headwater.sources.postgres.identity import TableIdentity
from headwater.sources.postgres.offset import POSITION_TYPE, Lsn, PostgresOffset, positions_of
from headwater.sources.postgres.relations import DescribedTable, Relations
from headwater.sources.postgres.spill import SpillStore
from headwater.sources.postgres.toast import complete
from headwater.sources.special_values import told_before
from headwater.sources.table import SourceTable
from headwater.sources.unavailable import with_parked
from headwater.stream import Op

MAX_ROWS = 32_768
MAX_BYTES = 16 << 20
MAX_MESSAGES = 65_536
_TRUNCATIONS_KEPT = 1000


class RawStream(Protocol):
    """Where raw messages come from: the replication protocol, or polling by SQL."""

    @property
    def server_wal_end(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...
    def read(self, max_messages: int, max_bytes: int, timeout: float) -> list[bytes]: ...
    def acknowledge(self, lsn: int) -> None: ...
    def send_status(self) -> None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Replay:
    """A spilled transaction that is being told, block by block."""

    commit: pgoutput.StreamCommit
    blocks: Iterator[list[bytes]]
    block: list[bytes] = field(default_factory=list)
    place: int = 0


@dataclass(slots=True)
class _Followed:
    """A captured table and how its rows are told at the moment."""

    message: pgoutput.Relation
    relation: DescribedTable
    projection: Projection


class PostgresChangeStream:
    """The changes of *tables* after *start*.

    :param identity: of the server, where it is another than that of *start*; boundaries tell it.
    :param may_be_behind: *tables* are as others had them later: what this server tells first of one may be narrower.
    """

    def __init__(
        self,
        stream: RawStream,
        relations: Relations,
        spill: SpillStore,
        tables: Iterable[SourceTable],
        start: PostgresOffset,
        policy: SchemaPolicy = SchemaPolicy.EVOLVE,
        held_bytes: Callable[[], int | None] = lambda: None,
        identity: Mapping[str, Any] | None = None,
        may_be_behind: bool = False,
    ) -> None:
        self._stream = stream
        self._may_be_behind = may_be_behind
        self._identity = identity
        self._held_bytes = held_bytes
        self._relations = relations
        self._spill = spill
        self._policy = policy
        self._known = {table.source_id: table for table in tables}
        self._followed: dict[int, _Followed] = {}
        self._ignored: dict[int, pgoutput.Relation] = {}
        self._adding: list[SourceTable] = []
        self._before: list[Event] = []
        self._truncations: deque[tuple[int, int]] = deque(maxlen=_TRUNCATIONS_KEPT)
        self._decoder = make_decoder()
        self._start = start
        self._told = start
        self._queue: list[bytes] = []
        self._place = 0
        self._spilling: int | None = None
        self._replay: _Replay | None = None
        self._streamed: pgoutput.StreamCommit | None = None
        self._transactions = self._last_counted = 0
        self._failure: SourceError | None = None

    def add_table(self, table: SourceTable) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`.

        Of a transaction that is half way rows were left out: the table is told from the next one on.
        """
        if self._is_half_way:
            self._adding.append(table)
            return
        self._known[table.source_id] = table
        described = self._ignored.get(table.source_id or 0)
        if described is not None:
            self._follow(described, self._before, is_old=True)

    def remove_table(self, table: SourceTable) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        self._adding = [one for one in self._adding if one.source_id != table.source_id]
        self._known.pop(table.source_id, None)
        followed = self._followed.get(table.source_id or 0)
        if followed is not None:
            self._ignore(followed.message)

    def adopt(self, oid: int, identity: TableIdentity, table: SourceTable | None) -> None:
        """The table of number *oid* was seen as *identity* at or before :attr:`position`.

        :param table: the captured table from here on, where its columns changed and no row with the new ones has come.
        """
        self._relations.seen(oid, identity)
        if table is not None:
            self._known[oid] = table

    @property
    def identity(self) -> Mapping[str, Any] | None:
        """As it was given: of the server, for places of its log."""
        return self._identity

    @property
    def position(self) -> Lsn:
        """All that committed before it was told."""
        return self._told.lsn

    def has_truncated(self, oid: int, xid: int) -> bool:
        """Whether the transaction of this number told that the table was truncated, not long ago."""
        return (oid, xid) in self._truncations

    def poll(self, timeout: float, *, linger: float = 0.0, stop_at_boundary: bool) -> list[Event]:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        if self._adding and not self._is_half_way:
            adding, self._adding = self._adding, []
            for table in adding:
                self.add_table(table)
        stop_at_boundary |= bool(self._adding)
        until = time.monotonic() + linger
        if self._before:
            events, self._before = [*self._before, Boundary(self._told, None, 0, self._identity)], []
            return events
        events = []
        if self._failure is not None:
            raise self._failure
        if self._replay is None and self._place >= len(self._queue):
            self._queue, self._place = self._stream.read(MAX_MESSAGES, MAX_BYTES, timeout), 0
            if not self._queue:
                return self._idle()
        else:
            self._stream.send_status()
        while True:
            while self._take_some(events, stop_at_boundary=stop_at_boundary):
                pass
            if stop_at_boundary or not self._read_more(until):
                break
        self._tell_rows(events)
        self._tell_boundary(events)
        return events

    def _read_more(self, until: float) -> bool:
        """Whether more came in time, and there is room for it: rows are the cheaper the more come at once."""
        left = until - time.monotonic()
        if left <= 0 or self._is_full or self._replay is not None or self._place < len(self._queue):
            return False
        try:
            self._queue, self._place = self._stream.read(MAX_MESSAGES, MAX_BYTES, left), 0
        except SourceError as error:
            self._failure = error
        return self._failure is None and bool(self._queue)

    def _take_some(self, events: list[Event], *, stop_at_boundary: bool) -> bool:
        """Decode on; whether there is more to take in this call."""
        if self._replay is not None:
            more = self._replay_some(self._replay, events)
            return more and not (stop_at_boundary and self._replay is None)
        if self._place >= len(self._queue):
            return False
        if self._spilling is not None:
            self._spill_block(self._spilling)
            return True
        before = self._decoder.last_commit
        self._place = self._decoder.feed(
            self._queue, self._place, max_rows=MAX_ROWS, max_bytes=MAX_BYTES, stop_at_commit=stop_at_boundary
        )
        if self._decoder.last_commit != before:
            self._streamed = None
            if stop_at_boundary and not self._decoder.in_transaction:
                return False
        if self._is_full or self._place >= len(self._queue):
            return False
        message = self._queue[self._place]
        self._place += 1
        self._control(pgoutput.parse_control(message), events)
        return True

    @property
    def _is_full(self) -> bool:
        return self._decoder.held_rows >= MAX_ROWS or self._decoder.held_bytes >= MAX_BYTES

    def _control(self, message: pgoutput.ControlMessage, events: list[Event]) -> None:
        match message:
            case pgoutput.Relation():
                self._follow(message, events)
            case pgoutput.Truncate():
                self._truncate(message, events)
            case pgoutput.StreamStart():
                self._spilling = message.xid
            case pgoutput.StreamAbort():
                self._spill.abort(message.xid, message.subxid)
            case pgoutput.StreamCommit():
                self._tell_rows(events)
                self._decoder.begin_streamed(message.commit_lsn, message.commit_time, message.xid)
                self._replay = _Replay(message, self._spill.replay(message.xid))
            case _:
                pass

    # -- tables ----------------------------------------------------------------------------------------------------

    def _follow(self, relation: pgoutput.Relation, events: list[Event], *, is_old: bool = False) -> None:
        self._tell_rows(events)
        known = self._known.get(relation.oid) or self._by_name(relation)
        if known is None:
            self._ignore(relation)
            return
        try:
            transaction = self._decoder.transaction
            xid = None if transaction is None else transaction[2]
            described = self._relations.describe(relation, known, xid=xid, is_old=is_old)
            if self._may_be_behind and relation.oid not in self._followed:
                known = as_narrow(known, described.table)
            projection, change = follow(known, described.table, self._policy, described.defaults)
        except (SchemaStopped, UnsupportedTable, RefusedValue) as error:
            self._stop(relation, known, error, events)
            return
        keys = [place for place, column in enumerate(relation.columns) if column.is_key]
        self._decoder.add_relation(relation.oid, len(relation.columns), keys)
        self._ignored.pop(relation.oid, None)
        self._followed[relation.oid] = _Followed(relation, described, projection)
        self._known[relation.oid] = projection.table
        if change is not None:
            events.append(change)

    def _stop(
        self,
        relation: pgoutput.Relation,
        known: SourceTable,
        error: SchemaStopped | UnsupportedTable | RefusedValue,
        events: list[Event],
    ) -> None:
        """The changes of *known* end here. :raises SchemaStopped: by policy."""
        if self._policy is SchemaPolicy.STOP and not isinstance(error, RefusedValue | TableLocked):
            raise error
        self._known.pop(known.source_id, None)
        self._ignore(relation)
        events.append(Stopped.by(known, error))

    def _ignore(self, relation: pgoutput.Relation) -> None:
        self._followed.pop(relation.oid, None)
        self._ignored[relation.oid] = relation
        self._decoder.ignore_relation(relation.oid)

    def _by_name(self, relation: pgoutput.Relation) -> SourceTable | None:
        """A captured table of that name with another oid: it was dropped and made anew, which :func:`follow` tells."""
        for table in self._known.values():
            if (table.namespace, table.name) == (relation.namespace, relation.name):
                return table
        return None

    def _truncate(self, message: pgoutput.Truncate, events: list[Event]) -> None:
        self._tell_rows(events)
        if self._decoder.transaction is None:
            raise pgoutput.protocol_error("a truncation came outside a transaction.")
        commit_lsn, commit_time, xid = self._decoder.transaction
        position = PostgresOffset.of_row(commit_lsn, self._decoder.next_seq, xid)
        self._decoder.next_seq += 1
        for oid in message.oids:
            self._truncations.append((oid, xid))
            if oid in self._followed and self._is_new(commit_lsn):
                events.append(Truncated(self._followed[oid].projection.table, position, commit_time))

    # -- rows ------------------------------------------------------------------------------------------------------

    def _tell_rows(self, events: list[Event]) -> None:
        commits = []
        for raw in self._decoder.take():
            if self._is_new(int(raw.commit_lsn[-1])):
                commits.append(np.unique(raw.commit_lsn))
                self._tell_table(raw, self._followed[raw.oid], events)
        if commits:
            seen = np.unique(np.concatenate(commits)) if len(commits) > 1 else commits[0]
            self._transactions += len(seen) - int(seen[0] == self._last_counted)
            self._last_counted = int(seen[-1])

    def _tell_table(self, raw: RawRows, followed: _Followed, events: list[Event]) -> None:
        """The rows of one table; where one cannot be told, those of the transactions before it, and that it stops."""
        try:
            events.append(self._changes(raw, followed))
        except TableLocked as error:  # each further try would wait for the lock
            self._stop(followed.message, followed.projection.table, error, events)
        except (RefusedValue, SchemaStopped) as error:
            ends = [0, *(np.flatnonzero(np.diff(raw.commit_lsn)) + 1).tolist()]
            end = told_before(ends, lambda end: self._changes(raw.up_to(end), followed))
            if end:
                events.append(self._changes(raw.up_to(end), followed))
            self._stop(followed.message, followed.projection.table, error, events)

    def _is_new(self, commit_lsn: int) -> bool:
        return commit_lsn >= self._start.lsn

    def _changes(self, raw: RawRows, followed: _Followed) -> Changes:
        described = followed.relation.table
        texts, unavailable = complete(
            raw, described, self._relations.sql, self._relations.shards, self._stream.send_status
        )
        typed = followed.relation.convert(texts)
        if described.parking:
            is_new = (raw.ops == Op.INSERT) | (raw.ops == Op.UPDATE_INSERT)
            masks = {
                column.name: is_new & pc.and_(made.is_null(), text.is_valid()).to_numpy(zero_copy_only=False)
                for column, made, text in zip(described.columns, typed, texts, strict=True)
                if column in described.parking
            }
            unavailable = with_parked(unavailable, masks)
        columns = followed.projection.apply(typed, len(raw.ops))
        positions = positions_of(raw.commit_lsn, raw.seq, raw.xid)
        table = followed.projection.table
        rows = pa.RecordBatch.from_arrays(
            [*columns, positions, _commit_times(raw.commit_time), unavailable],
            schema=table.log_schema(POSITION_TYPE),
        )
        return Changes(table, rows, pa.array(raw.ops))

    # -- streamed transactions -------------------------------------------------------------------------------------

    def _spill_block(self, xid: int) -> None:
        """Put away the messages of a streamed transaction, up to the end of its block or of the queue."""
        end = self._place
        while end < len(self._queue) and pgoutput.type_of(self._queue[end]) != pgoutput.STREAM_STOP:
            end += 1
        self._spill.append(xid, self._queue[self._place : end])
        self._place = end
        if end < len(self._queue):
            self._place += 1
            self._spilling = None

    def _replay_some(self, replay: _Replay, events: list[Event]) -> bool:
        """Tell the next piece of the spilled transaction; whether there is more room in this call."""
        if replay.place >= len(replay.block):
            replay.block, replay.place = next(replay.blocks, []), 0
            if not replay.block:
                self._tell_rows(events)
                self._decoder.end_streamed()
                self._spill.drop(replay.commit.xid)
                self._replay, self._streamed = None, replay.commit
                return True
        replay.place = self._decoder.feed(
            replay.block, replay.place, max_rows=MAX_ROWS, max_bytes=MAX_BYTES, stop_at_commit=False
        )
        if self._is_full:
            return False
        if replay.place < len(replay.block):
            message = replay.block[replay.place]
            replay.place += 1
            self._control(pgoutput.parse_control(message, streamed=True), events)
        return True

    # -- boundaries ------------------------------------------------------------------------------------------------

    @property
    def _is_half_way(self) -> bool:
        return self._decoder.in_transaction or self._replay is not None

    def _tell_boundary(self, events: list[Event]) -> None:
        """What ended last, unless a transaction is half way."""
        if self._is_half_way:
            return
        if self._streamed is not None:
            ended = self._streamed.commit_lsn, self._streamed.end_lsn, self._streamed.commit_time
        elif self._decoder.last_commit is not None:
            ended = Lsn(self._decoder.last_commit[0]), Lsn(self._decoder.last_commit[1]), self._decoder.last_commit[2]
        else:
            return
        position = PostgresOffset.end_of(ended[0], ended[1], 0)
        if position > self._told:
            self._told = position
            events.append(Boundary(position, ended[2], self._transactions, self._identity))
            self._transactions = 0

    def _idle(self) -> list[Event]:
        """Nothing came: the server's log went on to here, and all of ours that lies before was told."""
        if self._decoder.in_transaction or self._spilling is not None:
            return []
        position = PostgresOffset.at(self._stream.server_wal_end)
        if position.lsn <= self._told.lsn:
            return []
        self._told = position
        return [Boundary(position, None, 0, self._identity)]

    def acknowledge(self, position: CdcOffset) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        assert isinstance(position, PostgresOffset)
        self._stream.acknowledge(position.lsn)

    def status(self) -> StreamStatus:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        return StreamStatus(
            self._stream.bytes_received,
            max(0, self._stream.server_wal_end - self._told.lsn),
            self._held_bytes(),
            self._spill.statistics().bytes,
        )

    def close(self) -> None:
        """End the stream; what is spilled is worthless then."""
        try:
            self._stream.close()
        finally:
            self._spill.close()


def _commit_times(times: NDArray[np.int64]) -> pa.TimestampArray:
    return pa.Array.from_buffers(pa.timestamp("us", tz="UTC"), len(times), [None, pa.py_buffer(times)])

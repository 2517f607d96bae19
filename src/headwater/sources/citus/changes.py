"""CitusChangeStream: the streams of all nodes as one.

A transaction of a node is told whole, and those of one node in its order; between nodes there is none, so any order
will do, but for one thing: a row whose shard has moved has its older changes on one node and the newer ones on another.
So every node is read behind a gate that opens up to *alignments* (:class:`~headwater.sources.citus.cluster.Alignment`):

=========  ==========================================================  =============================================
state      what is told                                                goes to
=========  ==========================================================  =============================================
at rest    what the nodes have before their gates, in turns            at rest, with gates further on; merging, when
                                                                       shards are elsewhere in the next alignment
merging    up to it, in the order of the times of their commits        at rest, when all nodes are there
=========  ==========================================================  =============================================

At a boundary no node is half way.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Mapping
from typing import Final

from headwater.sources.citus.cluster import TableKind
from headwater.sources.citus.followed_nodes import FollowedNodes
from headwater.sources.citus.members import Member, Members, naming
from headwater.sources.citus.merge import Merge, Piece, pieces_of
from headwater.sources.citus.merged_tables import MergedTables
from headwater.sources.citus.offset import CitusOffset
from headwater.sources.events import Boundary, Event, SchemaChanged, StreamStatus
from headwater.sources.offset import CdcOffset
from headwater.sources.postgres.offset import PostgresOffset
from headwater.sources.table import SourceTable

_WAIT_SECONDS: Final = 0.25
_MERGE_SECONDS: Final = 0.01
_PIECE_SECONDS: Final = 1.0


class CitusChangeStream:
    """The changes of *tables* after *start*.

    :param kinds: of the tables, by name.
    """

    def __init__(
        self,
        members: Members,
        tables: Iterable[SourceTable],
        kinds: Mapping[str, TableKind],
        start: CitusOffset,
    ) -> None:
        self._open: dict[int, Member] = {}
        self._tables = MergedTables(members, tables, kinds, self._open, start.number)
        self._nodes = FollowedNodes(members, self._tables, self._open, start)
        self._merge = Merge()
        self._half: int | None = None

    @property
    def position(self) -> CitusOffset:
        """All that committed before it was told."""
        return self._nodes.told

    def has_reached(self, position: CitusOffset) -> bool:
        """Whether every node has told all that it committed before *position*; one that was retired has."""
        return self._nodes.has_reached(position)

    def note_shards(self, tables: Iterable[SourceTable]) -> None:
        """Which shards the tables have, before they are captured, anew perhaps."""
        self._nodes.note_shards(tables)

    def become(self, table: SourceTable) -> SchemaChanged | None:
        """A table has the columns that the coordinator has now: *table*; ``None``: it had them before.

        :raises RereadNeeded: its log cannot follow.
        """
        return self._tables.become(table)

    # -- the loop --------------------------------------------------------------------------------------------------

    def poll(self, timeout: float, *, linger: float = 0.0, stop_at_boundary: bool) -> list[Event]:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        began = time.monotonic()
        end, until = began + timeout, began + linger
        while True:
            events = self._step(max(until - time.monotonic(), 0.0), stop_at_boundary)
            left = end - time.monotonic()
            if events or left <= 0:
                return events
            self._wait(min(left, _WAIT_SECONDS))

    def _step(self, linger: float, stop_at_boundary: bool) -> list[Event]:
        nodes = self._nodes
        for member in self._open.values():
            member.gate.send_status()
        if self._half is not None:
            return self._take(self._half, 0.0, stop_at_boundary)
        if not nodes.stops and nodes.target is None:
            nodes.look()
        if nodes.stops and not self._merge.is_half:
            events, nodes.stops = [*nodes.stops, Boundary(nodes.told, None, 0)], []
            return events
        if nodes.target is not None:
            return self._go_on()
        for _ in range(len(nodes.turns)):
            nodes.turns.rotate(-1)
            events = self._take(nodes.turns[0], linger / len(nodes.turns), stop_at_boundary)
            if events:
                return events
        return []

    def _wait(self, seconds: float) -> None:
        """Until a node sends something, or an alignment may be taken for what came before."""
        if self._nodes.target is not None or self._half is not None:
            time.sleep(min(seconds, _MERGE_SECONDS))
        elif self._nodes.is_waiting:
            time.sleep(min(seconds, self._nodes.next_look))
        else:
            waiting = select.poll()
            for member in self._open.values():
                waiting.register(member.gate, select.POLLIN)
            waiting.poll(round(seconds * 1000))

    def _take(self, group: int, linger: float, stop_at_boundary: bool) -> list[Event]:
        events = self._poll(group, 0.0 if self._half is None else _PIECE_SECONDS, linger, stop_at_boundary)
        if not events:
            return []
        self._half = None if isinstance(events[-1], Boundary) else group
        return [told for piece in pieces_of(events) for told in self._tell({group: piece})]

    def _poll(self, group: int, timeout: float, linger: float, stop_at_boundary: bool) -> list[Event]:
        member = self._open[group]
        with naming(member.address):
            return member.stream.poll(timeout, linger=linger, stop_at_boundary=stop_at_boundary)

    def _go_on(self) -> list[Event]:
        """Tell the transactions that committed first of those that the nodes come with, up to the target."""
        if self._nodes.is_late():
            return []
        missing = False
        for group in self._open:
            if group in self._merge or self._nodes.is_there(group):
                continue
            events = self._poll(group, 0.0, 0.0, False)
            if events:
                self._merge.put(group, events)
            missing |= not events
        if missing:
            return []
        taken = self._merge.take()
        if taken:
            return self._tell(taken)
        self._nodes.end_target()
        return [Boundary(self._nodes.told, None, 0)]

    def _tell(self, taken: Mapping[int, Piece]) -> list[Event]:
        """Pieces of nodes, of the merged tables; at a boundary no node is half way."""
        events = self._tables.tell(taken, self._nodes.told)
        boundaries = [piece.boundary for piece in taken.values()]
        for group, boundary in zip(taken, boundaries, strict=True):
            if boundary is not None:
                assert isinstance(boundary.position, PostgresOffset)
                self._nodes.go_on(group, boundary.position, self._tables.number)
        whole = [boundary for boundary in boundaries if boundary is not None]
        if len(whole) == len(boundaries):
            time_us = max((one.commit_time_us for one in whole if one.commit_time_us is not None), default=None)
            events.append(Boundary(self._nodes.told, time_us, sum(one.transactions for one in whole)))
        return events

    # -- what the capture asks -------------------------------------------------------------------------------------

    def acknowledge(self, position: CdcOffset) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        assert isinstance(position, CitusOffset)
        self._nodes.acknowledge(position)

    def add_table(self, table: SourceTable) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        self._tables.add(table)

    def remove_table(self, table: SourceTable) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        self._tables.remove(table)

    def status(self) -> StreamStatus:
        """See :class:`~headwater.sources.events.ChangeStream`: of all nodes together."""
        each = [member.stream.status() for member in self._open.values()]
        return StreamStatus(
            sum(one.bytes_received for one in each),
            sum(one.behind_bytes or 0 for one in each),
            None if any(one.held_bytes is None for one in each) else sum(one.held_bytes or 0 for one in each),
            sum(one.spilled_bytes for one in each),
        )

    def close(self) -> None:
        """End the streams of all nodes."""
        self._nodes.close()

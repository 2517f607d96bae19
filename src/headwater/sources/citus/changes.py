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

At a boundary no node is half way. A node that joined is followed from the first alignment that has it; one that left is
read to its end with the merge, and then retired. A table of which a shard is gone stops, unless all of it was told
(:mod:`~headwater.sources.citus.shard_numbers`).
"""

from __future__ import annotations

import contextlib
import select
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.sources.citus import shard_numbers
from headwater.sources.citus.cluster import Alignment, Node, TableKind
from headwater.sources.citus.columns import MergedTable
from headwater.sources.citus.members import Joining, Member, Members, distributed, here, naming, present_tables
from headwater.sources.citus.merge import Merge, Piece, pieces_of
from headwater.sources.citus.numbers import CommitNumbers, node_commits
from headwater.sources.citus.offset import POSITION_TYPE, CitusOffset, NodePlace, merged_rows, positions_of
from headwater.sources.citus.shard_numbers import LastSeen, tables_with_gone, was_all_told
from headwater.sources.errors import SchemaStopped, SourceUnreachable
from headwater.sources.events import Boundary, Changes, Event, SchemaChanged, Stopped, StreamStatus, Truncated
from headwater.sources.offset import CdcOffset
from headwater.sources.postgres.offset import PostgresOffset
from headwater.sources.postgres.slot import ServerIdentity
from headwater.sources.table import COMMIT_TIMESTAMP_COLUMN, POSITION_COLUMN, UNAVAILABLE_COLUMN, SourceTable

ALIGN_SECONDS: Final = 0.05
"""The least time between two alignments while something waits for one."""
LOOK_SECONDS: Final = 0.5
"""… and while nothing does: a node that joins must be followed before it gets its first shard."""
_WAIT_SECONDS: Final = 0.25
_MERGE_SECONDS: Final = 0.01
_PIECE_SECONDS: Final = 1.0
_JOIN_SECONDS: Final = 1.0
"""How long all nodes wait for one that joins, which mostly takes an instant."""


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
        self._members = members
        self._merged = {table.full_name: MergedTable(table) for table in tables}
        self._kinds = dict(kinds)
        self._told = start
        self._numbers = CommitNumbers(start.number)
        self._open: dict[int, Member] = {}
        self._turns: deque[int] = deque()
        self._half: int | None = None
        self._target: _Target | None = None
        self._oids: dict[tuple[int, str], int | None] = {}
        self._merge = Merge()
        self._leaving: dict[int, Member] = {}
        self._leaving_ids: dict[int, str] = {}
        self._joining: dict[int, Joining] = {}
        self._looked = 0.0
        self._last_seen: LastSeen | None = None
        self._stops: list[Event] = []
        self._split: dict[str, float] = {}
        try:
            now = self._align()
            addresses = {node.group: node.address for node in now.nodes}
            for group, place in start.nodes.items():
                if group not in addresses and group not in now.inactive:
                    members.end_of(group, place.address)  # raises where it is gone for good
                known = replace(place, address=addresses.get(group, place.address))
                self._told = replace(self._told, nodes={**self._told.nodes, group: known})
                self._follow(group, known)
            self._open_gates(now)
        except BaseException:
            self.close()
            raise

    # -- nodes -----------------------------------------------------------------------------------------------------

    def _follow(self, group: int, place: NodePlace) -> None:
        tables = here(group, self._kinds, [merged.table for merged in self._merged.values()])
        with naming(place.address):
            known = self._on_node(group, place.address, [table.full_name for table in tables])
        self._open[group] = self._members.follow(group, place, known)
        self._turns.append(group)

    def _on_node(self, group: int, address: str, names: Sequence[str]) -> list[SourceTable]:
        """The tables with the numbers of a node; one that it has no longer keeps its name, for what is told of it."""
        coordinator = self._members.described(names)
        defaults = self._members.defaults(list(coordinator.values()))
        present = present_tables(self._members.source(group, address), names)
        made = []
        for place, name in enumerate(names):
            merged = self._merged[name]
            there = present.get(name, replace(merged.table, source_id=-2 - place))
            made.append(merged.on_node(group, there, coordinator.get(name, merged.table), defaults.get(name)))
            self._oids[group, name] = there.source_id
        return made

    def _open_gates(self, now: Alignment) -> None:
        """Let pass what lies before *now*; follow nodes that joined, and begin to take leave of those that are gone.

        :raises SourceUnreachable: a node has another address now: the streams must be opened again.
        """
        ends = dict(now.ends)
        shards = {name: now.shards[oid] for name, oid in self._distributed().items() if oid in now.shards}
        gone = []
        for group, place in self._told.nodes.items():
            if group in now.inactive:
                ends[group] = self._members.cluster.log_end(group, place.address)
            elif group not in ends:
                ends[group] = self._members.end_of(group, place.address)
                gone.append(group)
        if not self._keep_whole(shards, ends):
            return
        for node in now.nodes:
            known = self._told.nodes.get(node.group)
            if known is None and node.group not in self._told.retired:
                if not self._is_leaving(node, gone):
                    self._join(node)
            elif known is not None and known.address != node.address:
                raise SourceUnreachable(
                    f"Node {known.address} is at {node.address} by now.", next_step="It is followed there."
                )
        for group, member in self._open.items():
            member.gate.limit = max(member.gate.limit, ends[group])
        if gone or now.placements != self._told.placements:
            self._target = _Target(ends, now.placements, tuple(gone), shards)
        elif shards:
            self._told = replace(self._told, shards={**self._told.shards, **shards})
        self._last_seen = LastSeen(time.monotonic(), ends)

    def _distributed(self) -> dict[str, int]:
        """The distributed tables, with their oids on the coordinator."""
        tables = distributed(self._kinds, [merged.table for merged in self._merged.values()])
        return {table.full_name: table.source_id for table in tables if table.source_id is not None}

    def _align(self) -> Alignment:
        """With the shards of tables where they are not known, or may be others by now."""
        tables = self._distributed()
        known = self._told.placements if tables.keys() <= self._told.shards.keys() else None
        return self._members.cluster.align(list(tables.values()), known)

    def note_shards(self, tables: Iterable[SourceTable]) -> None:
        """Which shards the tables have, before they are captured, anew perhaps."""
        names = {table.source_id: table.full_name for table in tables if table.source_id is not None}
        found = self._members.cluster.shard_numbers(list(names))
        noted = {names[oid]: numbers for oid, numbers in found.items() if numbers}
        self._told = replace(self._told, shards={**self._told.shards, **noted})

    def _keep_whole(self, shards: Mapping[str, frozenset[int]], ends: Mapping[int, int]) -> bool:
        """Stop the tables of which a shard is gone that was not told to its end; ``False``: that cannot be said yet."""
        names = tables_with_gone(self._told.shards, shards)
        if not names:
            return True
        sent = {group: member.gate.server_wal_end for group, member in self._open.items()}
        told = {group: int(place.at.lsn) for group, place in self._told.nodes.items()}
        moment = time.monotonic()
        whole = was_all_told(self._last_seen, moment, sent, told, ends)
        if whole is False:
            self._stop_split(names)
        elif whole and self._last_seen is not None and moment < self._last_seen.moment + shard_numbers.SPLIT_SECONDS:
            self._split = dict.fromkeys(names, self._last_seen.moment + shard_numbers.SPLIT_SECONDS)
        return whole is not None

    def _stop_split(self, names: Iterable[str]) -> None:
        what = "A shard was split, or a tenant isolated, before all of its changes were read: some may be missing."
        for name in names:
            if name in self._merged:
                self._stops += self._stopped(self._merged[name].table, f"{what} Run: headwater resnapshot {name}")

    def _join(self, node: Node) -> None:
        joining = self._joining.get(node.group)
        if joining is None:
            tables = here(node.group, self._kinds, [merged.table for merged in self._merged.values()])
            left = self._told.left
            joining = Joining(lambda: self._members.join(node.group, node.address, tables, left))
            self._joining[node.group] = joining
            place = joining.place(_JOIN_SECONDS)
        else:
            place = joining.place(0.0)
        if place is None:  # the other nodes go on meanwhile
            return
        del self._joining[node.group]
        self._told = replace(self._told, nodes={**self._told.nodes, node.group: place})
        self._follow(node.group, place)

    def _is_leaving(self, node: Node, gone: Sequence[int]) -> bool:
        """Whether its server was removed under another group: it joins when that was read to its end, durably."""
        addresses = {member.address for member in self._leaving.values()}
        addresses |= {self._told.nodes[group].address for group in gone}
        servers = {place.server for group, place in self._told.nodes.items() if group in gone}
        if not addresses:
            return False
        ids = {*self._leaving_ids.values(), *(server.system_id for server in servers if server is not None)}
        return node.address in addresses or self._members.identity(node.group, node.address).system_id in ids

    def _look(self) -> None:
        """Take a new alignment when something waits for it, or when it is time to."""
        moment = time.monotonic()
        if moment - self._looked >= (ALIGN_SECONDS if self._is_waiting else LOOK_SECONDS):
            self._looked = moment
            self._open_gates(self._align())

    @property
    def _is_waiting(self) -> bool:
        return any(member.gate.is_closed for member in self._open.values())

    # -- the loop --------------------------------------------------------------------------------------------------

    @property
    def position(self) -> CitusOffset:
        """All that committed before it was told."""
        return self._told

    def has_reached(self, position: CitusOffset) -> bool:
        """Whether every node has told all that it committed before *position*; one that was retired has."""
        for group, place in position.nodes.items():
            if group in self._told.retired:
                continue
            if group not in self._told.nodes or self._told.nodes[group].at.lsn < place.at.lsn:
                return False
        return True

    def poll(self, timeout: float, *, linger: float = 0.0, stop_at_boundary: bool) -> list[Event]:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        end = time.monotonic() + timeout
        while True:
            events = self._step(linger, stop_at_boundary)
            left = end - time.monotonic()
            if events or left <= 0:
                return events
            self._wait(min(left, _WAIT_SECONDS))

    def _step(self, linger: float, stop_at_boundary: bool) -> list[Event]:
        for member in self._open.values():
            member.gate.send_status()
        if self._half is not None:
            return self._take(self._half, 0.0, stop_at_boundary)
        if not self._stops and self._target is None:
            self._look()
        if self._stops and not self._merge.is_half:
            events, self._stops = [*self._stops, Boundary(self._told, None, 0)], []
            return events
        if self._target is not None:
            return self._go_on(self._target)
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            events = self._take(self._turns[0], linger / len(self._turns), stop_at_boundary)
            if events:
                return events
        return []

    def _wait(self, seconds: float) -> None:
        """Until a node sends something, or an alignment may be taken for what came before."""
        if self._target is not None or self._half is not None:
            time.sleep(min(seconds, _MERGE_SECONDS))
        elif self._is_waiting:
            time.sleep(max(0.0, min(seconds, ALIGN_SECONDS - (time.monotonic() - self._looked))))
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

    # -- merging ---------------------------------------------------------------------------------------------------

    def _go_on(self, target: _Target) -> list[Event]:
        """Tell the transactions that committed first of those that the nodes come with, up to *target*."""
        late = [name for name, until in self._split.items() if time.monotonic() >= until]
        if late:  # what a node sends after so long may lack the rest of the shard
            self._split = {}
            self._stop_split(late)
            return []
        missing = False
        for group in self._open:
            if group in self._merge or self._told.nodes[group].at.lsn >= target.ends.get(group, 0):
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
        self._target, self._split = None, {}
        left = dict(self._told.left)
        for group in target.gone:
            self._leaving[group] = self._open.pop(group)
            self._turns.remove(group)
            place = self._told.nodes[group]
            if place.server is not None:
                self._leaving_ids[group] = place.server.system_id
                left[place.server.system_id] = place.at.lsn
        nodes = {group: place for group, place in self._told.nodes.items() if group not in target.gone}
        retired = (*self._told.retired, *target.gone)
        shards = {**self._told.shards, **target.shards}
        self._told = replace(
            self._told, nodes=nodes, retired=retired, placements=target.placements, left=left, shards=shards
        )
        return [Boundary(self._told, None, 0)]

    # -- what nodes tell -------------------------------------------------------------------------------------------

    def _tell(self, taken: Mapping[int, Piece]) -> list[Event]:
        """Pieces of nodes, of the merged tables; at a boundary no node is half way."""
        numbers = self._numbers.of({group: piece.commits for group, piece in taken.items()})
        rows: dict[str, list[Changes]] = {}
        told: list[Event] = []
        for group, piece in taken.items():
            for event in piece.events:
                assert not isinstance(event, Boundary)
                name = (event.before if isinstance(event, SchemaChanged) else event.table).full_name
                merged = self._merged.get(name)
                if merged is None:
                    continue
                if isinstance(event, Changes):
                    of_rows = numbers[group][np.searchsorted(piece.commits.lsns, node_commits(event))]
                    rows.setdefault(name, []).append(self._changes(group, merged, event, of_rows))
                else:
                    told += self._changed(group, merged, event)
        for some in rows.values():
            told += some if len(taken) == 1 else [_by_position(some)]
        boundaries = [piece.boundary for piece in taken.values()]
        for group, boundary in zip(taken, boundaries, strict=True):
            if boundary is not None:
                assert isinstance(boundary.position, PostgresOffset)
                identity = self._open[group].stream.identity  # a boundary that the merge made has none
                server = None if identity is None else ServerIdentity.from_json(identity)
                self._told = self._told.with_node(group, boundary.position, self._numbers.last, server)
        whole = [boundary for boundary in boundaries if boundary is not None]
        if len(whole) == len(boundaries):
            time_us = max((one.commit_time_us for one in whole if one.commit_time_us is not None), default=None)
            told.append(Boundary(self._told, time_us, sum(one.transactions for one in whole)))
        return told

    def _changes(self, group: int, merged: MergedTable, event: Changes, numbers: NDArray[np.uint64]) -> Changes:
        rows = event.rows
        own = [rows.column(place) for place in range(len(event.table.columns))]
        columns = merged.project(group, event.table, own, rows.num_rows)
        positions = positions_of(rows.column(POSITION_COLUMN), group, numbers)
        made = pa.RecordBatch.from_arrays(
            [*columns, positions, rows.column(COMMIT_TIMESTAMP_COLUMN), rows.column(UNAVAILABLE_COLUMN)],
            schema=merged.table.log_schema(POSITION_TYPE),
        )
        return Changes(merged.table, made, event.ops)

    def _changed(self, group: int, merged: MergedTable, event: SchemaChanged | Truncated | Stopped) -> list[Event]:
        table = merged.table
        name = table.full_name
        resnapshot = f"Run: headwater resnapshot {name}"
        if isinstance(event, SchemaChanged):
            try:
                coordinator = self._members.described([name]).get(name, table)
                present = present_tables(self._open[group].source, [name]).get(name)
                change = merged.follow(group, event, coordinator, present)
            except SchemaStopped as error:
                return self._stopped(table, f"{error.change[0].upper()}{error.change[1:]} {resnapshot}")
            return [] if change is None else [change]
        if isinstance(event, Stopped):
            return self._stopped(table, event.reason)
        if self._kinds[name] is TableKind.DISTRIBUTED:
            # one node empties its shards: rows that others wrote before and after it cannot be told apart here
            return self._stopped(table, f"It was truncated, node by node. {resnapshot}")
        if self._kinds[name] is TableKind.REFERENCE:
            # told of the table, not of its copy, whose rows may commit in a transaction of their own
            return self._stopped(table, f"It was truncated, which is not told in order with its rows. {resnapshot}")
        assert isinstance(event.position, PostgresOffset)
        return [Truncated(table, self._told.with_node(group, event.position, self._numbers.last))]

    def _stopped(self, table: SourceTable, reason: str) -> list[Event]:
        self.remove_table(table)
        return [Stopped(table, reason)]

    # -- what the capture asks -------------------------------------------------------------------------------------

    def acknowledge(self, position: CdcOffset) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        assert isinstance(position, CitusOffset)
        for group, place in position.nodes.items():
            if group in self._open:
                self._open[group].stream.acknowledge(place.at)
        for group in [group for group in self._leaving if group in position.retired]:
            self._leaving_ids.pop(group, None)
            self._members.retire(self._leaving.pop(group))

    def add_table(self, table: SourceTable) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        name = table.full_name
        self._merged[name] = MergedTable(table)
        self._kinds[name] = self._members.cluster.kinds().get(table.source_id or 0, TableKind.LOCAL)
        for group, member in self._open.items():
            for known in self._on_node(group, member.address, [t.full_name for t in here(group, self._kinds, [table])]):
                member.stream.add_table(known)

    def remove_table(self, table: SourceTable) -> None:
        """See :class:`~headwater.sources.events.ChangeStream`."""
        self._merged.pop(table.full_name, None)
        for group, member in self._open.items():
            if (group, table.full_name) in self._oids:
                member.stream.remove_table(replace(table, source_id=self._oids.pop((group, table.full_name))))

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
        with contextlib.ExitStack() as closing:
            for member in (*self._open.values(), *self._leaving.values()):
                closing.callback(member.stream.close)


@dataclass(frozen=True, slots=True)
class _Target:
    """What a merge goes up to. :ivar gone: groups that are retired when it is done."""

    ends: Mapping[int, int]
    placements: str
    gone: tuple[int, ...]
    shards: Mapping[str, frozenset[int]]


def _by_position(told: Sequence[Changes]) -> Changes:
    """Rows of one table from several nodes, as the merged log has them."""
    (rows,) = pa.Table.from_batches([one.rows for one in told]).combine_chunks().to_batches()
    order = pa.array(np.argsort(merged_rows(rows.column(POSITION_COLUMN))["number"], kind="stable"))
    return Changes(told[0].table, rows.take(order), pa.concat_arrays([one.ops for one in told]).take(order))

"""FollowedNodes: the nodes whose logs are read, up to where each was told, and the alignments that open their gates.

When shards are elsewhere in a new alignment, it is a *target*: all logs are merged up to it. A node that joined is
followed from the first alignment that has it; one that left is read to its end with the merge, and then retired. A
table of which a shard is gone must be read again, unless all of it was told
(:mod:`~headwater.sources.citus.shard_numbers`).
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from headwater.sources.citus import shard_numbers
from headwater.sources.citus.cluster import Alignment, Node
from headwater.sources.citus.members import Attempt, Member, Members, naming
from headwater.sources.citus.merged_tables import MergedTables
from headwater.sources.citus.offset import CitusOffset, NodePlace
from headwater.sources.citus.shard_numbers import LastSeen, tables_with_gone, was_all_told
from headwater.sources.errors import RereadNeeded, SourceUnreachable
from headwater.sources.events import Event, Stopped
from headwater.sources.postgres.offset import PostgresOffset
from headwater.sources.postgres.slot import ServerIdentity
from headwater.sources.table import SourceTable

ALIGN_SECONDS: Final = 0.05
"""The least time between two alignments while something waits for one."""
LOOK_SECONDS: Final = 0.5
"""… and while nothing does: a node that joins must be followed before it gets its first shard."""
_JOIN_SECONDS: Final = 1.0
"""How long all nodes wait for one that joins, which mostly takes an instant."""
SLOT_SECONDS: Final = 60.0
"""Between two attempts to drop a slot on a server that left."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a merge goes up to. :ivar gone: groups that are retired when it is done."""

    ends: Mapping[int, int]
    placements: str
    gone: tuple[int, ...]
    shards: Mapping[str, frozenset[int]]


class FollowedNodes:
    """The nodes of *start*, and those that join.

    :param nodes: them, by group; filled here. :param start: up to where they were told.
    :ivar told: up to where they are told.
    :ivar target: what is merged up to; ``None`` at rest.
    :ivar turns: the groups, in the order in which they are read.
    :ivar stops: tables that cannot go on; tell them.
    """

    def __init__(self, members: Members, tables: MergedTables, nodes: dict[int, Member], start: CitusOffset) -> None:
        self._members = members
        self._tables = tables
        self._open = nodes
        self.told = start
        self.target: Target | None = None
        self.turns: deque[int] = deque()
        self.stops: list[Event] = []
        self._leaving: dict[int, Member] = {}
        self._leaving_ids: dict[int, str] = {}
        self._joining: dict[int, Attempt[NodePlace]] = {}
        self._dropping: tuple[str, Attempt[bool]] | None = None
        self._drop_at: dict[str, float] = {}
        self._looked = 0.0
        self._last_seen: LastSeen | None = None
        self._split: dict[str, float] = {}
        try:
            now = self._align()
            addresses = {node.group: node.address for node in now.nodes}
            for group, place in start.nodes.items():
                if group not in addresses and group not in now.inactive:
                    members.end_of(group, place.address)  # raises where it is gone for good
                known = replace(place, address=addresses.get(group, place.address))
                self.told = replace(self.told, nodes={**self.told.nodes, group: known})
                self._follow(group, known)
            self._open_gates(now)
        except BaseException:
            self.close()
            raise

    def _follow(self, group: int, place: NodePlace) -> None:
        with naming(place.address):
            known = self._tables.on_node(group, place.address, self._tables.followed(group))
        self._open[group] = self._members.follow(group, place, known)
        self.turns.append(group)

    # -- alignments ------------------------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether a node has something that waits for an alignment."""
        return any(member.gate.is_closed for member in self._open.values())

    @property
    def next_look(self) -> float:
        """How many seconds from now an alignment may be taken for what waits."""
        return max(0.0, ALIGN_SECONDS - (time.monotonic() - self._looked))

    def look(self) -> None:
        """Take a new alignment when something waits for it, or when it is time to. Not while there is a target."""
        moment = time.monotonic()
        if moment - self._looked >= (ALIGN_SECONDS if self.is_waiting else LOOK_SECONDS):
            self._looked = moment
            self._open_gates(self._align())

    def _align(self) -> Alignment:
        """With the shards of tables where they are not known, or may be others by now."""
        tables = self._tables.distributed()
        known = self.told.placements if tables.keys() <= self.told.shards.keys() else None
        return self._members.cluster.align(list(tables.values()), known)

    def _open_gates(self, now: Alignment) -> None:
        """Let pass what lies before *now*; follow nodes that joined, and begin to take leave of those that are gone.

        :raises SourceUnreachable: a node has another address now: the streams must be opened again.
        """
        ends = dict(now.ends)
        shards = {name: now.shards[oid] for name, oid in self._tables.distributed().items() if oid in now.shards}
        gone = []
        for group, place in self.told.nodes.items():
            if group in now.inactive:
                ends[group] = self._members.cluster.log_end(group, place.address)
            elif group not in ends:
                ends[group] = self._members.end_of(group, place.address)
                gone.append(group)
        if not self._keep_whole(shards, ends):
            return
        self._drop_slots(now)
        for node in now.nodes:
            known = self.told.nodes.get(node.group)
            if known is None and node.group not in self.told.retired:
                if self._dropping is None and not self._is_leaving(node, gone):
                    self._join(node)
            elif known is not None and known.address != node.address:
                raise SourceUnreachable(
                    f"Node {known.address} is at {node.address} by now.", next_step="It is followed there."
                )
        for group, member in self._open.items():
            member.gate.limit = max(member.gate.limit, ends[group])
        if gone or now.placements != self.told.placements:
            self.target = Target(ends, now.placements, tuple(gone), shards)
        elif shards:
            self.told = replace(self.told, shards={**self.told.shards, **shards})
        self._last_seen = LastSeen(time.monotonic(), ends)

    # -- nodes that come and go ------------------------------------------------------------------------------------

    def _join(self, node: Node) -> None:
        joining = self._joining.get(node.group)
        if joining is None:
            tables, left = self._tables.here(node.group), self.told.left
            joining = Attempt(lambda: self._members.join(node.group, node.address, tables, left))
            self._joining[node.group] = joining
            place = joining.result(_JOIN_SECONDS)
        else:
            place = joining.result(0.0)
        if place is None:  # the other nodes go on meanwhile
            return
        del self._joining[node.group]
        self.told = replace(self.told, nodes={**self.told.nodes, node.group: place})
        if place.server is not None:
            self._forget_slot(place.server.system_id)
        self._follow(node.group, place)

    def _is_leaving(self, node: Node, gone: Sequence[int]) -> bool:
        """Whether its server was removed under another group: it joins when that was read to its end, durably."""
        addresses = {member.address for member in self._leaving.values()}
        addresses |= {self.told.nodes[group].address for group in gone}
        servers = {place.server for group, place in self.told.nodes.items() if group in gone}
        if not addresses:
            return False
        ids = {*self._leaving_ids.values(), *(server.system_id for server in servers if server is not None)}
        return node.address in addresses or self._members.identity(node.group, node.address).system_id in ids

    def end_target(self) -> None:
        """All nodes are there: take leave of those that are gone."""
        target = self.target
        assert target is not None
        self.target, self._split = None, {}
        left, slots = dict(self.told.left), dict(self.told.slots)
        for group in target.gone:
            self._leaving[group] = self._open.pop(group)
            self.turns.remove(group)
            place = self.told.nodes[group]
            assert place.server is not None
            self._leaving_ids[group] = place.server.system_id
            left[place.server.system_id] = place.at.lsn
            slots[place.server.system_id] = place.address
        nodes = {group: place for group, place in self.told.nodes.items() if group not in target.gone}
        retired = (*self.told.retired, *target.gone)
        shards = {**self.told.shards, **target.shards}
        self.told = replace(
            self.told,
            nodes=nodes,
            retired=retired,
            placements=target.placements,
            left=left,
            shards=shards,
            slots=slots,
        )

    def _drop_slots(self, now: Alignment) -> None:
        """Try again to drop our slots on servers that left, one at a time, while no node joins.

        Of one that is back nothing is dropped here: where it joins it is decided what its slot is worth.
        """
        if self._dropping is not None:
            server, attempt = self._dropping
            is_gone = attempt.result(0.0)
            if is_gone is None:
                return
            self._dropping = None
            if is_gone:
                self._forget_slot(server)
        back = {node.address for node in now.nodes}
        busy = {
            *self._leaving_ids.values(),
            *(place.server.system_id for place in self.told.nodes.values() if place.server),
        }
        for server, address in self.told.slots.items():
            if self._joining or address in back or server in busy or time.monotonic() < self._drop_at.get(server, 0.0):
                continue
            self._drop_at[server] = time.monotonic() + SLOT_SECONDS
            told = self.told.left.get(server, 0)
            self._dropping = server, Attempt(partial(self._members.drop_left, server, address, told))
            return

    def _forget_slot(self, server: str) -> None:
        slots = {known: address for known, address in self.told.slots.items() if known != server}
        self.told = replace(self.told, slots=slots)

    # -- shards ----------------------------------------------------------------------------------------------------

    def note_shards(self, tables: Iterable[SourceTable]) -> None:
        """Which shards the tables have, before they are captured, anew perhaps."""
        names = {table.source_id: table.full_name for table in tables if table.source_id is not None}
        found = self._members.cluster.shard_numbers(list(names))
        noted = {names[oid]: numbers for oid, numbers in found.items() if numbers}
        self.told = replace(self.told, shards={**self.told.shards, **noted})

    def _keep_whole(self, shards: Mapping[str, frozenset[int]], ends: Mapping[int, int]) -> bool:
        """Stop the tables of which a shard is gone that was not told to its end; ``False``: that cannot be said yet."""
        names = tables_with_gone(self.told.shards, shards)
        if not names:
            return True
        sent = {group: member.gate.server_wal_end for group, member in self._open.items()}
        told = {group: int(place.at.lsn) for group, place in self.told.nodes.items()}
        moment = time.monotonic()
        whole = was_all_told(self._last_seen, moment, sent, told, ends)
        if whole is False:
            self._stop_split(names)
        elif whole and self._last_seen is not None and moment < self._last_seen.moment + shard_numbers.SPLIT_SECONDS:
            self._split = dict.fromkeys(names, self._last_seen.moment + shard_numbers.SPLIT_SECONDS)
        return whole is not None

    def is_late(self) -> bool:
        """Whether a merge took so long that what a node sends may lack the rest of a shard: its table stops."""
        late = [name for name, until in self._split.items() if time.monotonic() >= until]
        if late:
            self._split = {}
            self._stop_split(late)
        return bool(late)

    def _stop_split(self, names: Iterable[str]) -> None:
        what = "a shard was split, or a tenant isolated, before all of its changes were read: some may be missing."
        for name in names:
            table = self._tables.table(name)
            if table is not None:
                self.stops += self._tables.stop(Stopped.by(table, RereadNeeded(name, what)))

    # -- what was told ---------------------------------------------------------------------------------------------

    def go_on(self, group: int, at: PostgresOffset, number: int) -> None:
        """A node was told up to *at*."""
        identity = self._open[group].stream.identity  # of a place that the merge made, too
        server = None if identity is None else ServerIdentity.from_json(identity)
        self.told = self.told.with_node(group, at, number, server)

    def is_there(self, group: int) -> bool:
        """Whether the node was told up to the target."""
        return self.target is None or self.told.nodes[group].at.lsn >= self.target.ends.get(group, 0)

    def has_reached(self, position: CitusOffset) -> bool:
        """Whether every node has told all that it committed before *position*; one that was retired has."""
        for group, place in position.nodes.items():
            if group in self.told.retired:
                continue
            if group not in self.told.nodes or self.told.nodes[group].at.lsn < place.at.lsn:
                return False
        return True

    def acknowledge(self, position: CitusOffset) -> None:
        """All before *position* is durable: nodes that had left by then are retired."""
        for group, place in position.nodes.items():
            if group in self._open:
                self._open[group].stream.acknowledge(place.at)
        for group in [group for group in self._leaving if group in position.retired]:
            server = self._leaving_ids.pop(group)
            self._drop_at[server] = time.monotonic() + SLOT_SECONDS
            if self._members.retire(self._leaving.pop(group), server, position.left[server]):
                self._forget_slot(server)

    def close(self) -> None:
        """End the streams of all nodes."""
        with contextlib.ExitStack() as closing:
            for member in (*self._open.values(), *self._leaving.values()):
                closing.callback(member.stream.close)

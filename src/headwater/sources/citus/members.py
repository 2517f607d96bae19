"""Members: the nodes that are followed, each by a Postgres source of its own, and how nodes come and go.

A node that joins has no shards yet: its slot is made before any come, under a name for the time being
(``…_joining``); only once it is certain that there were none before it, the slot gets its name. A crash between leaves
a slot that the next attempt throws away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import pyarrow as pa

from headwater import failpoints
from headwater.errors import HeadwaterError
from headwater.sources.citus.cluster import COORDINATOR, Cluster, NodeMissed, TableKind, name_node
from headwater.sources.citus.offset import NodePlace
from headwater.sources.errors import SourceBusy, SourceError, SourceNotFound, SourceUnreachable, UnsupportedTable
from headwater.sources.postgres.changes import PostgresChangeStream, RawStream
from headwater.sources.postgres.connection import connect, server_errors
from headwater.sources.postgres.offset import PostgresOffset
from headwater.sources.postgres.pgoutput import BEGIN, HEADER, STREAM_COMMIT
from headwater.sources.postgres.slot import (
    ServerIdentity,
    create_slot,
    drop_slot,
    give_up_slot,
    read_slot,
    server_position,
)
from headwater.sources.postgres.source import PostgresSource
from headwater.sources.table import SourceTable

_COMMIT_LSN: Final = {BEGIN: HEADER + 1, STREAM_COMMIT: HEADER + 6}
"""Where a message of that type has the place of its commit: of a streamed one, after the xid and the flags."""


class Gate:
    """A stream of raw messages behind a gate, closed at first.

    Transactions come in the order of their commits, and each is announced with the place of its commit: all messages
    before the first one that commits at the gate or later pass. Blocks of transactions that are streamed before their
    commit pass, too: they are told with their commit.

    :ivar limit: transactions that commit before it pass.
    """

    def __init__(self, stream: RawStream) -> None:
        self._stream = stream
        self._held: list[bytes] = []
        self.limit = 0

    @property
    def is_closed(self) -> bool:
        """Whether something waits for the gate to open."""
        return bool(self._held)

    @property
    def server_wal_end(self) -> int:
        """All that committed before it has passed."""
        return self.limit if self._held else self._stream.server_wal_end  # commits come in order; what is held is later

    @property
    def bytes_received(self) -> int:
        return self._stream.bytes_received

    def read(self, max_messages: int, max_bytes: int, timeout: float) -> list[bytes]:
        """As :meth:`RawStream.read`; nothing, at once, while the gate holds all that came."""
        messages = self._held or self._stream.read(max_messages, max_bytes, timeout)
        end = first_at(messages, self.limit)
        self._held = messages[end:]
        if self._held:
            self._stream.send_status()
        return messages[:end]

    def acknowledge(self, lsn: int) -> None:
        self._stream.acknowledge(lsn)

    def send_status(self) -> None:
        self._stream.send_status()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()


def first_at(messages: list[bytes], limit: int) -> int:
    """The place of the first message that announces a commit at *limit* or later; their number where none does."""
    for message in reversed(messages):
        if message[HEADER] in _COMMIT_LSN:
            if _commit_of(message) < limit:
                return len(messages)  # commits only go on: those before it are older still
            break
    else:
        return len(messages)
    for place, message in enumerate(messages):
        if message[HEADER] in _COMMIT_LSN and _commit_of(message) >= limit:
            return place
    return len(messages)


def _commit_of(message: bytes) -> int:
    place = _COMMIT_LSN[message[HEADER]]
    return int.from_bytes(message[place : place + 8], "big")


JOINING: Final = "_joining"
BEFORE_JOIN: Final = failpoints.register("citus.before_join")
JOINING_MADE: Final = failpoints.register("citus.joining_made")
AFTER_JOIN: Final = failpoints.register("citus.after_join")
BEFORE_RETIRE: Final = failpoints.register("citus.before_retire")
AFTER_RETIRE: Final = failpoints.register("citus.after_retire")
GONE_TRIES: Final = 3
_LEFT: Final = -1  # a group that no node has
_PAUSE: Final = 0.5

T = TypeVar("T")
MakeSource = Callable[[str, int, Callable[[RawStream], RawStream]], PostgresSource]
"""A source of the node at a libpq connection string, of a group, whose raw messages go through something."""


@dataclass(slots=True)
class Member:
    """A node that is followed."""

    group: int
    address: str
    source: PostgresSource
    stream: PostgresChangeStream
    gate: Gate


class Attempt(Generic[T]):
    """Something that may take long at one node, in a thread of its own: the others go on meanwhile."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: T | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="headwater-node", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._made = self._make()
        except BaseException as error:
            self._failure = error

    def result(self, timeout: float) -> T | None:
        """What was made; ``None`` while that is under way. What it raises comes here."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            return None
        if self._failure is not None:
            raise self._failure
        return self._made


class Members:
    """Makes the sources of nodes, and keeps them."""

    def __init__(self, cluster: Cluster, make: MakeSource, slot: str) -> None:
        self.cluster = cluster
        self._make = make
        self._slot = slot
        self._sources: dict[int, tuple[str, PostgresSource]] = {}
        self._gates: dict[int, Gate] = {}

    def source(self, group: int, address: str) -> PostgresSource:
        """The source of one node; another one where its address or its password has changed."""
        conninfo = self.cluster.conninfo_of(address, group)
        known = self._sources.get(group)
        if known is not None and known[0] == conninfo:
            return known[1]
        if known is not None:
            known[1].close()

        def through(stream: RawStream) -> RawStream:
            self._gates[group] = Gate(stream)
            return self._gates[group]

        made = self._make(conninfo, group, through)
        self._sources[group] = conninfo, made
        return made

    def described(self, names: Sequence[str]) -> dict[str, SourceTable]:
        """Those of *names* that the coordinator has, as they are now."""
        return present_tables(self.source(COORDINATOR, self.cluster.own_address), names)

    def defaults(self, tables: Sequence[SourceTable]) -> dict[str, pa.RecordBatch]:
        """Of *tables* of the coordinator, the values that rows from before their columns have there."""
        return self.source(COORDINATOR, self.cluster.own_address).defaults(tables)

    def follow(self, group: int, place: NodePlace, tables: Sequence[SourceTable]) -> Member:
        """Open the stream of a node. :raises SourceError: it cannot go on there; which node that is."""
        assert place.server is not None
        with naming(place.address):
            self.cluster.require_decoder(group, place.address)
            source = self.source(group, place.address)
            stream = source.open(tables, place.at, place.server.to_json())
        return Member(group, place.address, source, stream, self._gates[group])

    def join(
        self, group: int, address: str, tables: Sequence[SourceTable], left: Mapping[str, int] | None = None
    ) -> NodePlace:
        """Make a node keep its log for us, before it has a shard. A slot of our name that is there already is taken.

        :param left: up to where servers were told that left the cluster: a slot that is not so far is a remnant of
            then, and would tell again what was told under another group.
        :raises NodeMissed: it had shards before. :raises SourceBusy: it has not all tables yet.
        """
        failpoints.hit(BEFORE_JOIN)
        self.cluster.require_decoder(group, address)
        dsn, joining = self.cluster.dsn_of(address, group), f"{self._slot[:53]}{JOINING}"
        with naming(address), server_errors(dsn), connect(dsn) as session:
            slot = read_slot(session, self._slot)
            identity = server_position(session).identity
            try:
                self.source(group, address).publish(tables)
            except SourceNotFound as error:
                raise SourceBusy(error.message, next_step="It is tried again until the cluster has made it.") from None
            if slot is not None and (slot.confirmed or 0) < (left or {}).get(identity.system_id, 0):
                give_up_slot(session, self._slot)
                slot = None
            if slot is None:
                drop_slot(session, joining)
                create_slot(session, joining)
                failpoints.hit(JOINING_MADE)
                if group in self.cluster.groups_with_shards():
                    drop_slot(session, joining)
                    raise NodeMissed(
                        address,
                        "had shards before the capture could follow it: changes there may be missing.",
                    )
                session.execute("SELECT pg_catalog.pg_copy_logical_replication_slot(%s, %s)", [joining, self._slot])
                drop_slot(session, joining)
                slot = read_slot(session, self._slot)
        failpoints.hit(AFTER_JOIN)
        assert slot is not None
        assert slot.confirmed is not None
        return NodePlace(PostgresOffset.at(slot.confirmed), identity, address)

    def end_of(self, group: int, address: str) -> int:
        """Where the log of a node ends that the cluster has no longer.

        :raises NodeMissed: it does not answer any more.
        """
        for attempt in range(GONE_TRIES):
            try:
                return self.cluster.log_end(group, address)
            except SourceUnreachable:
                if attempt + 1 < GONE_TRIES:
                    time.sleep(_PAUSE)
        raise NodeMissed(
            address,
            "was removed from the cluster and does not answer: what it committed last cannot be read.",
            next_step="Start its server again until the capture has read it to its end; if that cannot be: "
            "headwater resnapshot",
        )

    def retire(self, member: Member, server: str, told: int) -> bool:
        """A node that left was read to its end, durably: its slot is of no use. Whether it is gone; see below."""
        failpoints.hit(BEFORE_RETIRE)
        member.stream.close()
        is_gone = self.drop_left(server, member.address, told)
        self._sources.pop(member.group)[1].close()
        failpoints.hit(AFTER_RETIRE)
        return is_gone

    def drop_left(self, server: str, address: str, told: int) -> bool:
        """Whether a server that left has our slot no longer; ``False``: it does not answer, or is another by now.

        :param told: up to where it was told: a slot that is further is one that somebody made since.
        """
        dsn = self.cluster.dsn_of(address, _LEFT)
        try:
            with server_errors(dsn), connect(dsn) as session:
                if server_position(session).identity.system_id != server:
                    return False
                slot = read_slot(session, self._slot)
                if slot is not None and (slot.confirmed or 0) <= told:
                    give_up_slot(session, self._slot)
        except SourceError:
            return False
        return True

    def identity(self, group: int, address: str) -> ServerIdentity:
        """Which server the node is now."""
        dsn = self.cluster.dsn_of(address, group)
        with naming(address), server_errors(dsn), connect(dsn) as session:
            return server_position(session).identity

    def close(self) -> None:
        for _, source in self._sources.values():
            source.close()
        self._sources.clear()
        self.cluster.close()


def here(group: int, kinds: Mapping[str, TableKind], tables: Sequence[SourceTable]) -> list[SourceTable]:
    """Those of *tables* whose changes the node tells: of all others the coordinator does."""
    return list(tables) if group == COORDINATOR else distributed(kinds, tables)


def distributed(kinds: Mapping[str, TableKind], tables: Sequence[SourceTable]) -> list[SourceTable]:
    """Those of *tables* that have shards."""
    return [table for table in tables if kinds[table.full_name] is TableKind.DISTRIBUTED]


def present_tables(source: PostgresSource, names: Sequence[str]) -> dict[str, SourceTable]:
    """Those of *names* that the node has and that can be captured there, as they are now."""
    try:
        return {table.full_name: table for table in source.tables(names)}
    except (SourceNotFound, UnsupportedTable):
        found: dict[str, SourceTable] = {}
        for name in names:
            with suppress(SourceNotFound, UnsupportedTable):
                found |= {table.full_name: table for table in source.tables([name])}
        return found


@contextmanager
def naming(address: str) -> Iterator[None]:
    """Errors of a node say which."""
    try:
        yield
    except HeadwaterError as error:
        name_node(error, address)
        raise

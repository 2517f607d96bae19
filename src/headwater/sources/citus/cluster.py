"""Cluster: the nodes of a Citus cluster, what lies on which of them, and places in their logs that belong together.

An *alignment* is a place in the log of each node, all taken while no shard moved: a row whose shard moved before it has
its last change on the old node before the alignment, one whose shard moves later has none on the new node before it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import psycopg

from headwater.databases.secret_files import is_in_file
from headwater.databases.timeouts import TIMEOUT_SECONDS
from headwater.errors import ConflictError, HeadwaterError
from headwater.sources.dsn import current_dsn
from headwater.sources.errors import (
    AccessDenied,
    InvalidDsn,
    RefusedValue,
    SourceBusy,
    SourceError,
    SourceMisconfigured,
)
from headwater.sources.postgres.connection import Connection, Dsn, ask, connect, server_errors
from headwater.sources.postgres.names import TableName, literal

RESNAPSHOT = "Run: headwater resnapshot"


class NodeMissed(SourceError, ConflictError):
    """A node had shards before the capture could follow it, or was removed before it was read to its end.

    :ivar address: ``host:port`` of the node.
    """

    def __init__(self, address: str, reason: str, *, next_step: str = RESNAPSHOT) -> None:
        self.address = address
        super().__init__(f"Node {address} {reason}", next_step=next_step)


def name_node(error: HeadwaterError, address: str) -> None:
    """Say in *error* which node it is about."""
    if address not in error.message:
        error.message = f"Node {address}: {error.message}"
        error.args = (f"{error.message} {error.next_step}" if error.next_step else error.message,)


def name_table(error: RefusedValue, shard: str, table: str) -> None:
    """Say in *error*, of a value of *shard*, which table it is about: that is the one which people name."""
    error.table, error.message = table, error.message.replace(shard, table)
    error.next_step = (error.next_step or "").replace(shard, table) or None
    error.args = (f"{error.message} {error.next_step}" if error.next_step else error.message,)


COORDINATOR: Final = 0
"""The group of the coordinator."""
ALIGN_TRIES: Final = 20

_IS_CLUSTER: Final = "SELECT pg_catalog.to_regclass('pg_catalog.pg_dist_node') IS NOT NULL AS found"
_LOCAL_GROUP: Final = "SELECT groupid FROM pg_catalog.pg_dist_local_group"
_NODES: Final = """
SELECT n.groupid AS group, n.nodename::text AS host, n.nodeport::int AS port, n.isactive AS active,
       n.shouldhaveshards AS shards, n.hasmetadata AS metadata
FROM pg_catalog.pg_dist_node n WHERE n.noderole::text = 'primary' ORDER BY n.groupid
"""
_PLACEMENTS: Final = """
SELECT pg_catalog.concat_ws(':', count(*), COALESCE(sum(p.placementid), 0),
         COALESCE(sum(p.placementid::numeric * (p.groupid + 1) * p.shardstate), 0)) AS told
FROM pg_catalog.pg_dist_placement p
"""
_GROUPS: Final = """
SELECT DISTINCT p.groupid AS group
FROM pg_catalog.pg_dist_placement p JOIN pg_catalog.pg_dist_shard s USING (shardid)
JOIN pg_catalog.pg_dist_partition t USING (logicalrelid)
WHERE p.shardstate = 1 AND (t.partmethod::text, t.repmodel::text) <> ('n', 't')
"""
_KINDS: Final = """
SELECT p.logicalrelid::oid::bigint AS oid, p.partmethod::text AS method, p.repmodel::text AS model
FROM pg_catalog.pg_dist_partition p
"""
_SHARDS: Final = """
SELECT s.shardid AS shard, p.groupid AS group, pg_catalog.shard_name(s.logicalrelid, s.shardid)::text AS name
FROM pg_catalog.pg_dist_shard s JOIN pg_catalog.pg_dist_placement p USING (shardid)
WHERE p.shardstate = 1 AND s.logicalrelid = %s::oid::regclass ORDER BY p.groupid, s.shardid
"""
_SHARDS_HERE: Final = """
SELECT pg_catalog.shard_name(s.logicalrelid, s.shardid)::text AS name
FROM pg_catalog.pg_dist_shard s JOIN pg_catalog.pg_dist_placement p USING (shardid)
JOIN pg_catalog.pg_class c ON c.oid = s.logicalrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE p.shardstate = 1 AND p.groupid = %s AND n.nspname = %s AND c.relname = %s ORDER BY s.shardid
"""
_ALL_SHARDS: Final = """
SELECT pg_catalog.shard_name(s.logicalrelid, s.shardid)::text AS name FROM pg_catalog.pg_dist_shard s
"""
_NUMBERS: Final = """
SELECT s.logicalrelid::oid::bigint AS oid, s.shardid::bigint AS shard
FROM pg_catalog.pg_dist_shard s WHERE s.logicalrelid::oid = ANY (%s::oid[])
"""
# a sequence that was never asked, or was set by hand, has no last value
_LAST_GROUP: Final = """
SELECT CASE WHEN pg_catalog.has_sequence_privilege('pg_catalog.pg_dist_groupid_seq', 'SELECT')
            THEN COALESCE(pg_catalog.pg_sequence_last_value('pg_catalog.pg_dist_groupid_seq'), 0) END AS last
"""
_IS_CHANGING: Final = """
SELECT EXISTS (
  SELECT FROM pg_catalog.pg_locks l WHERE l.relation = 'pg_catalog.pg_dist_node'::pg_catalog.regclass AND l.granted
    AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
    AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')) AS found
"""
_SETTINGS: Final = """
SELECT COALESCE(pg_catalog.current_setting('citus.enable_change_data_capture', true), '') AS cdc,
       pg_catalog.current_setting('dynamic_library_path') AS path
"""
_LOG_END: Final = "SELECT (pg_catalog.pg_current_wal_flush_lsn() - '0/0'::pg_catalog.pg_lsn)::bigint AS lsn"
_CLOCK: Final = """
SELECT (pg_catalog.extract('epoch', pg_catalog.clock_timestamp()) * 1000000)::bigint AS us
"""
# sessions of people are not shown the tables of shards on the nodes
_VISIBLE: Final = "-c citus.override_table_visibility=off"


class TableKind(Enum):
    """Where the rows of a table are."""

    LOCAL = "local"  # on the coordinator, which alone knows of it
    REFERENCE = "reference"  # the same on every node; the coordinator tells its changes
    DISTRIBUTED = "distributed"  # in shards, each on one node


@dataclass(frozen=True, slots=True)
class Node:
    """One server of the cluster.

    :ivar group: names it for good, whatever its address becomes. :ivar address: ``host:port``; of the coordinator as it
        was given, perhaps with several hosts.
    """

    group: int
    address: str


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a table, a table of its own on one node."""

    number: int
    group: int
    table: TableName


@dataclass(frozen=True, slots=True)
class Alignment:
    """A place in the log of each node.

    :ivar placements: what was where. :ivar shards: of the tables that were asked for, the numbers of their shards.
    """

    nodes: tuple[Node, ...]
    inactive: tuple[int, ...]
    ends: Mapping[int, int]
    placements: str
    shards: Mapping[int, frozenset[int]]


def coordinator_dsn(text: str, timeout_seconds: float = TIMEOUT_SECONDS) -> Dsn:
    """The coordinator's address, of ``citus://user@host:port/database``. :raises InvalidDsn: it cannot be read."""
    scheme, separator, rest = current_dsn(text).partition("://")
    if scheme != "citus" or not separator:
        raise InvalidDsn(
            "The connection string is not one of a Citus cluster.",
            next_step="Write citus://user@coordinator:5432/database.",
        )
    return Dsn(f"postgresql://{rest}", timeout_seconds)


class Cluster:
    """Asks the coordinator and the nodes, over connections that are made when they are needed. It can be pickled.

    :param text: ``citus://…``. :param timeout_seconds: a node that is silent for this long counts as unreachable.
    """

    def __init__(self, text: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._text = text
        self._timeout_seconds = timeout_seconds
        self._parsed = coordinator_dsn(text, timeout_seconds)
        self._sessions: dict[str, Connection] = {}
        self._lock = threading.Lock()

    @property
    def coordinator(self) -> Dsn:
        """With the password of now. :raises InvalidDsn: it cannot be read. :raises DsnUnreadable: of its file."""
        return coordinator_dsn(self._text, self._timeout_seconds) if is_in_file(self._text) else self._parsed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cluster) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[Any, ...]:
        return Cluster, (self._text, self._timeout_seconds)

    def __str__(self) -> str:
        return "citus" + str(self.coordinator).removeprefix("postgresql")

    def conninfo_of(self, address: str, group: int) -> str:
        """A libpq connection string, with the password: the coordinator's, with the node's host and port."""
        if group == COORDINATOR:
            return self.coordinator.conninfo(options=self._options)
        host, _, port = address.rpartition(":")
        return self.coordinator.conninfo(host=host, port=port, hostaddr=None, options=self._options)

    def dsn_of(self, address: str, group: int) -> Dsn:
        return Dsn(self.conninfo_of(address, group), self.coordinator.timeout_seconds)

    @property
    def _options(self) -> str:
        given = str(self.coordinator.parameter("options") or "")
        return f"{given} {_VISIBLE}".strip()

    def ask(self, query: str, parameters: Sequence[object] = (), *, dsn: Dsn | None = None) -> list[Any]:
        """The rows of a query at the coordinator, or at *dsn*, over a session that is kept."""
        where = dsn or self.dsn_of("", COORDINATOR)
        key = str(where)
        with self._lock, server_errors(where):
            session = self._sessions.get(key)
            if session is None or session.closed:
                session = self._sessions[key] = connect(where)
            try:
                return ask(session, query, parameters)
            except psycopg.OperationalError:
                session.close()
                raise

    def close(self) -> None:
        """End the sessions; the next question opens one again."""
        with self._lock:
            for session in self._sessions.values():
                session.close()
            self._sessions.clear()

    # -- what the coordinator knows --------------------------------------------------------------------------------

    def require_coordinator(self) -> None:
        """:raises SourceMisconfigured: the server is none of a cluster, or not the coordinator."""
        if not self.ask(_IS_CLUSTER)[0].found:
            raise SourceMisconfigured(
                f"{self} has no Citus: it has no list of nodes.",
                next_step="Give the coordinator of a cluster, or write postgresql:// for a single server.",
            )
        if any(row[0] != COORDINATOR for row in self.ask(_LOCAL_GROUP)):
            raise SourceMisconfigured(
                f"{self} is a worker of a cluster.", next_step="Give the address of the coordinator."
            )

    def nodes(self) -> tuple[tuple[Node, ...], tuple[int, ...]]:
        """The nodes that are in use, the coordinator first; and the groups that are not."""
        rows = self.ask(_NODES)
        own = Node(COORDINATOR, self.own_address)
        active = [Node(row.group, f"{row.host}:{row.port}") for row in rows if row.active and row.group != COORDINATOR]
        return (own, *active), tuple(row.group for row in rows if not row.active)

    @property
    def own_address(self) -> str:
        """Of the coordinator, as it was given."""
        return f"{self.coordinator.parameter('host') or 'localhost'}:{self.coordinator.parameter('port') or 5432}"

    @property
    def own_host(self) -> str:
        """Of the coordinator, as arguments of a call in SQL: of several hosts the first."""
        hosts, ports = (str(self.coordinator.parameter(part) or "").split(",")[0] for part in ("host", "port"))
        return f"{literal(hosts or 'localhost')}, {ports or 5432}"

    def last_group(self) -> int | None:
        """The last group that was given to a node, removed ones too; ``None`` while nodes are being added or removed.

        Ask for it before :meth:`nodes`: what was given by then is in that list, or was removed.

        :raises AccessDenied: the user may not look.
        """
        last = self.ask(_LAST_GROUP)[0].last
        if last is None:
            raise AccessDenied(
                "The user may not read which numbers the cluster has given to nodes.",
                next_step="Run: GRANT SELECT ON SEQUENCE pg_catalog.pg_dist_groupid_seq TO "
                f"{self.coordinator.parameter('user') or 'PUBLIC'};",
            )
        return None if self.ask(_IS_CHANGING)[0].found else int(last)

    def placements(self) -> str:
        """Tells where all shards are: another text when one has moved."""
        return str(self.ask(_PLACEMENTS)[0].told)

    def groups_with_shards(self) -> frozenset[int]:
        """The nodes that have shards of distributed tables."""
        return frozenset(row.group for row in self.ask(_GROUPS))

    def kinds(self) -> dict[int, TableKind]:
        """Kinds by the oid on the coordinator; a table that is not there is local."""
        return {row.oid: _kind(row) for row in self.ask(_KINDS)}

    def shard_groups(self, oid: int) -> list[tuple[int, int]]:
        """Of the table with this oid on the coordinator: each shard and a node that has it."""
        return [(row.shard, row.group) for row in self.ask(_SHARDS, [oid])]

    def shards_on(self, group: int, table: TableName) -> list[TableName]:
        """The shards of *table* that a node has, under the names of their tables there."""
        return [TableName.parse(row.name) for row in self.ask(_SHARDS_HERE, [group, table.namespace, table.name])]

    def all_shards(self) -> frozenset[TableName]:
        """The names of the tables of all shards, whichever node has them."""
        return frozenset(TableName.parse(row.name) for row in self.ask(_ALL_SHARDS))

    def shard_numbers(self, oids: Sequence[int]) -> dict[int, frozenset[int]]:
        """Of the tables with these oids on the coordinator: the numbers of their shards."""
        found: dict[int, set[int]] = {oid: set() for oid in oids}
        for row in self.ask(_NUMBERS, [list(oids)]) if oids else []:
            found[row.oid].add(row.shard)
        return {oid: frozenset(numbers) for oid, numbers in found.items()}

    def clock_us(self, node: Node | None = None) -> int:
        """What time it is at the coordinator, or at *node*; microseconds since 1970."""
        dsn = None if node is None else self.dsn_of(node.address, node.group)
        return int(self.ask(_CLOCK, dsn=dsn)[0].us)

    def require_decoder(self, group: int, address: str) -> None:
        """:raises SourceMisconfigured: the node tells nothing of its shards, or what moves as rows."""
        row = self.ask(_SETTINGS, dsn=self.dsn_of(address, group))[0]
        if row.cdc not in ("on", "true", "yes", "1"):
            raise SourceMisconfigured(
                f"Node {address}: citus.enable_change_data_capture is off: shards that move would be told as rows.",
                next_step="Run there: ALTER SYSTEM SET citus.enable_change_data_capture = on; SELECT pg_reload_conf();",
            )
        if "citus_decoders" not in row.path:
            raise SourceMisconfigured(
                f"Node {address}: its decoder is not that of Citus: nothing of its shards would be told.",
                next_step="Run there: ALTER SYSTEM SET dynamic_library_path = '$libdir/citus_decoders:$libdir';"
                " SELECT pg_reload_conf();",
            )

    def log_end(self, group: int, address: str) -> int:
        """Up to where the log of a node is on its disk."""
        return int(self.ask(_LOG_END, dsn=self.dsn_of(address, group))[0].lsn)

    def align(self, tables: Sequence[int] = (), known: str | None = None) -> Alignment:
        """An alignment of now.

        :param tables: by their oids on the coordinator: their shards are asked for, unless all is where *known* says.
        :raises SourceBusy: shards moved whenever it was tried. :raises SourceUnreachable: a node does not answer.
        """
        for _ in range(ALIGN_TRIES):
            nodes, inactive = self.nodes()
            before = self.placements()
            shards = {} if before == known else self.shard_numbers(tables)
            ends = {node.group: self.log_end(node.group, node.address) for node in nodes}
            if self.placements() == before and self.nodes() == (nodes, inactive):
                return Alignment(nodes, inactive, ends, before, shards)
        raise SourceBusy("Shards of the cluster move without a pause.", next_step="Try again when they rest.")


def _kind(row: Any) -> TableKind:
    return TableKind.REFERENCE if (row.method, row.model) == ("n", "t") else TableKind.DISTRIBUTED


def kind_of(session: Connection, oid: int) -> TableKind:
    """Of the table whose oid on the coordinator is *oid*, as the open transaction of *session* sees it."""
    return next((_kind(row) for row in ask(session, _KINDS) if row.oid == oid), TableKind.LOCAL)


def shards_of(session: Connection, oid: int) -> list[Shard]:
    """The shards of the table whose oid on the coordinator is *oid*, as the open transaction of *session* sees them."""
    return [Shard(row.shard, row.group, TableName.parse(row.name)) for row in ask(session, _SHARDS, [oid])]

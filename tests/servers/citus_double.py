"""A double of a Citus cluster: plain Postgres servers that look from outside like its nodes. It is NOT Citus.

What it has of a cluster: the coordinator's catalog (``pg_dist_node``, ``pg_dist_partition``, ``pg_dist_shard``,
``pg_dist_placement``, ``shard_name()``), filled by hand; shards as tables of their own on the nodes; changes of shards
that come under the name of their table, from each node by itself. A table is partitioned on every node, by its shards
there, and published through its root: that gives the same messages as a node of a real cluster does.

What it has not: anything that routes statements. Tests write to nodes; :meth:`CitusDouble.owner` says to which.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import psycopg
from tests.servers.postgres import NEWEST, PostgresServer

SETTINGS = {
    "max_prepared_transactions": "5",
    "citus.enable_change_data_capture": "on",
    "dynamic_library_path": "$libdir/citus_decoders:$libdir",
}
_CATALOG = """
SET allow_system_table_mods = on;
CREATE TABLE pg_catalog.pg_dist_node (nodeid int, groupid int, nodename text, nodeport int, hasmetadata bool,
  isactive bool, noderole text, shouldhaveshards bool);
CREATE TABLE pg_catalog.pg_dist_local_group (groupid int);
CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid regclass, partmethod "char", repmodel "char");
CREATE TABLE pg_catalog.pg_dist_shard (logicalrelid regclass, shardid bigint);
CREATE TABLE pg_catalog.pg_dist_placement (placementid bigint, shardid bigint, groupid int, shardstate int DEFAULT 1);
CREATE FUNCTION pg_catalog.shard_name(t regclass, shard bigint) RETURNS text LANGUAGE sql STABLE
  AS $$ SELECT quote_ident(relname || '_' || shard) FROM pg_class WHERE oid = t $$;
CREATE FUNCTION pg_catalog.citus_set_coordinator_host(host text, port int) RETURNS void LANGUAGE sql AS $$
  INSERT INTO pg_dist_placement SELECT 900000 + s.shardid, s.shardid, 0
  FROM pg_dist_shard s JOIN pg_dist_partition t USING (logicalrelid)
  WHERE t.partmethod = 'n' AND NOT EXISTS
    (SELECT FROM pg_dist_placement p WHERE p.shardid = s.shardid AND p.groupid = 0) $$;
CREATE SEQUENCE pg_catalog.pg_dist_groupid_seq MINVALUE 1;
INSERT INTO pg_catalog.pg_dist_local_group VALUES (0);
"""


class Nodes:
    """Servers for the doubles of a test session, all with one password. :param settings: beside those of a cluster."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        self._settings = {**SETTINGS, **(settings or {})}
        self.servers: list[PostgresServer] = []
        self._names = itertools.count(1)

    def server(self, place: int) -> PostgresServer:
        while len(self.servers) <= place:
            self.servers.append(self.start())
        return self.servers[place]

    def start(self) -> PostgresServer:
        server = PostgresServer(NEWEST, self._settings)
        if self.servers:
            server.password = self.servers[0].password
            with server.connect() as admin:
                admin.execute(f"ALTER ROLE postgres PASSWORD '{server.password}'".encode())
        return server

    def name(self) -> str:
        return f"shop{next(self._names)}"

    def close(self) -> None:
        for server in self.servers:
            server.close()


@dataclass
class Distributed:
    """A table with shards: by number their nodes, and the modulus and remainder of their rows."""

    definition: str
    key: str
    shards: dict[int, int] = field(default_factory=dict)
    bounds: dict[int, tuple[int, int]] = field(default_factory=dict)


class CitusDouble:
    """One database on each of several servers: group 0 is the coordinator's.

    :param servers: the coordinator's first.
    """

    def __init__(self, servers: Sequence[PostgresServer], database: str) -> None:
        self.database = database
        self.servers: dict[int, PostgresServer] = {}
        self.tables: dict[str, Distributed] = {}
        self._shard_ids = itertools.count(102008)
        self._placement_ids = itertools.count(1)
        self._groups = itertools.count(0)
        for server in servers:
            self._make(server)
        self.execute(0, _CATALOG)
        for group in self.servers:
            if group:
                self._list(group)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()

    @property
    def dsn(self) -> str:
        return self.servers[0].dsn(self.database).replace("postgresql://", "citus://")

    def connect(self, group: int) -> psycopg.Connection[tuple[Any, ...]]:
        return self.servers[group].connect(self.database)

    def execute(self, group: int, *statements: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        with self.connect(group) as session:
            for statement in statements:
                cursor = session.execute(statement.encode())
                rows = cursor.fetchall() if cursor.description else []
        return rows

    def everywhere(self, statement: str) -> None:
        """A statement on every node, as the coordinator propagates DDL."""
        for group in self.servers:
            self.execute(group, statement)

    def _make(self, server: PostgresServer) -> int:
        group = next(self._groups)
        self.servers[group] = server
        with server.connect() as admin:
            admin.execute(f"CREATE DATABASE {self.database}".encode())
        return group

    def _list(self, group: int) -> None:
        port = self.servers[group].port
        self.execute(
            0,
            f"SELECT pg_catalog.setval('pg_catalog.pg_dist_groupid_seq', {group})",
            f"INSERT INTO pg_dist_node VALUES ({group}, {group}, '127.0.0.1', {port}, true, true, 'primary', true)",
        )

    # -- tables ----------------------------------------------------------------------------------------------------

    def distribute(self, name: str, columns: str, key: str = "id", shards: int = 4) -> None:
        """A table with *shards* shards, dealt out to the workers in turns; its hash is that of partitions."""
        made = Distributed(columns, key)
        self.tables[name] = made
        self.everywhere(f"CREATE TABLE {name} ({columns}, PRIMARY KEY ({key})) PARTITION BY HASH ({key})")
        self.execute(0, f"INSERT INTO pg_dist_partition VALUES ('{name}', 'h', 's')")
        workers = [group for group in self.servers if group] or [0]
        for number in range(shards):
            shard, group = next(self._shard_ids), workers[number % len(workers)]
            made.shards[shard], made.bounds[shard] = group, (shards, number)
            self.execute(group, self._attached(name, shard, number, shards))
            self.execute(
                0,
                f"INSERT INTO pg_dist_shard VALUES ('{name}', {shard})",
                f"INSERT INTO pg_dist_placement VALUES ({next(self._placement_ids)}, {shard}, {group})",
            )

    def _attached(self, name: str, shard: int, number: int, shards: int) -> str:
        return f"CREATE TABLE {name}_{shard} PARTITION OF {name} FOR VALUES WITH (modulus {shards}, remainder {number})"

    def reference(self, name: str, columns: str, key: str = "id") -> None:
        """A reference table: its copy on the coordinator tells the changes."""
        shard = next(self._shard_ids)
        self.execute(
            0,
            f"CREATE TABLE {name} ({columns}, PRIMARY KEY ({key})) PARTITION BY HASH ({key})",
            self._attached(name, shard, 0, 1),
            f"INSERT INTO pg_dist_partition VALUES ('{name}', 'n', 't')",
            f"INSERT INTO pg_dist_shard VALUES ('{name}', {shard})",
        )
        for group in self.servers:
            self.execute(0, f"INSERT INTO pg_dist_placement VALUES ({next(self._placement_ids)}, {shard}, {group})")

    def place(self, create: str, name: str, key: str, group: int, shards: int = 2) -> None:
        """A table as *create* says whose rows are all on one node: a reference table there on the coordinator."""
        nodes = [0] if group == 0 else list(self.servers)
        for node in nodes:
            self.execute(node, f"{create} PARTITION BY HASH ({key})")
        method = "'n', 't'" if group == 0 else "'h', 's'"
        self.execute(0, f"INSERT INTO pg_dist_partition VALUES ('{name}', {method})")
        for number in range(1 if group == 0 else shards):
            shard = next(self._shard_ids)
            self.execute(group, self._attached(name, shard, number, 1 if group == 0 else shards))
            self.execute(
                0,
                f"INSERT INTO pg_dist_shard VALUES ('{name}', {shard})",
                *(
                    f"INSERT INTO pg_dist_placement VALUES ({next(self._placement_ids)}, {shard}, {node})"
                    for node in (self.servers if group == 0 else [group])
                ),
            )

    def forget(self, name: str) -> None:
        """The cluster has no such table any more."""
        self.execute(
            0,
            f"DELETE FROM pg_dist_placement p USING pg_dist_shard s"
            f" WHERE s.shardid = p.shardid AND s.logicalrelid = '{name}'::regclass",
            f"DELETE FROM pg_dist_shard WHERE logicalrelid = '{name}'::regclass",
            f"DELETE FROM pg_dist_partition WHERE logicalrelid = '{name}'::regclass",
        )

    def owner(self, name: str, key: int) -> int:
        """The node whose shard has the row: what routes a statement in a cluster."""
        table = self.tables[name]
        tests = ", ".join(
            f"satisfies_hash_partition('{name}'::regclass, {modulus}, {remainder}, {key}::bigint)"
            for modulus, remainder in table.bounds.values()
        )
        found = self.execute(next(iter(table.shards.values())), f"SELECT {tests}")[0]
        return table.shards[list(table.bounds)[found.index(True)]]

    def rows(self, name: str) -> dict[Any, tuple[Any, ...]]:
        """All rows of a table by their first column, over all nodes; none is on two of them."""
        found: dict[Any, tuple[Any, ...]] = {}
        for group in sorted(self.servers):
            if name in self.tables or group == 0:
                for row in self.execute(group, f"SELECT * FROM {name}"):
                    assert row[0] not in found
                    found[row[0]] = row
        return found

    # -- shards and nodes ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def moving(self, name: str, shard: int, to: int) -> Iterator[None]:
        """Move a shard as a cluster does: the copy is filled without a word in the log, then takes the place.

        Inside, the shard is where it was and nobody may write to it: the caller's writers wait.
        """
        table = self.tables[name]
        source = table.shards[shard]
        modulus, number = table.bounds[shard]
        self.execute(to, f"CREATE TABLE {name}_{shard} (LIKE {name} INCLUDING ALL)")
        copy = f"COPY {name}_{shard}"
        with (
            self.connect(source) as old,
            self.connect(to) as new,
            old.cursor().copy(f"{copy} TO STDOUT (FORMAT binary)".encode()) as rows,
            new.cursor().copy(f"{copy} FROM STDIN (FORMAT binary)".encode()) as copied,
        ):
            for some in rows:
                copied.write(some)
        yield
        self.execute(source, f"ALTER TABLE {name} DETACH PARTITION {name}_{shard}")
        self.execute(
            to,
            f"ALTER TABLE {name} ATTACH PARTITION {name}_{shard}"
            f" FOR VALUES WITH (modulus {modulus}, remainder {number})",
        )
        self.execute(
            0,
            f"BEGIN; DELETE FROM pg_dist_placement WHERE shardid = {shard};"
            f" INSERT INTO pg_dist_placement VALUES ({next(self._placement_ids)}, {shard}, {to}); COMMIT",
        )
        self.execute(source, f"DROP TABLE {name}_{shard}")
        table.shards[shard] = to

    def move(self, name: str, shard: int, to: int) -> None:
        with self.moving(name, shard, to):
            pass

    def split(self, name: str, shard: int, *rest: str) -> tuple[int, int]:
        """Two shards take the place of one, as when a cluster splits it or isolates a tenant.

        :param rest: statements on the old shard that are told under its own name, thus not at all: as by a node that
            comes to them in its log when the shard is gone.
        """
        table = self.tables[name]
        group = table.shards.pop(shard)
        modulus, number = table.bounds.pop(shard)
        halves = next(self._shard_ids), next(self._shard_ids)
        self.execute(group, f"ALTER TABLE {name} DETACH PARTITION {name}_{shard}", *rest)
        for place, half in enumerate(halves):
            bound = modulus * 2, number + place * modulus
            self.execute(
                group,
                f"CREATE TABLE {name}_{half} (LIKE {name} INCLUDING ALL)",
                f"INSERT INTO {name}_{half} SELECT * FROM {name}_{shard} WHERE"
                f" satisfies_hash_partition('{name}'::regclass, {bound[0]}, {bound[1]}, {table.key})",
                f"ALTER TABLE {name} ATTACH PARTITION {name}_{half}"
                f" FOR VALUES WITH (modulus {bound[0]}, remainder {bound[1]})",
            )
            table.shards[half], table.bounds[half] = group, bound
        self.execute(
            0,
            "BEGIN",
            f"DELETE FROM pg_dist_placement WHERE shardid = {shard}",
            f"DELETE FROM pg_dist_shard WHERE shardid = {shard}",
            *(f"INSERT INTO pg_dist_shard VALUES ('{name}', {half})" for half in halves),
            *(
                f"INSERT INTO pg_dist_placement VALUES ({next(self._placement_ids)}, {half}, {group})"
                for half in halves
            ),
            "COMMIT",
        )
        self.execute(group, f"DROP TABLE {name}_{shard}")
        return halves

    def add_node(self, server: PostgresServer) -> int:
        """A node joins: it gets the tables, and no shards yet."""
        group = self._make(server)
        for name, table in self.tables.items():
            self.execute(
                group,
                f"CREATE TABLE {name} ({table.definition}, PRIMARY KEY ({table.key})) PARTITION BY HASH ({table.key})",
            )
        self._list(group)
        return group

    def remove_node(self, group: int) -> None:
        """A node leaves, emptied before; its server goes on running."""
        for name, table in self.tables.items():
            assert group not in table.shards.values(), name
        self.execute(
            0,
            f"DELETE FROM pg_dist_placement WHERE groupid = {group}",
            f"DELETE FROM pg_dist_node WHERE groupid = {group}",
        )

    def add_again(self, group: int) -> int:
        """The server of a node that was removed joins once more: under another group, with the tables that it has."""
        again = next(self._groups)
        self.servers[again] = self.servers.pop(group)
        self._list(again)
        return again

    def drop(self) -> None:
        for server in set(self.servers.values()):
            if server.is_running:
                with server.connect() as admin:
                    admin.execute(f"ALTER DATABASE {self.database} ALLOW_CONNECTIONS false".encode())
                    while admin.execute(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [self.database]
                    ).fetchall():
                        pass
                    admin.execute(
                        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s",
                        [self.database],
                    )
                    admin.execute(f"DROP DATABASE {self.database} WITH (FORCE)".encode())


def log_ends(double: CitusDouble) -> Mapping[int, int]:
    """Where the log of each node ends."""
    return {
        group: int(double.execute(group, "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint")[0][0])
        for group in double.servers
    }

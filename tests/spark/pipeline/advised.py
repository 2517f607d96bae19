"""The states in which each source stops a table or the pipeline, and what a person does besides running the advice.

A case is one table; all cases of a source are tables of one pipeline, so that they cost about one start. A new reason
to stop a table gets a line here. Not produced here: a type of column that this version does not know, an ``_id`` or key
that cannot be read, a resharded collection (tests/db/mongodb/test_cluster_changes.py), a capture instance that is
removed while it is read (tests/db/sqlserver/test_real_shapes.py) and whatever only a restored or replaced server has
(``test_failures.py`` of each source).
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final, Protocol

from tests.db.backfill.shops import MySqlShop
from tests.db.capture.captured import drop_slot
from tests.db.citus.writing import here
from tests.db.conftest import started_or_skipped
from tests.db.mongodb.conftest import started_or_skipped as started_mongodb
from tests.sampled import SOAK
from tests.servers.citus_double import CitusDouble, Nodes
from tests.servers.mongodb import MongoServer
from tests.servers.postgres import Database
from tests.servers.sqlserver import track
from tests.servers.sqlserver_double.server import SqlServerDouble
from tests.spark.pipeline.driven import SessionPipeline

ROWS: Final = 50
Statements = str | Callable[[Any, str], object] | tuple[str | Callable[[Any, str], object], ...]
"""SQL with ``{t}`` for the table, a function of the source and the table, or several of them."""


@dataclass(frozen=True)
class Case:
    """How a table comes to its state.

    :ivar change: produces it. :ivar repair: what a person does first, as the advice says.
    :ivar setting: what a person adds to pipeline.toml, as the advice says; ``{n}`` is the full name of the table.
    :ivar before: done before the pipeline starts: the table never becomes live. :ivar writes: a row follows *change*.
    :ivar stops: it stops, also where tables that must be read again are read by themselves.
    :ivar key: of the table before. :ivar options: at the end of its definition.
    :ivar blocked: others have a table where the sink would write this one; a person removes it.
    """

    change: Statements = ""
    repair: Statements = ""
    setting: str = ""
    before: Statements = ""
    writes: bool = True
    stops: bool = False
    key: str = "id"
    options: str = ""
    blocked: bool = False

    @property
    def starts_stopped(self) -> bool:
        return bool(self.before) or self.blocked

    @property
    def must_stop(self) -> bool:
        return bool(self.stops or self.repair or self.setting or self.starts_stopped)


@dataclass(frozen=True)
class Failure:
    """How the whole pipeline comes to fail; *damage* leaves it running or started.

    :ivar repair: what a person does before the command, as the advice says.
    """

    damage: Callable[[Any], None]
    repair: Callable[[Any], None] = lambda _: None


class HasDsn(Protocol):
    @property
    def dsn(self) -> str: ...


class AdvisedSource(ABC):
    """A database with one table per case.

    :ivar settings: of the pipeline, from the start. :ivar pipeline: set by the test.
    :ivar on_rewrite: what the pipeline does with a table that must be read again.
    """

    namespace: ClassVar = "public"
    pipeline: SessionPipeline

    def __init__(self, database: HasDsn, cases: Mapping[str, Case], failures: Sequence[Failure] = ()) -> None:
        self.database, self.cases, self.failures = database, cases, failures
        self.settings = ""
        self.on_rewrite = "stop"

    def name(self, table: str) -> str:
        return f"{self.namespace}.{table}"

    def perform(self, table: str, statements: Statements) -> None:
        for one in statements if isinstance(statements, tuple) else (statements,):
            if callable(one):
                one(self, table)
            elif one:
                self.execute(*parts(one.replace("{t}", table)))

    @abstractmethod
    def create(self, table: str, case: Case, rows: int = ROWS) -> None: ...

    @abstractmethod
    def execute(self, *statements: str) -> object:
        """Run statements in one session."""

    def advised(self, statement: str, reason: str) -> None:
        """Run the *statement* of an advice."""
        self.execute(statement)

    def write(self, table: str, number: int) -> None:
        self.perform(table, f"INSERT INTO {{t}} (id, name) VALUES ({number}, 'new')")

    @abstractmethod
    def rows(self, table: str) -> list[tuple[Any, ...]]:
        """``id`` and ``name`` of all rows, in order."""


def parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(";") if part.strip()]


def create_again(source: AdvisedSource, table: str) -> None:
    source.create(table, Case(), rows=7)


# -- Postgres ----------------------------------------------------------------------------------------------------------

PARTITIONED = "PARTITION BY HASH (id)"
INFINITE = "UPDATE {t} SET day = 'infinity' WHERE id = 7"
SPECIAL = '[table."{n}"]\nspecial_values = "null"'
POSTGRES: Final = {
    "key_changed": Case("ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (code)"),
    "key_column_dropped": Case("ALTER TABLE {t} DROP COLUMN code, ADD PRIMARY KEY (id)", key="code"),
    "key_lost": Case("ALTER TABLE {t} DROP CONSTRAINT {t}_pkey", stops=True),
    "key_of_partitions_lost": Case("ALTER TABLE {t} DROP CONSTRAINT {t}_pkey", options=PARTITIONED, stops=True),
    "retyped": Case("ALTER TABLE {t} ALTER COLUMN code TYPE smallint"),
    "renamed": Case("ALTER TABLE {t} RENAME TO elsewhere", "ALTER TABLE elsewhere RENAME TO {t}", writes=False),
    "made_again": Case(("DROP TABLE {t}", create_again)),
    "dropped": Case("DROP TABLE {t}", create_again, writes=False),
    "replaced_by_a_view": Case(
        "DROP TABLE {t}; CREATE VIEW {t} AS SELECT 1 AS id, 'one' AS name",
        ("DROP VIEW {t}", create_again),
        writes=False,
    ),
    "unlogged": Case("ALTER PUBLICATION headwater DROP TABLE {t}; ALTER TABLE {t} SET UNLOGGED", stops=True),
    "unpublished": Case("ALTER PUBLICATION headwater DROP TABLE {t}", stops=True),
    "published_again": Case("ALTER PUBLICATION headwater DROP TABLE {t}; ALTER PUBLICATION headwater ADD TABLE {t}"),
    "published_in_part": Case(
        "ALTER PUBLICATION headwater DROP TABLE {t}; ALTER PUBLICATION headwater ADD TABLE {t} WHERE (id > 5)",
        stops=True,
    ),
    "no_identity": Case("ALTER TABLE {t} REPLICA IDENTITY NOTHING", stops=True),
    "special_value": Case(INFINITE, setting=SPECIAL),
    "special_value_in_history": Case(before=INFINITE, setting=SPECIAL),
    "incomplete": Case(INFINITE, "UPDATE {t} SET day = NULL"),
    "parked": Case(blocked=True),
}


def _drop_slot(source: Postgres) -> None:
    drop_slot(source.database)
    source.write("unpublished", 2001)


def _drop_publication(source: Postgres) -> None:
    source.execute("DROP PUBLICATION headwater")
    source.write("unpublished", 2002)


def _change_columns_under_policy_stop(source: Postgres) -> None:
    _set_policy(source, "", '\nschema_policy = "stop"')
    source.pipeline.wait_for(lambda: source.pipeline.status()["live"])
    source.execute("ALTER TABLE unpublished ADD extra int")
    source.write("unpublished", 2003)


def _set_policy(source: Postgres, old: str, new: str) -> None:
    pipeline = source.pipeline
    pipeline.close()
    pipeline.configure(lambda text: text.replace(f"heartbeat_seconds = 0.5{old}", f"heartbeat_seconds = 0.5{new}"))
    if not old:
        pipeline.start()


POSTGRES_FAILURES: Final = (
    Failure(_drop_slot),
    *(
        (
            Failure(_drop_publication),
            Failure(
                _change_columns_under_policy_stop,
                lambda source: _set_policy(source, '\nschema_policy = "stop"', '\nschema_policy = "evolve"'),
            ),
        )
        if SOAK
        else ()
    ),
)


class Postgres(AdvisedSource):
    """One database."""

    database: Database

    def __init__(self, database: Database, on_rewrite: str) -> None:
        super().__init__(database, POSTGRES, POSTGRES_FAILURES)
        self.execute("CREATE SCHEMA parts")
        self.settings = '[table."public.incomplete"]\nspecial_values = "park"'
        self.on_rewrite = on_rewrite

    def create(self, table: str, case: Case, rows: int = ROWS) -> None:
        self.execute(
            f"CREATE TABLE {table} (id bigint NOT NULL, code bigint NOT NULL DEFAULT 0, name text, day date,"
            f" PRIMARY KEY ({case.key})) {case.options}",
            *(
                f"CREATE TABLE parts.{table}_{n} PARTITION OF {table} FOR VALUES WITH (modulus 2, remainder {n})"
                for n in range(2 if case.options else 0)
            ),
            f"INSERT INTO {table} (id, code, name) SELECT n, n, 'row ' || n FROM generate_series(1, {rows}) n",
        )

    def execute(self, *statements: str) -> object:
        return self.database.execute(*statements)

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        return sorted(self.database.execute(f"SELECT id, name FROM {table}"))


# -- MariaDB and MySQL -------------------------------------------------------------------------------------------------

ZERO = "UPDATE {t} SET day = '0000-00-00' WHERE id = 7"
MARIADB: Final = {
    "key_changed": Case("ALTER TABLE {t} DROP PRIMARY KEY, ADD PRIMARY KEY (code)"),
    "key_lost": Case("ALTER TABLE {t} DROP PRIMARY KEY", "ALTER TABLE {t} ADD PRIMARY KEY (id)"),
    "retyped": Case("ALTER TABLE {t} MODIFY code smallint NOT NULL DEFAULT 0"),
    "default_of_now": Case("ALTER TABLE {t} ADD COLUMN made datetime DEFAULT CURRENT_TIMESTAMP"),
    "renamed": Case("RENAME TABLE {t} TO elsewhere", "RENAME TABLE elsewhere TO {t}", writes=False),
    "name_taken": Case("CREATE TABLE other LIKE {t}; RENAME TABLE {t} TO former, other TO {t}"),
    "made_again": Case(("DROP TABLE {t}", create_again)),
    "dropped": Case("DROP TABLE {t}", create_again, writes=False),
    "replaced_by_a_view": Case(
        "DROP TABLE {t}; CREATE VIEW {t} AS SELECT 1 AS id, 'one' AS name",
        ("DROP VIEW {t}", create_again),
        writes=False,
    ),
    "partition_dropped": Case(
        "ALTER TABLE {t} DROP PARTITION p0",
        options="PARTITION BY RANGE (id) (PARTITION p0 VALUES LESS THAN (20), PARTITION p1 VALUES LESS THAN MAXVALUE)",
    ),
    "retyped_without_log": Case("SET sql_log_bin = 0; ALTER TABLE {t} MODIFY code smallint NOT NULL DEFAULT 0"),
    "dropped_without_log": Case("SET sql_log_bin = 0; DROP TABLE {t}", create_again, writes=False),
    "logged_in_part": Case("SET SESSION binlog_row_image = MINIMAL; UPDATE {t} SET name = 'part' WHERE id = 1"),
    "logged_as_statement": Case("SET SESSION binlog_format = STATEMENT; UPDATE {t} SET name = 'x' WHERE id = 1"),
    "special_value": Case(ZERO, setting=SPECIAL),
    "special_value_in_history": Case(before=ZERO, setting=SPECIAL),
}
OF_MARIADB_ALONE: Final = {"system_versioned": Case("ALTER TABLE {t} ADD SYSTEM VERSIONING")}
WITHOUT_NAMES: Final = {  # the last one: it changes a setting of the server
    "logged_without_names": {
        "mariadb": Case(
            "SET GLOBAL binlog_row_metadata = NO_LOG; FLUSH TABLES; UPDATE {t} SET name = 'x' WHERE id = 1"
        ),
        "mysql": Case("SET GLOBAL binlog_row_metadata = MINIMAL; UPDATE {t} SET name = 'x' WHERE id = 1"),
    }
}


def _purge(source: MySql) -> None:
    source.pipeline.close()
    source.write("dropped", 2001)
    source.execute("FLUSH BINARY LOGS")
    newest = source.shop.execute("SHOW BINARY LOGS")[-1][0]
    end = time.monotonic() + 30
    while len(source.shop.execute("SHOW BINARY LOGS")) > 1:  # one that a session still reads stays
        assert time.monotonic() < end
        source.execute(f"PURGE BINARY LOGS TO '{newest}'")
    source.pipeline.start()


class MySql(AdvisedSource):
    """A server of one of both families."""

    def __init__(self, shop: MySqlShop) -> None:
        cases = MARIADB | (OF_MARIADB_ALONE if shop.kind == "mariadb" else {})
        cases |= {name: by_kind[shop.kind] for name, by_kind in WITHOUT_NAMES.items()}
        super().__init__(shop, cases, (Failure(_purge),) if SOAK else ())
        self.shop = shop

    def create(self, table: str, case: Case, rows: int = ROWS) -> None:
        self.execute(
            f"CREATE TABLE {table} (id bigint NOT NULL, code bigint NOT NULL DEFAULT 0, name varchar(40), day date,"
            f" PRIMARY KEY ({case.key})) {case.options}",
            f"INSERT INTO {table} (id, code, name) SELECT n, n, 'row ' || n FROM generate_series(1, {rows}) n",
        )

    def execute(self, *statements: str) -> object:
        return self.shop.execute(*statements)

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        return sorted(self.shop.execute(f"SELECT id, name FROM {table}"))


@contextmanager
def mysql(family: str) -> Iterator[MySql]:
    with started_or_skipped(family) as server:
        server.execute("CREATE DATABASE `public`")
        yield MySql(MySqlShop(server))


# -- MongoDB -----------------------------------------------------------------------------------------------------------


def _drop_collection(source: MongoDb, table: str) -> None:
    source.shop[table].drop()


def _create_view(source: MongoDb, table: str) -> None:
    source.shop.command("create", table, viewOn="dropped", pipeline=[])


OF_OTHER_TYPE = {"_id": 1002, "id": 1002, "name": "new", "total": "much"}
ANY_KEY = '[table."{n}".columns]\n_id = "key"\nid = "long"\nname = "string"'
MONGODB: Final = {
    "renamed": Case(
        lambda source, table: source.shop[table].rename("elsewhere"),
        lambda source, table: source.shop["elsewhere"].rename(table),
        writes=False,
    ),
    "name_taken": Case(
        lambda source, table: (
            source.shop["other"].insert_one({"_id": 1, "id": 1, "name": "one"}),
            source.shop["other"].rename(table, dropTarget=True),
        )
    ),
    "made_again": Case((_drop_collection, create_again)),
    "dropped": Case(_drop_collection, create_again, writes=False),
    "replaced_by_a_view": Case((_drop_collection, _create_view), (_drop_collection, create_again), writes=False),
    "special_value": Case(lambda source, table: source.shop[table].insert_one(OF_OTHER_TYPE), setting=SPECIAL),
    "special_value_in_history": Case(
        before=lambda source, table: source.shop[table].insert_one(OF_OTHER_TYPE), setting=SPECIAL
    ),
    "key_of_other_type": Case(
        lambda source, table: source.shop[table].insert_one({"_id": "text", "id": 1003, "name": "new"}),
        setting=ANY_KEY,
    ),
}


class MongoDb(AdvisedSource):
    """A replica set."""

    namespace = "shop"

    def __init__(self, server: MongoServer) -> None:
        super().__init__(server, MONGODB)
        self.shop = server.client.shop
        self.settings = "\n".join(
            f'[table."shop.{table}".columns]\n_id = "long"\nid = "long"\nname = "string"\ntotal = "int"'
            for table, case in self.cases.items()
            if case.setting != ANY_KEY
        )

    def create(self, table: str, case: Case, rows: int = ROWS) -> None:
        documents = ({"_id": n, "id": n, "name": f"row {n}", "total": n} for n in range(1, rows + 1))
        self.shop[table].insert_many(list(documents))

    def execute(self, *statements: str) -> object:
        raise NotImplementedError(statements)

    def write(self, table: str, number: int) -> None:
        self.shop[table].insert_one({"_id": number, "id": number, "name": "new", "total": 1})

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        return sorted((one["id"], one["name"]) for one in self.shop[table].find())


@contextmanager
def mongodb() -> Iterator[MongoDb]:
    with started_mongodb() as server:
        yield MongoDb(server)


# -- SQL Server --------------------------------------------------------------------------------------------------------

HALF = "UPDATE shop.{t} SET note = CONVERT(nvarchar(40), 0x61003DD8) WHERE id = 7"
ENABLE = (
    "EXEC sys.sp_cdc_enable_table @source_schema = N'shop', @source_name = N'{t}', @role_name = NULL,"
    " @supports_net_changes = 0"
)
DISABLE = (
    "EXEC sys.sp_cdc_disable_table @source_schema = N'shop', @source_name = N'{t}', @capture_instance = N'shop_{t}'"
)


def _create_uncaptured(source: SqlServer, table: str) -> None:
    source.create(table, Case(), rows=7, captured=False)


def _capture_again(source: SqlServer, table: str) -> None:
    with source.server.engine.lock:  # or the capture may look between the two
        source.server.engine.disable("shop", table, f"shop_{table}")
        source.server.engine.enable("shop", table, None)


def _capture_column_late(source: SqlServer, table: str) -> None:
    source.perform(table, "ALTER TABLE shop.{t} ADD rate int")
    source.write(table, 1000)
    source.pipeline.wait_for(lambda: source.pipeline.mirror(f"shop.{table}") == source.rows(table))
    source.perform(table, f"{ENABLE}, @capture_instance = N'{{t}}_rate'")


SQLSERVER: Final = {
    "instance_removed": Case(DISABLE),
    "instance_made_again": Case(_capture_again),
    "instance_without_key": Case(
        f"{ENABLE}, @capture_instance = N'{{t}}_keyless', @captured_column_list = N'name, note'"
    ),
    "column_captured_late": Case(_capture_column_late),
    "dropped": Case("DROP TABLE shop.{t}", _create_uncaptured, writes=False),
    "made_again": Case(("DROP TABLE shop.{t}", create_again)),
    "made_again_uncaptured": Case(("DROP TABLE shop.{t}", _create_uncaptured)),
    "special_value": Case(HALF, setting=SPECIAL),
    "special_value_in_history": Case(before=HALF, setting=SPECIAL),
}


def _clean_up(source: SqlServer) -> None:
    source.pipeline.close()
    source.write("dropped", 2001)
    source.server.wait_for_scan()
    source.server.engine.purge(source.server.last_change() + 1)
    source.pipeline.start()


class SqlServer(AdvisedSource):
    """The double."""

    namespace = "shop"

    def __init__(self, server: SqlServerDouble) -> None:
        super().__init__(server, SQLSERVER, (Failure(_clean_up),) if SOAK else ())
        self.server = server

    def create(self, table: str, case: Case, rows: int = ROWS, *, captured: bool = True) -> None:
        values = ", ".join(f"({n}, {n}, N'row {n}')" for n in range(1, rows + 1))
        self.execute(
            f"CREATE TABLE shop.{table} (id bigint NOT NULL PRIMARY KEY, code bigint, name nvarchar(40),"
            " note nvarchar(40))",
            f"INSERT INTO shop.{table} (id, code, name) VALUES {values}",
        )
        if captured:
            track(self.server, table)

    def execute(self, *statements: str) -> object:
        return self.server.execute(*statements)

    def write(self, table: str, number: int) -> None:
        self.execute(f"INSERT INTO shop.{table} (id, name) VALUES ({number}, N'new')")

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        return sorted(self.server.execute(f"SELECT id, name FROM shop.{table}"))


@contextmanager
def sqlserver() -> Iterator[SqlServer]:
    with SqlServerDouble() as server:
        server.execute("EXEC sys.sp_cdc_enable_db;")
        yield SqlServer(server)


# -- Citus -------------------------------------------------------------------------------------------------------------

COLUMNS = "id bigint, code bigint NOT NULL DEFAULT 0, name text, day date"
REFERENCE, LOCAL = "reference", "local"


def _on(group: int, statement: str) -> Callable[[Citus, str], object]:
    return lambda source, table: source.double.execute(group, *parts(statement.replace("{t}", table)))


def _drop_distributed(source: Citus, table: str) -> None:
    source.double.forget(table)
    source.double.everywhere(f"DROP TABLE {table}")
    del source.double.tables[table]


def _make_reference(source: Citus, table: str) -> None:
    source.double.execute(
        0,
        f"INSERT INTO pg_dist_partition VALUES ('{table}', 'n', 't')",
        f"INSERT INTO pg_dist_shard VALUES ('{table}', 7)",
        *(f"INSERT INTO pg_dist_placement VALUES ({700 + group}, 7, {group})" for group in source.double.servers),
    )


def _copy_shard(source: Citus, table: str) -> None:
    shard, owner = next(iter(source.double.tables[table].shards.items()))
    source.double.execute(0, f"INSERT INTO pg_dist_placement VALUES (999, {shard}, {3 - owner})")


CITUS: Final = {
    "truncated": Case(_on(1, "TRUNCATE {t}")),
    "reference_truncated": Case(_on(0, "TRUNCATE {t}"), options=REFERENCE),
    "reference_without_copy": Case(
        _on(
            0,
            "DELETE FROM pg_dist_placement p USING pg_dist_shard s WHERE s.shardid = p.shardid"
            " AND s.logicalrelid = '{t}'::regclass AND p.groupid = 0",
        ),
        options=REFERENCE,
        writes=False,
    ),
    "made_reference": Case(_make_reference, options=LOCAL),
    "shard_copied": Case(_copy_shard, _on(0, "DELETE FROM pg_dist_placement WHERE placementid = 999"), writes=False),
    "dropped": Case(_drop_distributed, create_again, writes=False),
    "made_again": Case((_drop_distributed, create_again)),
    "renamed": Case("ALTER TABLE {t} RENAME TO elsewhere", "ALTER TABLE elsewhere RENAME TO {t}", writes=False),
    "key_changed": Case("ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (id, code)"),
    "key_lost": Case("ALTER TABLE {t} DROP CONSTRAINT {t}_pkey", "ALTER TABLE {t} ADD PRIMARY KEY (id)"),
    "retyped": Case("ALTER TABLE {t} ALTER COLUMN day TYPE timestamp"),
    "unpublished_on_a_node": Case(_on(1, "ALTER PUBLICATION headwater DROP TABLE {t}")),
    "no_identity": Case("ALTER TABLE {t} REPLICA IDENTITY NOTHING"),
    "special_value": Case(INFINITE, setting=SPECIAL),
    "special_value_in_history": Case(before=INFINITE, setting=SPECIAL),
}


def _drop_slot_of_a_node(source: Citus) -> None:
    source.pipeline.close()
    source.double.execute(1, "SELECT pg_drop_replication_slot('headwater')")
    source.write("truncated", 2001)
    source.pipeline.start()


class Citus(AdvisedSource):
    """The double of a cluster."""

    def __init__(self, double: CitusDouble) -> None:
        super().__init__(double, CITUS, (Failure(_drop_slot_of_a_node),))
        self.double = double

    def create(self, table: str, case: Case, rows: int = ROWS) -> None:
        numbers = f"generate_series(1::bigint, {rows}) i"
        fill = f"INSERT INTO {table} (id, code, name) SELECT i, i, 'row ' || i FROM {numbers}"
        if case.options == REFERENCE:
            self.double.reference(table, COLUMNS)
        elif case.options == LOCAL:
            self.double.execute(
                0,
                f"CREATE TABLE {table} ({COLUMNS}, PRIMARY KEY (id)) PARTITION BY HASH (id)",
                f"CREATE TABLE {table}_7 PARTITION OF {table} FOR VALUES WITH (modulus 1, remainder 0)",
            )
        else:
            self.double.distribute(table, COLUMNS)
            for group in (1, 2):
                self.double.execute(group, f"{fill} WHERE {here(self.double, table, group)}")
            return
        self.double.execute(0, fill)

    def execute(self, *statements: str) -> object:
        for statement in statements:
            self.double.everywhere(statement)
        return None

    def advised(self, statement: str, reason: str) -> None:
        named = re.search(r"Node [\w.]+:(\d+)", reason)
        port = None if named is None else int(named[1])
        groups = [group for group, server in self.double.servers.items() if server.port == port]
        if groups or statement.startswith("SELECT"):
            self.double.execute(groups[0] if groups else 0, statement)
        else:  # as the coordinator of a cluster does it
            self.double.everywhere(statement)

    def write(self, table: str, number: int) -> None:
        group = self.double.owner(table, number) if table in self.double.tables else 0
        self.double.execute(group, f"INSERT INTO {table} (id, name) VALUES ({number}, 'new')")

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        groups = (1, 2) if table in self.double.tables else (0,)
        return sorted(row for group in groups for row in self.double.execute(group, f"SELECT id, name FROM {table}"))


@contextmanager
def citus() -> Iterator[Citus]:
    nodes = Nodes()
    try:
        yield Citus(CitusDouble([nodes.server(place) for place in range(3)], "shop"))
    finally:
        nodes.close()


STARTED: Final[Mapping[str, Callable[[], Any]]] = {
    "mariadb": partial(mysql, "mariadb"),
    "mysql": partial(mysql, "mysql"),
    "mongodb": mongodb,
    "sqlserver": sqlserver,
    "citus": citus,
}

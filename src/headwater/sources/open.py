"""Opens a source by its connection string: the one place that knows which families of databases there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path

from headwater.databases.timeouts import TIMEOUT_SECONDS
from headwater.sources.diagnosis import Diagnosis
from headwater.sources.dsn import current_dsn
from headwater.sources.encryption import plain_finding
from headwater.sources.errors import DriverMissing, InvalidDsn, SourceMisconfigured
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.offset import CdcOffset
from headwater.sources.qualified_name import shown
from headwater.sources.source import Source
from headwater.sources.table import SpecialValues


class Family(Enum):
    """Databases of one family are read in the same way."""

    CITUS = "citus"
    POSTGRES = "postgres"
    MYSQL = "mysql"
    SQLSERVER = "sqlserver"
    MONGODB = "mongodb"


def open_source(
    dsn: str,
    *,
    spill: Path,
    schema_policy: SchemaPolicy = SchemaPolicy.EVOLVE,
    special_values: Mapping[str, SpecialValues] | None = None,
    slot: str = "headwater",
    publication: str = "headwater",
    poll: bool = False,
    columns: Mapping[str, str] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Source:
    """The source at *dsn*; nothing is connected yet.

    :param spill: where large transactions wait for their commit.
    :param special_values: policies by ``schema.table.column``, or ``schema.table`` for all its columns.
    :param columns: of collections without a schema, by ``database.collection``: how their columns are found.
    :param timeout_seconds: a server that is silent for this long counts as unreachable.
    :raises InvalidDsn: no kind of database that can be captured. The text is not repeated: it may hold a password.
    :raises DriverMissing: Headwater was installed without the driver of this kind.
    :raises SourceMisconfigured: *columns* are given for a database whose tables have their own.
    """
    family = family_of(dsn)
    if family is Family.MONGODB:
        with mongodb_driver():
            from headwater.sources.mongodb.source import MongoSource

        return MongoSource(
            dsn,
            schema_policy=schema_policy,
            special_values=special_values or {},
            columns=columns,
            timeout_seconds=timeout_seconds,
        )
    if columns:
        raise SourceMisconfigured(
            f"Columns are declared for {next(iter(columns))}, whose database has its own.",
            next_step="Leave them out: they are for collections of MongoDB.",
        )
    if family is Family.MYSQL:
        with mysql_driver():
            from headwater.sources.mysql.source import MySqlSource

        return MySqlSource(
            dsn, schema_policy=schema_policy, special_values=special_values or {}, timeout_seconds=timeout_seconds
        )
    if family is Family.SQLSERVER:
        with sqlserver_driver():
            from headwater.sources.sqlserver.source import SqlServerSource

        return SqlServerSource(
            dsn, schema_policy=schema_policy, special_values=special_values or {}, timeout_seconds=timeout_seconds
        )
    if family is Family.CITUS:
        with postgres_driver():
            from headwater.sources.citus.source import CitusSource

        return CitusSource(
            dsn,
            spill=spill,
            schema_policy=schema_policy,
            special_values=special_values or {},
            slot=slot,
            publication=publication,
            poll=poll,
            timeout_seconds=timeout_seconds,
        )
    if family is Family.POSTGRES:
        with postgres_driver():
            from headwater.sources.postgres.source import PostgresSource

        return PostgresSource(
            dsn,
            spill=spill,
            schema_policy=schema_policy,
            special_values=special_values or {},
            slot=slot,
            publication=publication,
            poll=poll,
            timeout_seconds=timeout_seconds,
        )
    raise no_family("captured")


def all_tables(dsn: str) -> list[str]:
    """The full names of all tables at *dsn* that are not the server's own."""
    if family_of(dsn) is Family.MONGODB:
        with mongodb_driver():
            from headwater.sources.mongodb import catalog as of_mongodb
            from headwater.sources.mongodb import connection as to_mongodb

        cluster = to_mongodb.Dsn(dsn)
        with to_mongodb.server_errors(cluster), closing(to_mongodb.connect(cluster)) as client:
            return [str(one.name) for one in of_mongodb.all_collections(client, cluster.database)]
    if family_of(dsn) is Family.MYSQL:
        with mysql_driver():
            from headwater.sources.mysql import catalog as of_mysql
            from headwater.sources.mysql import connection as to_mysql

        server = to_mysql.Dsn(dsn)
        with to_mysql.server_errors(server), closing(to_mysql.connect(server)) as session:
            return [str(name) for name in of_mysql.all_table_names(session, server.database)]
    if family_of(dsn) is Family.SQLSERVER:
        with sqlserver_driver():
            from headwater.sources.sqlserver import catalog as of_sqlserver
            from headwater.sources.sqlserver import connection as to_sqlserver

        with to_sqlserver.Session(to_sqlserver.Dsn(dsn)) as asked:
            return [str(name) for name in of_sqlserver.all_table_names(asked)]
    with postgres_driver():
        from headwater.sources.postgres import catalog as of_postgres
        from headwater.sources.postgres import connection as to_postgres

    database = to_postgres.Dsn(coordinator_of(dsn))
    with to_postgres.connect(database) as connection, to_postgres.server_errors(database):
        return [str(name) for name in of_postgres.all_table_names(connection)]


def full_name(dsn: str, table: str) -> str:
    """The name of a table as its log has it. :raises InputError: *table* is no name of one."""
    if family_of(dsn) is Family.MONGODB:
        with mongodb_driver():
            from headwater.sources.mongodb import connection as to_mongodb
            from headwater.sources.mongodb import names as in_mongodb

        return str(in_mongodb.CollectionName.parse(table, to_mongodb.Dsn(dsn).database))
    if family_of(dsn) is Family.MYSQL:
        with mysql_driver():
            from headwater.sources.mysql import connection as to_mysql
            from headwater.sources.mysql import names as in_mysql

        return str(in_mysql.TableName.parse(table, to_mysql.Dsn(dsn).database))
    if family_of(dsn) is Family.SQLSERVER:
        from headwater.sources.sqlserver import names as in_sqlserver

        return str(in_sqlserver.TableName.parse(table))
    from headwater.sources.postgres import names as in_postgres

    return str(in_postgres.TableName.parse(table))


def home_of(dsn: str) -> str:
    """Where tables are that are named alone: a schema or database as full names have it; empty where there is none."""
    if family_of(dsn) is Family.MONGODB:
        with mongodb_driver():
            from headwater.sources.mongodb import connection as to_mongodb

        home = to_mongodb.Dsn(dsn).database
        return shown(home) if home else ""
    if family_of(dsn) is Family.SQLSERVER:
        from headwater.sources.sqlserver import names as in_sqlserver

        return in_sqlserver.DEFAULT_SCHEMA
    if family_of(dsn) is not Family.MYSQL:
        return "public"
    with mysql_driver():
        from headwater.sources.mysql import connection as to_mysql

    database = to_mysql.Dsn(dsn).database
    return shown(database) if database else ""


def diagnose(
    dsn: str, tables: Sequence[str], *, slot: str, publication: str, told: CdcOffset | None = None
) -> Diagnosis:
    """What the doctor of the database at *dsn* finds. :param told: up to where it was captured, if that is known."""
    found = _diagnose(dsn, tables, slot=slot, publication=publication, told=told)
    if family_of(dsn) in (Family.POSTGRES, Family.CITUS):  # they look at the connection itself
        return found
    plain = plain_finding("source", dsn)
    return found if plain is None else replace(found, findings=[*found.findings, plain])


def _diagnose(
    dsn: str, tables: Sequence[str], *, slot: str, publication: str, told: CdcOffset | None = None
) -> Diagnosis:
    if family_of(dsn) is Family.MONGODB:
        with mongodb_driver():
            from headwater.sources.mongodb import connection as to_mongodb
            from headwater.sources.mongodb import doctor as of_mongodb

        return of_mongodb.examine(to_mongodb.Dsn(dsn), tables)
    if family_of(dsn) is Family.MYSQL:
        with mysql_driver():
            from headwater.sources.mysql import connection as to_mysql
            from headwater.sources.mysql import doctor as of_mysql

        return of_mysql.examine(to_mysql.Dsn(dsn), tables)
    if family_of(dsn) is Family.SQLSERVER:
        with sqlserver_driver():
            from headwater.sources.sqlserver import connection as to_sqlserver
            from headwater.sources.sqlserver import doctor as of_sqlserver

        return of_sqlserver.examine(to_sqlserver.Dsn(dsn), tables)
    with postgres_driver():
        from headwater.sources.postgres import connection as to_postgres
        from headwater.sources.postgres import doctor as of_postgres

    if family_of(dsn) is Family.CITUS:
        from headwater.sources.citus import doctor as of_citus

        return of_citus.examine(dsn, tables, slot=slot, publication=publication, told=told)
    return of_postgres.examine(to_postgres.Dsn(dsn), tables, slot=slot, publication=publication)


def family_of(dsn: str) -> Family | None:
    """Which family the database at *dsn* is of; ``None`` where the text names none."""
    kind = current_dsn(dsn).partition("://")[0]
    if kind in ("mysql", "mariadb"):
        return Family.MYSQL
    if kind == "citus":
        return Family.CITUS
    if kind in ("sqlserver", "mssql"):
        return Family.SQLSERVER
    if kind in ("mongodb", "mongodb+srv"):
        return Family.MONGODB
    return Family.POSTGRES if kind in ("postgres", "postgresql") or "=" in kind else None


def coordinator_of(dsn: str) -> str:
    """The address of a single server of Postgres that has all tables: of a Citus cluster, the coordinator's."""
    return f"postgresql{current_dsn(dsn).removeprefix('citus')}" if family_of(dsn) is Family.CITUS else dsn


def no_family(what: str) -> InvalidDsn:
    """The error of a text that names no database that can be *what*."""
    return InvalidDsn(
        f"The connection string names no database that can be {what}.",
        next_step="Write postgresql://user@host:5432/database (citus:// for a cluster), mysql://user@host:3306/database,"
        " mongodb://user@host:27017/database?replicaSet=rs0 or sqlserver://user@host:1433/database.",
    )


@contextmanager
def _driver(family: str, extra: str, *modules: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        # psycopg without the library that it needs names no module
        name = "psycopg" if "pq wrapper" in str(error) else (error.name or "").partition(".")[0]
        if name not in modules:
            raise
        raise DriverMissing(
            f"The driver for {family} is not installed.", next_step=f"Run: pip install 'headwater[{extra}]'"
        ) from None


def mysql_driver() -> AbstractContextManager[None]:
    """Around imports that need the driver for MySQL and MariaDB. :raises DriverMissing: it is not installed."""
    return _driver("MySQL and MariaDB", "mysql", "pymysql")


def mongodb_driver() -> AbstractContextManager[None]:
    """Around imports that need the driver for MongoDB. :raises DriverMissing: it is not installed."""
    return _driver("MongoDB", "mongodb", "pymongo", "bson")


def sqlserver_driver() -> AbstractContextManager[None]:
    """Around imports that need the driver for SQL Server. :raises DriverMissing: it is not installed."""
    return _driver("SQL Server", "sqlserver", "pytds")


def postgres_driver() -> AbstractContextManager[None]:
    """Around imports that need the driver for Postgres. :raises DriverMissing: it, or its library, is not installed."""
    return _driver("Postgres", "postgres", "psycopg")

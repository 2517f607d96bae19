"""Opens a source by its connection string: the one place that knows which families of databases there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from headwater.databases.timeouts import TIMEOUT_SECONDS
from headwater.sources.diagnosis import Diagnosis, plain_finding
from headwater.sources.dsn import current_dsn
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


_PREFIXES: Final = {
    Family.CITUS: "Citus",
    Family.POSTGRES: "Postgres",
    Family.MYSQL: "MySql",
    Family.SQLSERVER: "SqlServer",
    Family.MONGODB: "Mongo",
}
_DRIVERS: Final = {
    Family.CITUS: ("Postgres", "postgres", ("psycopg",)),
    Family.POSTGRES: ("Postgres", "postgres", ("psycopg",)),
    Family.MYSQL: ("MySQL and MariaDB", "mysql", ("pymysql",)),
    Family.SQLSERVER: ("SQL Server", "sqlserver", ("pytds",)),
    Family.MONGODB: ("MongoDB", "mongodb", ("pymongo", "bson")),
}
"""How each driver is called, the extra that installs it, and its modules."""


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
    if family is None:
        raise no_family("captured")
    options: dict[str, Any] = {
        "schema_policy": schema_policy,
        "special_values": special_values or {},
        "timeout_seconds": timeout_seconds,
    }
    if family is Family.MONGODB:
        options["columns"] = columns
    elif columns:
        raise SourceMisconfigured(
            f"Columns are declared for {next(iter(columns))}, whose database has its own.",
            next_step="Leave them out: they are for collections of MongoDB.",
        )
    if family in (Family.POSTGRES, Family.CITUS):
        options |= {"spill": spill, "slot": slot, "publication": publication, "poll": poll}
    source: Source = class_of(family, "source", "Source")(dsn, **options)
    return source


def all_tables(dsn: str) -> list[str]:
    """The full names of all tables at *dsn* that are not the server's own."""
    family = family_of(dsn) or Family.POSTGRES
    if family is Family.CITUS:
        dsn, family = coordinator_of(dsn), Family.POSTGRES
    connection, catalog = (module_of(family, name) for name in ("connection", "catalog"))
    server = connection.Dsn(dsn)
    if family is Family.SQLSERVER:
        with connection.Session(server) as session:
            return [str(name) for name in catalog.all_table_names(session)]
    with connection.server_errors(server), closing(connection.connect(server)) as session:
        if family is Family.MONGODB:
            return [str(collection.name) for collection in catalog.all_collections(session, server.database)]
        database = (server.database,) if family is Family.MYSQL else ()
        return [str(name) for name in catalog.all_table_names(session, *database)]


def full_name(dsn: str, table: str) -> str:
    """The name of a table as its log has it. :raises InputError: *table* is no name of one."""
    family = family_of(dsn)
    if family in (Family.MYSQL, Family.MONGODB):
        database = module_of(family, "connection").Dsn(dsn).database
        names = module_of(family, "names")
        named = names.TableName if family is Family.MYSQL else names.CollectionName
        return str(named.parse(table, database))
    return str(module_of(family if family is Family.SQLSERVER else Family.POSTGRES, "names").TableName.parse(table))


def home_of(dsn: str) -> str:
    """Where tables are that are named alone: a schema or database as full names have it; empty where there is none."""
    family = family_of(dsn)
    if family is Family.SQLSERVER:
        return str(module_of(family, "names").DEFAULT_SCHEMA)
    if family not in (Family.MYSQL, Family.MONGODB):
        return "public"
    database = module_of(family, "connection").Dsn(dsn).database
    return shown(database) if database else ""


def diagnose(
    dsn: str, tables: Sequence[str], *, slot: str, publication: str, told: CdcOffset | None = None
) -> Diagnosis:
    """What the doctor of the database at *dsn* finds. :param told: up to where it was captured, if that is known."""
    family = family_of(dsn) or Family.POSTGRES
    doctor = module_of(family, "doctor")
    if family is Family.CITUS:
        diagnosis = doctor.examine(dsn, tables, slot=slot, publication=publication, told=told)
    else:
        server = module_of(family, "connection").Dsn(dsn)
        claimed = {"slot": slot, "publication": publication} if family is Family.POSTGRES else {}
        diagnosis = doctor.examine(server, tables, **claimed)
    assert isinstance(diagnosis, Diagnosis)
    if family in (Family.POSTGRES, Family.CITUS):  # they look at the connection itself
        return diagnosis
    plain = plain_finding("source", dsn)
    return diagnosis if plain is None else replace(diagnosis, findings=[*diagnosis.findings, plain])


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
def driver(family: Family) -> Iterator[None]:
    """Around imports that need the driver of *family*. :raises DriverMissing: it, or its library, is not installed."""
    title, extra, modules = _DRIVERS[family]
    try:
        yield
    except ImportError as error:
        # psycopg without the library that it needs names no module
        name = "psycopg" if "pq wrapper" in str(error) else (error.name or "").partition(".")[0]
        if name not in modules:
            raise
        raise DriverMissing(
            f"The driver for {title} is not installed.", next_step=f"Run: pip install 'headwater[{extra}]'"
        ) from None


def module_of(family: Family, name: str) -> Any:
    """A module of *family*; each has modules of the same names. :raises DriverMissing: its driver is not installed."""
    with driver(family):
        return import_module(f"headwater.sources.{family.value}.{name}")


def class_of(family: Family, module: str, name: str) -> Any:
    """The class *name* of *family*, whose own name comes first. :raises DriverMissing: its driver is not installed."""
    return getattr(module_of(family, module), f"{_PREFIXES[family]}{name}")

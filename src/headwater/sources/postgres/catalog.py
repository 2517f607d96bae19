"""Reads tables from the server's catalog: columns, types, keys, replica identity and partitions."""

from __future__ import annotations

import contextlib
import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from psycopg.pq import TransactionStatus

from headwater.sources.errors import SourceNotFound
from headwater.sources.postgres.catalog_table import (
    CatalogColumn,
    CatalogIndex,
    CatalogTable,
    Generated,
    Partition,
    ReplicaIdentity,
)
from headwater.sources.postgres.catalog_types import CatalogType, read_types
from headwater.sources.postgres.connection import Connection, ask
from headwater.sources.postgres.names import TableName

_RELATIONS = """
SELECT c.oid::bigint, n.nspname AS namespace, c.relname AS name, c.relkind::text AS kind,
       c.relpersistence::text AS persistence, r.rolname AS owner, pg_catalog.pg_has_role(c.relowner, 'USAGE') AS owned,
       pg_catalog.has_schema_privilege(n.oid, 'USAGE') AS enterable,
       pg_catalog.row_security_active(c.oid) AS row_security,
       c.relkind = 'r' AND EXISTS (SELECT FROM pg_catalog.pg_inherits i WHERE i.inhparent = c.oid) AS inherited,
       c.relispartition AS is_partition, c.relreplident::text AS identity, c.relnatts AS numbers,
       c.reltuples::bigint AS rows, (SELECT m.amname::text FROM pg_catalog.pg_am m WHERE m.oid = c.relam) AS access
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_roles r ON r.oid = c.relowner
"""

_LOCK_TIMEOUT = "2s"

_BY_NAME = """
JOIN ROWS FROM (unnest(%s::text[]), unnest(%s::text[])) w (s, t) ON w.s = n.nspname AND w.t = c.relname
WHERE c.relkind NOT IN ('i', 'I', 'c', 't')
"""

_EXISTING = f"""
SELECT n.nspname AS namespace, c.relname AS name
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace {_BY_NAME}
  AND c.relkind IN ('r', 'p')
"""

_BY_OID = "WHERE c.oid = ANY(%s::oid[])"

_COLUMNS = """
SELECT a.attrelid::bigint AS relation, a.attnum AS number, a.attname AS name, a.atttypid::bigint AS type,
       a.atttypmod AS typmod, pg_catalog.format_type(a.atttypid, a.atttypmod) AS type_text, a.attnotnull AS not_null,
       a.attgenerated::text AS generated, a.attidentity <> '' AS identity,
       CASE WHEN a.atthasmissing THEN pg_catalog.array_to_string(a.attmissingval, '') ELSE (
         WITH RECURSIVE tree (relid) AS (
           SELECT c.oid FROM pg_catalog.pg_class c WHERE c.oid = a.attrelid AND c.relkind = 'p'
           UNION ALL
           SELECT i.inhrelid FROM tree t
           JOIN pg_catalog.pg_inherits i ON i.inhparent = t.relid AND NOT i.inhdetachpending
         )
         SELECT pg_catalog.array_to_string(l.attmissingval, '')
         FROM tree t JOIN pg_catalog.pg_attribute l ON l.attrelid = t.relid
         WHERE l.attname = a.attname AND l.atthasmissing
         LIMIT 1
       ) END AS missing,  -- of a partitioned table its partitions have it, if they are that old
       a.attlen = -1 AND a.attstorage <> 'p' AS toasted,
       pg_catalog.has_column_privilege(a.attrelid, a.attnum, 'SELECT') AS selectable
FROM pg_catalog.pg_attribute a
WHERE a.attrelid = ANY(%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""

# What ALTER TABLE … REPLICA IDENTITY USING INDEX takes.
_INDEXES = """
SELECT i.indrelid::bigint AS relation, c.relname AS name, k.columns, i.indisprimary AS is_primary,
       i.indisreplident AS is_identity
FROM pg_catalog.pg_index i
JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
CROSS JOIN LATERAL (
  SELECT pg_catalog.array_agg(a.attname::text ORDER BY n.place) AS columns, bool_and(a.attnotnull) AS not_null
  FROM pg_catalog.unnest(i.indkey::int2[]) WITH ORDINALITY n (number, place)
  JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = n.number
  WHERE n.place <= i.indnkeyatts
) k
WHERE i.indrelid = ANY(%s::oid[]) AND i.indisunique AND i.indisvalid AND i.indimmediate AND k.not_null
  AND i.indexprs IS NULL AND i.indpred IS NULL
ORDER BY i.indrelid, i.indisprimary DESC, i.indnkeyatts, c.relname
"""

_ANCESTORS = """
SELECT w.oid::bigint AS relation, n.nspname AS namespace, c.relname AS name
FROM unnest(%s::oid[]) w (oid)
CROSS JOIN LATERAL pg_catalog.pg_partition_ancestors(w.oid) WITH ORDINALITY t (relid, place)
JOIN pg_catalog.pg_class c ON c.oid = t.relid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE t.relid <> w.oid
ORDER BY w.oid, t.place
"""

# pg_partition_tree would lock all partitions until the transaction ends: the application's DDL could deadlock with us.
PARTITION_TREE = """
WITH RECURSIVE tree (root, relid) AS (
  SELECT w.oid, w.oid FROM unnest(%s::oid[]) w (oid)
  UNION ALL
  SELECT t.root, i.inhrelid FROM tree t
  JOIN pg_catalog.pg_inherits i ON i.inhparent = t.relid AND NOT i.inhdetachpending
)
"""

_LEAVES = f"""
{PARTITION_TREE}
SELECT w.root::bigint AS relation, c.oid::bigint, n.nspname AS namespace, c.relname AS name, c.relkind::text AS kind,
       c.relpersistence::text AS persistence, c.relreplident::text AS identity,
       c.reltuples::bigint AS rows,
       (SELECT m.amname::text FROM pg_catalog.pg_am m WHERE m.oid = c.relam) AS access
FROM tree w
JOIN pg_catalog.pg_class c ON c.oid = w.relid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind <> 'p'
ORDER BY w.root, n.nspname, c.relname
"""

_ALL_NAMES = """
SELECT n.nspname, c.relname
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND c.relpersistence <> 't'
  AND n.nspname <> 'information_schema' AND n.nspname !~ '^pg_'
  AND NOT EXISTS (SELECT FROM pg_catalog.pg_depend d
                  WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.objid = c.oid AND d.deptype = 'e')
ORDER BY 1, 2
"""

_SIMILAR = """
SELECT n.nspname, c.relname
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND n.nspname !~ '^pg_' AND lower(c.relname) = lower(%s)
ORDER BY lower(n.nspname) <> lower(%s), 1, 2
LIMIT 1
"""


def all_table_names(session: Connection) -> list[TableName]:
    """The user's tables: partitions come under their root, tables of extensions and of the system do not come."""
    return [TableName(*row) for row in session.execute(_ALL_NAMES)]


def existing_names(session: Connection, names: Sequence[TableName]) -> list[TableName]:
    """Those of *names* that a table has now."""
    wanted = [[name.namespace for name in names], [name.name for name in names]]
    return [TableName(row.namespace, row.name) for row in ask(session, _EXISTING, wanted)] if names else []


def read_table(session: Connection, name: TableName) -> CatalogTable:
    """One table; see :func:`read_tables`."""
    return read_tables(session, [name])[0]


def read_tables(session: Connection, names: Sequence[TableName]) -> list[CatalogTable]:
    """The tables of these names, in their order, as the catalog has them now.

    :raises SourceNotFound: there is none of a name.
    """
    wanted = [[name.namespace for name in names], [name.name for name in names]]
    found = {table.name: table for table in _read(session, _BY_NAME, wanted)}
    for name in names:
        if name not in found:
            raise _not_found(session, name)
    return [found[name] for name in names]


def read_tables_by_oid(session: Connection, oids: Sequence[int]) -> dict[int, CatalogTable]:
    """Tables by their number, whatever they are called now; those that are gone are not in the answer."""
    return {table.oid: table for table in _read(session, _BY_OID, [list(oids)])}


def _read(session: Connection, condition: str, parameters: list[Any]) -> list[CatalogTable]:
    with one_view(session):
        relations = ask(session, f"{_RELATIONS} {condition}", parameters)
        oids = [row.oid for row in relations]
        leaves = _grouped(ask(session, _LEAVES, [[row.oid for row in relations if row.kind == "p"]]))
        ancestors = _grouped(ask(session, _ANCESTORS, [[row.oid for row in relations if row.is_partition]]))
        columns = _grouped(ask(session, _COLUMNS, [oids]))
        all_oids = [*oids, *(leaf.oid for of_table in leaves.values() for leaf in of_table)]
        indexes = {oid: _indexes(rows) for oid, rows in _grouped(ask(session, _INDEXES, [all_oids])).items()}
        types = read_types(session, {row.type for of_table in columns.values() for row in of_table})
    tables = []
    for row in relations:
        rows = columns.get(row.oid, [])
        parts = leaves.get(row.oid, [])
        tables.append(
            CatalogTable(
                oid=row.oid,
                name=TableName(row.namespace, row.name),
                kind=row.kind,
                persistence=row.persistence,
                owner=row.owner,
                owned=row.owned,
                selectable=row.enterable and all(column.selectable for column in rows),
                row_security=row.row_security,
                inherited=row.inherited,
                identity=ReplicaIdentity(row.identity),
                numbers=row.numbers,
                columns=tuple(_column(column, types) for column in rows),
                indexes=indexes.get(row.oid, ()),
                ancestors=tuple(TableName(above.namespace, above.name) for above in ancestors.get(row.oid, ())),
                leaves=tuple(_partition(part, indexes.get(part.oid, ())) for part in parts),
                rows=sum(part.rows for part in parts) if parts else row.rows,
                access=row.access,
            )
        )
    return tables


@contextlib.contextmanager
def one_view(session: Connection) -> Iterator[None]:
    """All questions see one state of the catalog; a transaction that is open already gives its own.

    Some of them open the tables: one that stays locked, as by a long ``ALTER TABLE``, ends them with a lock timeout.
    """
    if session.info.transaction_status != TransactionStatus.IDLE:
        yield
        return
    with session.transaction():
        session.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        session.execute(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
        yield


def _grouped(rows: Iterable[Any]) -> dict[int, list[Any]]:
    return {relation: list(group) for relation, group in itertools.groupby(rows, key=lambda row: int(row.relation))}


def _indexes(rows: Iterable[Any]) -> tuple[CatalogIndex, ...]:
    return tuple(CatalogIndex(row.name, tuple(row.columns), row.is_primary, row.is_identity) for row in rows)


def _column(row: Any, types: Mapping[int, CatalogType]) -> CatalogColumn:
    return CatalogColumn(
        number=row.number,
        name=row.name,
        type=types[row.type],
        typmod=row.typmod,
        type_text=row.type_text,
        not_null=row.not_null,
        generated=Generated(row.generated),
        identity=row.identity,
        missing=row.missing,
        toasted=row.toasted,
    )


def _partition(row: Any, indexes: Sequence[CatalogIndex]) -> Partition:
    identity = ReplicaIdentity(row.identity)
    columns: tuple[str, ...] = ()
    if identity is ReplicaIdentity.DEFAULT:
        columns = next((index.columns for index in indexes if index.primary), ())
    elif identity is ReplicaIdentity.INDEX:
        columns = next((index.columns for index in indexes if index.identity), ())
    name = TableName(row.namespace, row.name)
    return Partition(row.oid, name, row.kind, row.persistence, identity, columns, row.access)


def _not_found(session: Connection, name: TableName) -> SourceNotFound:
    similar = session.execute(_SIMILAR, [name.name, name.namespace]).fetchone()
    step = "Name a table that exists."
    if similar:
        step = f"Did you mean {TableName(*similar)}? Names with capitals or blanks are written in double quotes."
    else:
        there = {one.name: one for one in all_table_names(session)}
        for near in difflib.get_close_matches(name.name, there, 1):
            step = f"Did you mean {there[near]}?"
    return SourceNotFound(f"The database has no table {name}.", next_step=step)

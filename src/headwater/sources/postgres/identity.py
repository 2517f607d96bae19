"""TableIdentity: what a table and its columns are to the server, whatever they are called.

It is kept with the epochs and compared with the catalog later, because Postgres logs neither a schema change nor what
it does to the rows: a schema change is announced with the next row, a rewrite never.

==============================================  =====================================================================
what differs from the identity that was kept    what it means
==============================================  =====================================================================
files **and** the version of a column,          the rows were rewritten: ``TYPE … USING``, a volatile default.
or files and a new column                       ``VACUUM FULL``, ``CLUSTER``, ``SET TABLESPACE`` touch no column
labels of an enum, fields of a composite type   the same stored value has another text
a partition, or the file of one                 rows came or went with it
==============================================  =====================================================================

Columns are numbered (``attnum``); a number is never used again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headwater.sources.postgres.catalog import PARTITION_TREE
from headwater.sources.postgres.catalog_table import CatalogTable
from headwater.sources.postgres.catalog_types import CatalogType, TypeKind
from headwater.sources.postgres.connection import Connection, ask
from headwater.sources.postgres.names import TableName
from headwater.sources.postgres.publication import Publication, sent_columns

_MOST_UNCERTAIN: Final = 10

_TABLES: Final = """
SELECT c.oid::bigint AS table, r.oid::bigint AS entry, p.oid::bigint AS publication, c.relnatts AS numbers,
       c.relfilenode::bigint AS file
FROM pg_catalog.pg_class c
LEFT JOIN pg_catalog.pg_publication p ON p.pubname = %s
LEFT JOIN pg_catalog.pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = c.oid
WHERE c.oid = ANY(%s::oid[])
"""
_COLUMNS: Final = """
SELECT a.attrelid::bigint AS table, a.attnum AS number, a.atttypid::bigint AS type, a.atttypmod AS typmod,
       a.attcollation::bigint AS collation, a.xmin::text AS version
FROM pg_catalog.pg_attribute a
WHERE a.attrelid = ANY(%s::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
"""
# Attaching a table changes all its columns; one that was made as a partition has columns as old as itself.
# What is attached may come with rows that the log does not tell. A TRUNCATE leaves no estimate of rows (-1, and 0
# before 14) until the next ANALYZE or VACUUM, which the statistics count.
_LEAVES: Final = f"""
{PARTITION_TREE}
SELECT w.root::bigint AS table, c.oid::bigint AS leaf, n.nspname AS namespace, c.relname AS name,
       c.relfilenode::bigint AS file,
       c.xmin::text::bigint AS xid,
       NOT EXISTS (SELECT FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_attribute s USING (attrelid)
                   WHERE a.attrelid = c.oid AND a.attnum > 0 AND s.attname = 'tableoid' AND s.attnum < 0
                     AND a.xmin::text = s.xmin::text AND a.cmin::text = s.cmin::text) AS attached,
       c.reltuples <= 0 AS emptied,
       pg_catalog.pg_stat_get_analyze_count(c.oid) + pg_catalog.pg_stat_get_autoanalyze_count(c.oid)
         + pg_catalog.pg_stat_get_vacuum_count(c.oid) + pg_catalog.pg_stat_get_autovacuum_count(c.oid) AS counted
FROM tree w
JOIN pg_catalog.pg_class c ON c.oid = w.relid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind <> 'p' AND c.oid <> w.root
"""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A partition that holds rows.

    :ivar attached: it was a table before. :ivar xid: of the transaction that changed its entry last.
    :ivar emptied: nothing was counted in it since its file is new. :ivar counted: how often its rows were counted.
    """

    name: str
    file: int | None
    attached: bool
    xid: int
    emptied: bool = True
    counted: int = 0


@dataclass(frozen=True, slots=True)
class TableIdentity:
    """A table in the catalog.

    :ivar publication: the oid of our publication. :ivar entry: … and of the table's entry in it.
    :ivar numbers: how many columns it ever had; ``None`` where an earlier version kept the identity.
    :ivar columns: by number: type, typmod, collation, the version of its entry, and what its type is composed of.
    """

    publication: int | None
    entry: int | None
    leaves: Mapping[int, Leaf]
    numbers: int | None = None
    file: int | None = None
    columns: Mapping[int, Sequence[Any]] | None = None

    def to_text(self) -> str:
        leaves = {
            str(oid): [leaf.name, leaf.file, leaf.attached, leaf.xid, leaf.emptied, leaf.counted]
            for oid, leaf in self.leaves.items()
        }
        columns = None if self.columns is None else {str(number): list(one) for number, one in self.columns.items()}
        value = {"publication": self.publication, "entry": self.entry, "leaves": leaves}
        value |= {"numbers": self.numbers, "file": self.file, "columns": columns}
        return json.dumps(value, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> TableIdentity:
        value = json.loads(text)
        columns = value.get("columns")
        return cls(
            value["publication"],
            value["entry"],
            {int(oid): Leaf(*leaf) for oid, leaf in value["leaves"].items()},
            value.get("numbers"),
            value.get("file"),
            None if columns is None else {int(number): one for number, one in columns.items()},
        )

    def rewritten(self, now: TableIdentity) -> str | None:
        """Why the stored rows are not what they were; ``None``: they are."""
        if self.columns is None or now.columns is None:
            return None
        both = [(one, now.columns[number]) for number, one in self.columns.items() if number in now.columns]
        if any(
            before[0] == after[0] and before[4] is not None and _reworded(before[4], after[4]) for before, after in both
        ):
            return "the labels of an enum, or the fields of a composite type, changed."
        moved = self.file != now.file or any(
            leaf.file != now.leaves[oid].file for oid, leaf in self.leaves.items() if oid in now.leaves
        )
        if any(number <= (self.numbers or 0) for number in now.columns.keys() - self.columns.keys()):
            return "the publication sends a column that it did not send before."
        changed = any(before[:4] != after[:4] for before, after in both)
        if moved and (changed or now.columns.keys() - self.columns.keys()):
            return "its rows were rewritten with changed or added columns."
        return None


def _reworded(before: Any, after: Any) -> bool:
    """Whether a value of a type that was composed as *before* has another text now; new labels change none."""
    if isinstance(before, dict) and isinstance(after, dict):
        return any(after.get(number) != label for number, label in before.items())
    return bool(before != after)


def read_identities(
    session: Connection, publication: Publication | None, tables: Sequence[CatalogTable]
) -> dict[int, TableIdentity]:
    """The identities of *tables*, by oid, with the columns that *publication* sends, or would send.

    Read all three in :func:`~headwater.sources.postgres.catalog.one_view`: the catalog may change in between.
    """
    oids = [table.oid for table in tables]
    types = {
        (table.oid, column.number): column.type
        for table in tables
        for column in sent_columns(table, publication, session.info.server_version)
    }
    columns: dict[int, dict[int, Sequence[Any]]] = {oid: {} for oid in oids}
    for row in ask(session, _COLUMNS, [oids]):
        if (row.table, row.number) in types:
            composed = _composed(types[row.table, row.number])
            columns[row.table][row.number] = [row.type, row.typmod, row.collation, row.version, composed]
    leaves: dict[int, dict[int, Leaf]] = {oid: {} for oid in oids}
    for row in ask(session, _LEAVES, [[table.oid for table in tables if table.is_partitioned]]):
        name = str(TableName(row.namespace, row.name))
        leaves[row.table][row.leaf] = Leaf(name, row.file, row.attached, row.xid, row.emptied, row.counted)
    return {
        row.table: TableIdentity(
            row.publication, row.entry, leaves[row.table], row.numbers, row.file, columns[row.table]
        )
        for row in ask(session, _TABLES, ["" if publication is None else publication.name, oids])
    }


def _composed(kind: CatalogType) -> Any:
    """What the text of a value depends on beside its bytes: labels by their oid, fields by their number."""
    if kind.kind is TypeKind.ENUM:
        return {str(number): label for number, label in zip(kind.label_numbers, kind.labels, strict=True)}
    if kind.kind is TypeKind.COMPOSITE:
        parts = [(part.oid, typmod, _composed(part)) for _, part, typmod in kind.fields]
        return [[number, *part] for number, part in zip(kind.field_numbers, parts, strict=True)]
    part = kind.element or kind.base or kind.subtype
    return None if part is None else _composed(part)


def column_numbers(count: int, before: Sequence[int], numbers: int, now: TableIdentity) -> list[int] | None:
    """The numbers of the *count* columns that a message of the log names, in its order; ``None`` where several fit.

    The message is from a moment between the one when the table had the columns *before*, of *numbers* that it ever had,
    and *now*. It has its columns in the order of their numbers, so only their count matters, whatever they were called
    meanwhile.
    """
    live = now.columns or {}
    later = range(numbers + 1, (now.numbers or 0) + 1)
    optional = [number for number in (*before, *later) if number not in live]
    certain = [number for number in later if number in live]
    if len(optional) > _MOST_UNCERTAIN:
        return None
    fitting = set()
    for end in range(len(certain) + 1):
        base = {*(number for number in before if number in live), *certain[:end]}
        following = certain[end] if end < len(certain) else now.numbers or 0
        maybe = [number for number in optional if number <= following]
        missing = count - len(base)
        if 0 <= missing <= len(maybe):
            fitting |= {tuple(sorted(base.union(chosen))) for chosen in itertools.combinations(maybe, missing)}
    return list(fitting.pop()) if len(fitting) == 1 else None

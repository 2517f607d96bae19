"""Relation messages as tables: names and types from the message, what types are made of from the catalog.

The message tells the table as it was when its rows were written; the catalog tells it as it is now. A column's field id
(``attnum``) is in the catalog alone, so it is looked up by name; while the table has the names that were captured, they
are the captured columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import pyarrow as pa

from headwater.sources.errors import SchemaStopped, SourceNotFound
from headwater.sources.postgres import pgoutput
from headwater.sources.postgres.catalog import read_tables_by_oid
from headwater.sources.postgres.catalog_table import CatalogTable
from headwater.sources.postgres.catalog_types import CatalogType, read_types
from headwater.sources.postgres.connection import Connection, ask
from headwater.sources.postgres.convert import convert_column, convert_columns
from headwater.sources.postgres.toast import Shards, no_shards
from headwater.sources.postgres.types import has_special_values, source_column
from headwater.sources.special_values import with_policy
from headwater.sources.table import SourceColumn, SourceTable, SpecialValues

_FULL: Final = "f"
_TYPE_TEXTS: Final = """
SELECT w.type, w.typmod, pg_catalog.format_type(w.type::oid, w.typmod) AS text
FROM ROWS FROM (unnest(%s::bigint[]), unnest(%s::int[])) w (type, typmod)
"""


@dataclass(frozen=True, slots=True)
class DescribedTable:
    """A table as a Relation message describes it.

    :ivar defaults: one row: for each column that has one, the value that rows from before the column have there.
    """

    table: SourceTable
    defaults: pa.RecordBatch

    def convert(self, columns: Sequence[pa.StringArray]) -> list[pa.Array]:
        """Typed columns; see :func:`~headwater.sources.postgres.convert.convert_columns`."""
        return convert_columns(self.table, columns)


class Relations:
    """What the server's catalog knows beyond Relation messages.

    :param sql: gives the session for SQL.
    :param special_values: policies by ``schema.table.column`` or ``schema.table``.
    :param shards: where the rows of a table are.
    """

    def __init__(
        self,
        sql: Callable[[], AbstractContextManager[Connection]],
        special_values: Mapping[str, SpecialValues],
        shards: Shards = no_shards,
    ) -> None:
        self.sql = sql
        self.shards = shards
        self._special = special_values
        self._types: dict[int, CatalogType] = {}
        self._texts: dict[tuple[int, int], str] = {}

    def describe(self, relation: pgoutput.Relation, known: SourceTable) -> DescribedTable:
        """The table that *relation* tells of; *known* is the captured one.

        :raises SchemaStopped: a type of it was dropped since. :raises UnsupportedTable: it has no key any more.
        """
        with self.sql() as session:
            try:
                self._learn(session, relation)
            except SourceNotFound:
                name = known.full_name
                raise SchemaStopped(
                    name, "the type of one of its columns was dropped.", next_step=f"Run: headwater resnapshot {name}"
                ) from None
            catalog = read_tables_by_oid(session, [relation.oid]).get(relation.oid)
        ids = _field_ids(relation, known, catalog)
        key = _key(relation, known, ids)
        policies = {column.field_id: column.special_values for column in known.columns}

        def described(column: pgoutput.RelationColumn) -> SourceColumn:
            make = partial(
                source_column,
                column.name,
                self._types[column.type_oid],
                column.typmod,
                self._texts[column.type_oid, column.typmod],
                ids[column.name],
                nullable=column.name not in key or relation.replica_identity == _FULL,
            )
            before = policies.get(ids[column.name])
            return with_policy(self._special, known.full_name, column.name, make, has_special_values, before)

        columns = tuple(described(column) for column in relation.columns)
        table = SourceTable(known.namespace, known.name, columns, key, relation.oid)
        return DescribedTable(table, defaults_of(table, catalog))

    def _learn(self, session: Connection, relation: pgoutput.Relation) -> None:
        new = {column.type_oid for column in relation.columns} - self._types.keys()
        if new:
            self._types |= read_types(session, new)
        texts = {(column.type_oid, column.typmod) for column in relation.columns} - self._texts.keys()
        if texts:
            types, typmods = zip(*sorted(texts), strict=True)
            for row in ask(session, _TYPE_TEXTS, [list(types), list(typmods)]):
                self._texts[row.type, row.typmod] = row.text


def _field_ids(relation: pgoutput.Relation, known: SourceTable, catalog: CatalogTable | None) -> dict[str, int]:
    """Field ids by name. A column that the catalog has no longer gets one that no other has."""
    captured = {column.name: column.field_id for column in known.columns if not column.dropped}
    names = [column.name for column in relation.columns]
    if captured.keys() == set(names):
        return captured
    current = {} if catalog is None else {column.name: column.number for column in catalog.columns}
    ids: dict[str, int] = {}
    for place, name in enumerate(names):
        found = current.get(name, captured.get(name))
        ids[name] = -(place + 1) if found is None or found in ids.values() else found
    return ids


def _key(relation: pgoutput.Relation, known: SourceTable, ids: Mapping[str, int]) -> tuple[str, ...]:
    """The captured key by its present names, where it is the same; else what the message says."""
    names = {field_id: name for name, field_id in ids.items()}
    captured = [names.get(known.column(name).field_id) for name in known.key_columns]
    told = [column.name for column in relation.columns if column.is_key]
    if None not in captured and (relation.replica_identity == _FULL or set(captured) == set(told)):
        return tuple(name for name in captured if name is not None)
    return tuple(told)


def defaults_of(table: SourceTable, catalog: CatalogTable | None) -> pa.RecordBatch:
    """One row: for each column that has one, the value that rows from before the column have there."""
    texts = {} if catalog is None else {column.number: column.missing for column in catalog.columns}
    found = [column for column in table.columns if texts.get(column.field_id) is not None]
    # a default that would park every row of before stops the table
    plain = [replace(one, special_values=SpecialValues.STOP) if one in table.parking else one for one in found]
    values = [convert_column(table, column, pa.array([texts[column.field_id]], pa.string())) for column in plain]
    return pa.RecordBatch.from_arrays(values, schema=pa.schema([column.field for column in found]))

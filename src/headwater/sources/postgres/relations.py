"""Relation messages as tables: names and types from the message, what types are made of from the catalog.

The message tells the table as it was when its rows were written; the catalog tells it as it is now. A column's field id
(``attnum``) is in the catalog alone. The message has its columns in the order of their numbers, which is how they are
matched: a name may mean another column than before. Where that leaves a doubt, the table is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import pyarrow as pa

from headwater.sources.errors import RereadNeeded, SourceNotFound
from headwater.sources.postgres import pgoutput
from headwater.sources.postgres.catalog import one_view, read_tables_by_oid
from headwater.sources.postgres.catalog_table import CatalogTable
from headwater.sources.postgres.catalog_types import CatalogType, read_types
from headwater.sources.postgres.connection import Connection, ask
from headwater.sources.postgres.convert import convert_column, convert_columns
from headwater.sources.postgres.identity import TableIdentity, column_numbers, read_identities
from headwater.sources.postgres.publication import Publication
from headwater.sources.postgres.toast import Shards, no_shards
from headwater.sources.postgres.types import has_special_values, source_column
from headwater.sources.postgres.visibility import await_visible
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
    :param publication: that the messages come by, as it was last seen: to look at it opens every table.
    :param identities: of the captured tables, by oid, as they were kept; columns of others are matched by name.
    :param shards: where the rows of a table are.
    :param keep_alive: called while it waits.
    """

    def __init__(
        self,
        sql: Callable[[], AbstractContextManager[Connection]],
        special_values: Mapping[str, SpecialValues],
        publication: Callable[[], Publication | None],
        identities: Mapping[int, TableIdentity] | None = None,
        shards: Shards = no_shards,
        keep_alive: Callable[[], None] = lambda: None,
    ) -> None:
        self.sql = sql
        self._keep_alive = keep_alive
        self.shards = shards
        self._publication = publication
        self._identities = {} if identities is None else identities
        self._columns: dict[int, tuple[Sequence[int], int]] = {}
        self._special = special_values
        self._types: dict[int, CatalogType] = {}
        self._texts: dict[tuple[int, int], str] = {}

    def describe(
        self, relation: pgoutput.Relation, known: SourceTable, *, xid: int | None = None, is_old: bool = False
    ) -> DescribedTable:
        """The table that *relation* tells of; *known* is the captured one.

        :param xid: of the transaction of *relation*, which may have changed the table: it is waited for.
        :param is_old: the message may be from before *known* was described.
        :raises SourceBusy: the transaction is in the log and not visible yet.
        :raises RereadNeeded: its rows were rewritten since, a type of it was dropped, or its columns are uncertain.
        :raises UnsupportedTable: it has no key any more.
        """
        kept = None if is_old else self._identities.get(relation.oid)
        with self.sql() as session:
            if xid is not None:
                await_visible(session, [xid], self._keep_alive)
            try:
                self._learn(session, relation)
            except SourceNotFound:
                raise RereadNeeded(known.full_name, "the type of one of its columns was dropped.") from None
            now = None
            with one_view(session):
                catalog = read_tables_by_oid(session, [relation.oid]).get(relation.oid)
                if catalog is not None and kept is not None and kept.columns is not None:
                    now = read_identities(session, self._publication(), [catalog])[relation.oid]
        if now is not None and kept is not None and not _has_types(relation, kept):
            reason = kept.rewritten(now)
            if reason is not None:
                raise RereadNeeded(known.full_name, reason)
        ids = self._matched(relation, known, kept, now) or _field_ids(relation, known, catalog)
        key = _key(relation, known, ids)
        if not key and catalog is not None:
            catalog.require_identity()
            raise RereadNeeded(known.full_name, "it had no key for a while, and has one again.")
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

    def seen(self, oid: int, identity: TableIdentity) -> None:
        """Messages that follow are from after the moment of *identity*."""
        self._columns[oid] = list(identity.columns or ()), identity.numbers or 0

    def _matched(
        self, relation: pgoutput.Relation, known: SourceTable, kept: TableIdentity | None, now: TableIdentity | None
    ) -> dict[str, int] | None:
        """Field ids by name, from the numbers of the columns; ``None`` where none were kept.

        :raises RereadNeeded: columns were added and dropped, and the message may be from before or after that.
        """
        if kept is None or kept.columns is None or now is None or now.columns is None:
            return None
        before, count = self._columns.get(relation.oid, (list(kept.columns), kept.numbers or 0))
        numbers = column_numbers(len(relation.columns), before, count, now)
        if numbers is None:
            what = "the publication sends other columns, or several were added and dropped at once."
            raise RereadNeeded(known.full_name, what)
        is_newest = sorted(now.columns) == numbers
        self._columns[relation.oid] = numbers, now.numbers or 0 if is_newest else max(count, *numbers)
        return {column.name: number for column, number in zip(relation.columns, numbers, strict=True)}

    def _learn(self, session: Connection, relation: pgoutput.Relation) -> None:
        new = {column.type_oid for column in relation.columns} - self._types.keys()
        if new:
            self._types |= read_types(session, new)
        texts = {(column.type_oid, column.typmod) for column in relation.columns} - self._texts.keys()
        if texts:
            types, typmods = zip(*sorted(texts), strict=True)
            for row in ask(session, _TYPE_TEXTS, [list(types), list(typmods)]):
                self._texts[row.type, row.typmod] = row.text


def _has_types(relation: pgoutput.Relation, kept: TableIdentity) -> bool:
    """Whether the message has the types that were kept: nothing was rewritten before it, as far as it tells."""
    types = [tuple(column[:2]) for _, column in sorted((kept.columns or {}).items())]
    return types == [(column.type_oid, column.typmod) for column in relation.columns]


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

"""SqlServerKeyOrder: where keys lie between cuts, in the order that the database has.

Whole numbers and decimals are compared here. The order of texts is that of their collation, that of a
``uniqueidentifier`` and of bytes the server's own: it ranks the distinct values of a batch, together with those of the
cuts, in one statement per column.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.sources.errors import InvalidKey
from headwater.sources.key_places import Digits, key_places, numbers
from headwater.sources.splits import Cut
from headwater.sources.sqlserver.catalog import read_table
from headwater.sources.sqlserver.connection import Dsn, Session
from headwater.sources.sqlserver.key_columns import DECIMALS, INTEGERS, KeyColumn, read_key
from headwater.sources.sqlserver.names import TableName, literal
from headwater.sources.sqlserver.sessions import with_session
from headwater.sources.sqlserver.values import texts_of
from headwater.sources.table import SourceTable

_T = TypeVar("_T")


class SqlServerKeyOrder:
    """The order of one table's keys. It can be pickled."""

    def __init__(self, dsn: Dsn, table: SourceTable, key: Sequence[KeyColumn]) -> None:
        self._dsn, self._table, self._key = dsn, table, tuple(key)

    def places(self, keys: pa.RecordBatch, cuts: Sequence[Cut]) -> NDArray[np.int64]:
        """For each row of key columns, in key order: how many of the ascending *cuts* lie before it.

        :raises SourceUnreachable: the database had to be asked and did not answer.
        """
        return key_places(keys, cuts, self._digits)

    def _digits(self, place: int, keys: pa.Array, texts: list[str]) -> Digits:
        column = self._key[place]
        if keys.null_count:
            raise InvalidKey(self._table.full_name, column.name, column.type_text, "a key is null.")
        if column.kind.name in INTEGERS:
            of_keys = keys.cast(pa.int64()).to_numpy(zero_copy_only=False)
            return [(of_keys, np.array([int(text) for text in texts], np.int64))]
        if column.kind.name in DECIMALS and pa.types.is_decimal(keys.type):
            cuts = pa.array([Decimal(text) for text in texts], keys.type)
            return list(zip(numbers(keys), numbers(cuts), strict=True))
        return [self._ranked_by_server(column, texts_of(keys), pa.array(texts, pa.string()))]

    def _ranked_by_server(
        self, column: KeyColumn, keys: pa.StringArray, cuts: pa.StringArray
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        distinct = pc.unique(pa.concat_arrays([keys, cuts]))
        ranks = pa.array(with_session(self._dsn, lambda session: _rank(session, column, distinct)))
        of_keys, of_cuts = (ranks.take(pc.index_in(values, distinct)).to_numpy() for values in (keys, cuts))
        return of_keys, of_cuts


def read_order(dsn: Dsn, table: SourceTable) -> SqlServerKeyOrder:
    """The order of the keys of *table*. :raises SourceNotFound: there is no such table."""
    name = TableName(table.namespace, table.name)
    key = with_session(dsn, lambda session: read_key(read_table(session, name), table))
    return SqlServerKeyOrder(dsn, table, key)


def _rank(session: Session, column: KeyColumn, values: pa.StringArray) -> NDArray[np.int64]:
    """The place of each value among them all, equal ones the same."""
    sent = literal(json.dumps(values.to_pylist(), ensure_ascii=False))
    rows = session.ask(
        f"SELECT CONVERT(int, j.[key]) AS n, DENSE_RANK() OVER (ORDER BY {column.typed('j.[value]')}) AS place"
        f" FROM OPENJSON({sent}) AS j"
    )
    found = np.zeros(len(values), np.int64)
    for row in rows:
        found[int(row["n"])] = int(row["place"])
    return found

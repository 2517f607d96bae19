"""Affected keys: which values of the ``by`` columns some changes touch, and the rows of a table that have them. Pure.

A row that moves from one value to another touches both: the old image and the new one count. Null is a value. Values
are compared by value, not by hash, so that no row of another key is ever among the rows of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from headwater.derive.errors import InvalidDerivation
from headwater.sinks.keys import KeySet


class AffectedKeys:
    """Distinct values of the ``by`` columns, which have one name in each table of the derivation, or one each.

    :param types: of the columns, in order.
    """

    def __init__(self, types: Sequence[pa.DataType]) -> None:
        self._names = [str(place) for place in range(len(types))]
        self._schema = pa.schema(list(zip(self._names, types, strict=True)))
        self._keys: pa.Table = self._schema.empty_table()

    @property
    def count(self) -> int:
        return int(self._keys.num_rows)

    @property
    def keys(self) -> pa.Table:
        """One row for each; the columns are called ``0``, ``1`` …"""
        return self._keys

    def add(self, batches: Iterable[pa.RecordBatch], by: Sequence[str], *, most: int | None = None) -> None:
        """The values of all rows of *batches*, in the columns *by*.

        :param most: above so many keys nothing more is added: what is there is not all.
        """
        for batch in batches:
            if not batch.num_rows:
                continue
            found = pa.Table.from_arrays([batch.column(name) for name in by], self._names).cast(self._schema)
            self._keys = pa.concat_tables([self._keys, found]).group_by(self._names).aggregate([]).combine_chunks()
            if most is not None and self.count > most:
                return


class KeyFilter:
    """Leaves the rows that have one of *keys* (:attr:`AffectedKeys.keys`) in the columns *by*."""

    def __init__(self, keys: pa.Table, by: Sequence[str]) -> None:
        self._by = list(by)
        self._set = KeySet(keys.rename_columns(self._by), self._by) if keys.num_rows else None

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._set is None:
            return batch.slice(0, 0)
        found = self._set.find(batch) >= 0
        return batch if found.all() else batch.filter(pa.array(found))


def key_types(name: str, tables: Iterable[tuple[str, Sequence[tuple[str, pa.DataType]]]]) -> list[pa.DataType]:
    """The types that the ``by`` columns of all tables have in common: those of the widest.

    :param name: of the derivation. :param tables: of each, its name, and its ``by`` columns with their types.
    :raises InvalidDerivation: columns that cannot be compared.
    """
    common: list[pa.DataType] | None = None
    for table, columns in tables:
        nested = next((column for column, kind in columns if pt.is_nested(kind)), None)
        if nested is not None:
            raise InvalidDerivation(
                f"Derivation {name!r} goes by {nested!r} of {table}, which is no single value.",
                next_step="Name columns of numbers, texts, dates or times in by.",
            )
        types = [kind for _, kind in columns]
        common = types if common is None else [_wider(name, table, *pair) for pair in zip(common, types, strict=True)]
    return common or []


def _wider(name: str, table: str, one: pa.DataType, other: pa.DataType) -> Any:
    if one == other:
        return one
    try:
        fields = [pa.schema([("v", kind)]) for kind in (one, other)]
        return pa.unify_schemas(fields, promote_options="permissive").field("v").type
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
        raise InvalidDerivation(
            f"Derivation {name!r} goes by columns of other types in its tables: {one}, and {other} in {table}.",
            next_step="Name columns in by that have the same values in all tables.",
        ) from None

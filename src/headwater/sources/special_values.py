"""Special values: which policy a column has, and which rows are told before a value that stops a table. Pure.

Policies are named by ``schema.table.column`` or, for all columns, by ``schema.table``; that of a column wins. The
policies ``text`` and ``park`` of a table are for those of its columns whose type has special values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from headwater.sources.errors import RefusedValue, SchemaStopped
from headwater.sources.table import SourceColumn, SourceTable, SpecialValues


def with_policy(
    policies: Mapping[str, SpecialValues],
    table: str,
    column: str,
    make: Callable[..., SourceColumn],
    has_special: Callable[[pa.DataType], bool],
    before: SpecialValues | None = None,
) -> SourceColumn:
    """The column that *make* describes under the policy that it has.

    :param has_special: whether a type has special values. :param before: the policy of a column that is captured: it
        stays, as rows of the log were told by it, until its table is captured anew.
    """
    if before is not None:
        return make(special_values=before)
    own = policies.get(f"{table}.{column}")
    policy = own or policies.get(table) or SpecialValues.STOP
    if own is None and table in policies and policy in (SpecialValues.TEXT, SpecialValues.PARK):
        plain = make(special_values=SpecialValues.STOP)
        if not has_special(plain.type):
            return plain
    return make(special_values=policy)


def as_policy(table: SourceTable, policy: SpecialValues) -> SourceTable:
    """*table*, its columns that park as if they had *policy*."""
    kinds = {"type": pa.string()} if policy is SpecialValues.TEXT else {}
    columns = tuple(
        replace(one, special_values=policy, **kinds) if one in table.parking else one for one in table.columns
    )
    return replace(table, columns=columns)


def told_before(ends: Sequence[int], convert: Callable[[int], object]) -> int:
    """The last of *ends*, in order, up to which all rows can be told; *convert* raises where they cannot."""

    def fails(end: int) -> bool:
        try:
            if end:
                convert(end)
        except (RefusedValue, SchemaStopped):
            return True
        return False

    return ends[bisect_left(ends, True, key=fails) - 1]

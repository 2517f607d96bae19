"""Capture instances: what change data capture keeps of a table, and from where on.

A table has at most two of them. Each has the columns that it was made with, so a column that comes later is told by an
instance that was made after it. The newer one tells every commit from its first number on: there and only there the
older one is left. Columns have the types that they have in the change table, which follow those of the source table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from headwater.sources.sqlserver.connection import Session
from headwater.sources.sqlserver.lsn import Lsn
from headwater.sources.sqlserver.names import literal, quoted
from headwater.sources.sqlserver.types import SqlType

_INSTANCES: Final = """
SELECT i.capture_instance AS instance, i.source_object_id AS id, i.start_lsn AS start_lsn,
       sys.fn_cdc_get_min_lsn(i.capture_instance) AS min_lsn, k.column_name AS column_name, k.column_id AS column_id,
       k.is_computed AS computed, COALESCE(b.name, y.name) AS type_name, c.max_length AS max_length,
       c.precision AS digits, c.scale AS scale
FROM cdc.change_tables AS i JOIN cdc.captured_columns AS k ON k.object_id = i.object_id
JOIN sys.columns AS c ON c.object_id = i.object_id AND c.name = k.column_name
JOIN sys.types AS y ON y.user_type_id = c.user_type_id LEFT JOIN sys.types AS b ON b.user_type_id = y.system_type_id
WHERE i.source_object_id IN ({ids}) ORDER BY i.source_object_id, i.start_lsn, i.capture_instance, k.column_ordinal
"""
_CAME: Final = """
SELECT MIN(h.ddl_lsn) AS ddl_lsn FROM cdc.ddl_history AS h JOIN cdc.change_tables AS i ON i.object_id = h.object_id
WHERE i.capture_instance = {instance} AND h.ddl_command LIKE N'%ADD%'
"""


@dataclass(frozen=True, slots=True)
class CapturedColumn:
    """A column of an instance. :ivar number: its ``column_id`` in the source table."""

    number: int
    name: str
    type: SqlType
    computed: bool


@dataclass(frozen=True, slots=True)
class CaptureInstance:
    """One instance.

    :ivar start: from here on every commit is told that was not removed by the cleanup job, which moves it.
    """

    name: str
    table_id: int
    start: Lsn
    columns: tuple[CapturedColumn, ...]

    @property
    def function(self) -> str:
        """What gives its changes between two numbers."""
        return f"cdc.{quoted(f'fn_cdc_get_all_changes_{self.name}')}"


def read_instances(session: Session, ids: Sequence[int]) -> dict[int, list[CaptureInstance]]:
    """The instances of tables by their ids, the older first."""
    if not ids:
        return {}
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in session.ask(_INSTANCES.format(ids=", ".join(str(one) for one in ids))):
        found.setdefault((int(row["id"]), row["instance"]), []).append(row)
    made: dict[int, list[CaptureInstance]] = {}
    for (table_id, name), rows in found.items():
        start = Lsn.parse(rows[0]["start_lsn"])
        if rows[0]["min_lsn"] is not None:
            start = max(start, Lsn.parse(rows[0]["min_lsn"]))
        columns = tuple(
            CapturedColumn(
                int(row["column_id"]),
                row["column_name"],
                SqlType.of_catalog(row["type_name"], int(row["max_length"]), int(row["digits"]), int(row["scale"])),
                bool(row["computed"]),
            )
            for row in rows
        )
        made.setdefault(table_id, []).append(CaptureInstance(name, table_id, start, columns))
    for instances in made.values():
        instances.sort(key=lambda instance: (instance.start, instance.name))
    return made


def column_came(session: Session, instance: CaptureInstance) -> Lsn | None:
    """Where the first statement is that added something to the table since *instance* was made, if there was one."""
    (row,) = session.ask(_CAME.format(instance=literal(instance.name)))
    return None if row["ddl_lsn"] is None else Lsn.parse(row["ddl_lsn"])


def has_changes(session: Session, instance: CaptureInstance, first: Lsn, last: Lsn) -> bool:
    """Whether *instance* tells changes from *first* to *last*."""
    if first > last:
        return False
    begin = max(first, instance.start)
    return bool(
        session.ask(f"SELECT TOP (1) [__$operation] FROM {instance.function}({begin.hex}, {last.hex}, N'all')")
        if begin <= last
        else [1]  # what was removed may have been some
    )

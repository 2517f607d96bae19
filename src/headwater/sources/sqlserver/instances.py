"""Capture instances: what change data capture keeps of a table, and from where on.

A table has at most two of them. Each has the columns that it was made with, so a column that comes later is told by an
instance that was made after it. The newer one tells every commit from its first number on: there and only there the
older one is left. Columns have the types that they have in the change table, which follow those of the source table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headwater.sources.errors import AccessDenied, SourceBusy
from headwater.sources.sqlserver.connection import Session
from headwater.sources.sqlserver.names import literal, quoted
from headwater.sources.sqlserver.offset import Lsn
from headwater.sources.sqlserver.types import SqlType

_INSTANCES: Final = """
SELECT i.capture_instance AS instance, i.source_object_id AS id, i.start_lsn AS start_lsn,
       sys.fn_cdc_get_min_lsn(i.capture_instance) AS min_lsn, k.column_name AS column_name, k.column_id AS column_id,
       k.is_computed AS computed, COALESCE(b.name, y.name) AS type_name, c.max_length AS max_length,
       c.precision AS digits, c.scale AS scale, i.object_id AS change_id, i.role_name AS role_name,
       COALESCE(OBJECT_NAME(i.object_id), i.capture_instance + N'_CT') AS change_table,
       COL_LENGTH(N'cdc.' + QUOTENAME(OBJECT_NAME(i.object_id)), N'__$command_id') AS command_size
FROM cdc.change_tables AS i JOIN cdc.captured_columns AS k ON k.object_id = i.object_id
JOIN sys.columns AS c ON c.object_id = i.object_id AND c.name = k.column_name
JOIN sys.types AS y ON y.user_type_id = c.user_type_id LEFT JOIN sys.types AS b ON b.user_type_id = y.system_type_id
WHERE i.source_object_id IN ({ids}) ORDER BY i.source_object_id, i.create_date, i.object_id, k.column_ordinal
"""
_CAME: Final = """
SELECT h.ddl_lsn AS ddl_lsn, h.ddl_command AS ddl_command
FROM cdc.ddl_history AS h JOIN cdc.change_tables AS i ON i.object_id = h.object_id
WHERE i.capture_instance = {instance} AND h.ddl_lsn < {before} ORDER BY h.ddl_lsn
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
    :ivar change_id: the number of the change table: another one where the instance was made anew under its name.
    :ivar has_commands: the change table has the order of the statements' parts, which older ones lack.
    """

    name: str
    table_id: int
    start: Lsn
    columns: tuple[CapturedColumn, ...]
    change_table: str = ""
    change_id: int = 0
    has_commands: bool = True

    def between(self, first: Lsn, last: Lsn) -> str:
        """Its rows of the commits from *first* to *last*, for a statement.

        The change table itself: the server's function does not give the order of the parts of a statement.
        """
        return f"cdc.{quoted(self.change_table)} WHERE [__$start_lsn] BETWEEN {first.hex} AND {last.hex}"


def read_instances(session: Session, ids: Sequence[int]) -> dict[int, list[CaptureInstance]]:
    """The instances of tables by their ids, the older first: as they were made, since the cleanup job moves starts.

    :raises SourceBusy: one is being made. :raises AccessDenied: the user may not read one.
    """
    if not ids:
        return {}
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in session.ask(_INSTANCES.format(ids=", ".join(str(one) for one in ids))):
        found.setdefault((int(row["id"]), row["instance"]), []).append(row)
    made: dict[int, list[CaptureInstance]] = {}
    for (table_id, name), rows in found.items():
        start = _start_of(session, rows[0])
        columns = tuple(
            CapturedColumn(
                int(row["column_id"]),
                row["column_name"],
                SqlType.of_catalog(row["type_name"], int(row["max_length"]), int(row["digits"]), int(row["scale"])),
                bool(row["computed"]),
            )
            for row in rows
        )
        made.setdefault(table_id, []).append(
            CaptureInstance(
                name,
                table_id,
                start,
                columns,
                str(rows[0]["change_table"]),
                int(rows[0]["change_id"]),
                rows[0]["command_size"] is not None,
            )
        )
    return made


def _start_of(session: Session, row: Mapping[str, Any]) -> Lsn:
    if row["start_lsn"] is None:
        raise SourceBusy(
            f"{session.dsn}: the capture instance {row['instance']} is being made: it has no first number yet.",
            next_step=f"Try again; look whether the capture job runs: headwater doctor {session.dsn}",
        )
    start = Lsn.parse(row["start_lsn"])
    if row["min_lsn"] is None:
        return start
    least = Lsn.parse(row["min_lsn"])
    if not least:
        step = f"GRANT SELECT ON SCHEMA::cdc TO {quoted(session.dsn.user)};"
        if row["role_name"]:
            step = f"ALTER ROLE {quoted(str(row['role_name']))} ADD MEMBER {quoted(session.dsn.user)};"
        raise AccessDenied(
            f"{session.dsn}: the user {session.dsn.user!r} may not read the capture instance {row['instance']}.",
            next_step=f"Run: {step}",
        )
    return max(start, least)


def column_came(session: Session, instance: CaptureInstance, names: Sequence[str], before: Lsn) -> Lsn | None:
    """Where the first statement before *before* is that added one of the columns *names*, if there was one."""
    for row in session.ask(_CAME.format(instance=literal(instance.name), before=before.hex)):
        if adds_column(str(row["ddl_command"]), names):
            return Lsn.parse(row["ddl_lsn"])
    return None


def adds_column(statement: str, names: Sequence[str]) -> bool:
    """Whether *statement* adds something, and names one of *names*. Pure.

    >>> adds_column("alter table t add [Rate] int", ["rate"]), adds_column("ALTER TABLE address DROP COLUMN n", ["n"])
    (True, False)
    """
    added = re.search(r"\badd\b(.*)", statement, re.IGNORECASE | re.DOTALL)
    if added is None:
        return False
    return any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", added[1], re.IGNORECASE) for name in names)


def has_changes(session: Session, instance: CaptureInstance, first: Lsn, last: Lsn) -> bool:
    """Whether *instance* tells changes from *first* to *last*."""
    if first > last:
        return False
    begin = max(first, instance.start)
    return bool(
        session.ask(f"SELECT TOP (1) [__$operation] FROM {instance.between(begin, last)}")
        if begin <= last
        else [1]  # what was removed may have been some
    )

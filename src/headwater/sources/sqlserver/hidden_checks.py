"""What the doctor looks at for rows and values that the user does not see as they are: masks, policies, partitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from headwater.sources.diagnosis import Finding, Level
from headwater.sources.errors import SourceError
from headwater.sources.sqlserver.catalog import CatalogTable
from headwater.sources.sqlserver.connection import Session
from headwater.sources.sqlserver.followed import disable_table, enable_table
from headwater.sources.sqlserver.names import quoted

_MASKED: Final = """
SELECT c.object_id AS id, c.name AS column_name, HAS_PERMS_BY_NAME(DB_NAME(), 'DATABASE', 'UNMASK') AS unmasks
FROM sys.masked_columns AS c WHERE c.is_masked = 1 AND c.object_id IN ({ids}) ORDER BY c.object_id, c.column_id
"""
_POLICIES: Final = """
SELECT p.target_object_id AS id, s.name AS policy
FROM sys.security_predicates AS p JOIN sys.security_policies AS s ON s.object_id = p.object_id
WHERE s.is_enabled = 1 AND p.predicate_type = 0 AND p.target_object_id IN ({ids}) ORDER BY p.target_object_id, s.name
"""
_SWITCHED: Final = """
SELECT i.source_object_id AS id, i.capture_instance AS instance FROM cdc.change_tables AS i
WHERE i.partition_switch = 1 AND i.source_object_id IN ({ids}) AND EXISTS (SELECT 1 FROM sys.partitions AS p
      WHERE p.object_id = i.source_object_id AND p.index_id IN (0, 1) AND p.partition_number > 1)
ORDER BY i.source_object_id, i.create_date
"""


def check_hidden(session: Session, tables: Sequence[CatalogTable]) -> Iterator[Finding]:
    """What of *tables* the user sees otherwise than it is, or what their changes do not tell."""
    if not tables:
        return
    names = {table.id: table.name for table in tables}
    for number, rows in _found(session, _MASKED, tables).items():
        if rows[0]["unmasks"]:
            continue
        masked = ", ".join(str(row["column_name"]) for row in rows)
        text = f"The user {session.dsn.user!r} sees masks instead of the values of {masked}: history would have them."
        fix = f"GRANT UNMASK TO {quoted(session.dsn.user)};"
        yield Finding("masked columns", Level.PROBLEM, text, fix, str(names[number]))
    for number, rows in _found(session, _POLICIES, tables).items():
        policies = ", ".join(dict.fromkeys(str(row["policy"]) for row in rows))
        text = f"The security policy {policies} hides rows: history lacks those that the user may not see, changes have"
        text += f" them. Let its function show all of them to {session.dsn.user!r}."
        yield Finding("row-level security", Level.WARNING, text, None, str(names[number]))
    for number, rows in _found(session, _SWITCHED, tables).items():
        name, instance = names[number], str(rows[-1]["instance"])
        text = f"Its partitions can be switched in and out, which the capture instance {instance} does not tell."
        closed = f"{enable_table(name).removesuffix(';')}, @allow_partition_switch = 0;"
        fix = f"{disable_table(name, instance)} {closed} -- then: headwater resnapshot {name}"
        yield Finding("partitions", Level.WARNING, text, fix, str(name))


def _found(session: Session, statement: str, tables: Sequence[CatalogTable]) -> dict[int, list[dict[str, Any]]]:
    """The rows of *statement* by table; none where the user may not ask."""
    try:
        rows = session.ask(statement.format(ids=", ".join(str(table.id) for table in tables)))
    except SourceError:
        return {}
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(int(row["id"]), []).append(row)
    return found

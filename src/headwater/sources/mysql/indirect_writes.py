"""What a statement may write besides the tables that it names: through views, triggers, functions and foreign keys.

The catalog tells them as they are now. What the user is not allowed to see may exist: where the answer is not certain,
it is yes.
"""

from __future__ import annotations

from typing import Final

from headwater.sources.mysql.connection import Connection, ask
from headwater.sources.mysql.names import TableName
from headwater.sources.mysql.row_statements import RowStatement

_MOST_NAMES: Final = 64

_KIND: Final = "SELECT table_type AS type FROM information_schema.tables WHERE table_schema = %s AND table_name = %s"
_TRIGGERS: Final = """
SELECT 1 AS one FROM information_schema.triggers WHERE event_object_schema = %s AND event_object_table = %s LIMIT 1
"""
_CASCADES: Final = """
SELECT 1 AS one FROM information_schema.referential_constraints
WHERE unique_constraint_schema = %s AND referenced_table_name = %s
  AND (delete_rule NOT IN ('RESTRICT', 'NO ACTION') OR update_rule NOT IN ('RESTRICT', 'NO ACTION')) LIMIT 1
"""
_FUNCTIONS: Final = """
SELECT 1 AS one FROM information_schema.routines
WHERE routine_type = 'FUNCTION' AND LOWER(routine_name) IN ({names}) LIMIT 1
"""
_SEES_TRIGGERS: Final = """
SELECT 1 AS one FROM information_schema.user_privileges WHERE privilege_type = 'TRIGGER' AND grantee = %s
UNION ALL SELECT 1 FROM information_schema.schema_privileges
WHERE privilege_type = 'TRIGGER' AND grantee = %s AND %s LIKE table_schema
UNION ALL SELECT 1 FROM information_schema.table_privileges
WHERE privilege_type = 'TRIGGER' AND grantee = %s AND table_schema = %s AND table_name = %s
"""


def may_write_others(session: Connection, statement: RowStatement, *, uses_temporary: bool) -> bool:
    """Whether *statement* may have written tables that it does not name.

    :param uses_temporary: the session that ran it used temporary tables, which no catalog shows.
    """
    tables = statement.tables
    if tables is None or len(tables) > _MOST_NAMES:
        return True
    user = str(ask(session, "SELECT CURRENT_USER() AS name")[0]["name"])
    grantee = "@".join(f"'{part}'" for part in user.rsplit("@", 1))
    if any(_reaches_others(session, table, grantee, uses_temporary=uses_temporary) for table in tables):
        return True
    names = sorted(statement.calls)
    return bool(names) and bool(ask(session, _FUNCTIONS.format(names=", ".join(["%s"] * len(names))), names))


def _reaches_others(session: Connection, table: TableName, grantee: str, *, uses_temporary: bool) -> bool:
    place = (table.namespace, table.name)
    kinds = ask(session, _KIND, place)
    if any("VIEW" in str(row["type"]) for row in kinds):
        return True
    if ask(session, _TRIGGERS, place) or ask(session, _CASCADES, place):
        return True
    if not kinds and uses_temporary:
        return False
    return not ask(session, _SEES_TRIGGERS, (grantee, grantee, table.namespace, grantee, *place))

"""Names of tables as people write them, and as SQL Server quotes them."""

from __future__ import annotations

import re
from typing import Final, Self

from headwater.sources.qualified_name import QualifiedName, name_parts

DEFAULT_SCHEMA: Final = "dbo"
_PART: Final = re.compile(r'\s*(?:"((?:[^"]|"")+)"|\[((?:[^\]]|\]\])+)\]|([^\s."\[\]]+))\s*')
_NEXT_STEP: Final = "Write schema.table, and [schema].[table] where a name has blanks or dots."


class TableName(QualifiedName):
    """A table of a database.

    >>> TableName.parse("sales.Orders").sql, str(TableName.parse("[my shop].orders")), str(TableName.parse("orders"))
    ('[sales].[Orders]', '"my shop".orders', 'dbo.orders')
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``schema.table``, or ``table`` in ``dbo``; a part may stand in brackets or double quotes.

        :raises InputError: it is not one or two names.
        """
        parts = name_parts(text, _PART, _read, _NEXT_STEP)
        return cls(*parts) if len(parts) == 2 else cls(DEFAULT_SCHEMA, parts[0])

    @property
    def sql(self) -> str:
        """For statements: every part quoted."""
        return f"{quoted(self.namespace)}.{quoted(self.name)}"


def quoted(name: str) -> str:
    """A name for a statement, always quoted."""
    return "[" + name.replace("]", "]]") + "]"


def literal(text: str) -> str:
    """A text for a statement."""
    return "N'" + text.replace("'", "''") + "'"


def _read(found: re.Match[str]) -> str:
    double, bracket, plain = found.groups()
    return plain or (double or "").replace('""', '"') or (bracket or "").replace("]]", "]")

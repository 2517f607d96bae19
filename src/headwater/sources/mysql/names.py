"""Names of tables as people write them, and as MySQL quotes them. Nothing is folded: case counts."""

from __future__ import annotations

import re
from typing import Final, Self

from headwater.errors import InputError
from headwater.sources.qualified_name import QualifiedName, name_parts

_PART: Final = re.compile(r'\s*(?:"((?:[^"]|"")+)"|`((?:[^`]|``)+)`|([^\s."`]+))\s*')
_NEXT_STEP: Final = "Write database.table, and `database`.`table` where a name has blanks or dots."


class TableName(QualifiedName):
    """A table of a server.

    >>> TableName.parse("shop.Orders").sql, str(TableName.parse("`my shop`.orders"))
    ('`shop`.`Orders`', '"my shop".orders')
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str, database: str = "") -> Self:
        """Read ``database.table``, or ``table`` in *database*; a part may stand in backticks or double quotes.

        :raises InputError: it is not one or two names, or names no database.
        """
        parts = name_parts(text, _PART, _read, _NEXT_STEP)
        if len(parts) == 1 and not database:
            raise InputError(
                f"The table {text!r} is in no database.",
                next_step=f"Write database.{text}, or name one in the address.",
            )
        return cls(*parts) if len(parts) == 2 else cls(database, parts[0])

    @property
    def sql(self) -> str:
        """For statements: every part quoted."""
        return f"{quoted(self.namespace)}.{quoted(self.name)}"


def quoted(name: str) -> str:
    """A name for a statement, always quoted."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """A text for a statement that is shown to a person."""
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def _read(found: re.Match[str]) -> str:
    double, back, plain = found.groups()
    return plain or (double or "").replace('""', '"') or (back or "").replace("``", "`")

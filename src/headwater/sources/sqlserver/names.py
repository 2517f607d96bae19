"""Names of tables as people write them, and as SQL Server quotes them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from headwater.errors import InputError

DEFAULT_SCHEMA: Final = "dbo"
_PART: Final = re.compile(r'\s*(?:"((?:[^"]|"")+)"|\[((?:[^\]]|\]\])+)\]|([^\s."\[\]]+))\s*')


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    """A table of a database.

    >>> TableName.parse("sales.Orders").sql, str(TableName.parse("[my shop].orders")), str(TableName.parse("orders"))
    ('[sales].[Orders]', '"my shop".orders', 'dbo.orders')
    """

    namespace: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``schema.table``, or ``table`` in ``dbo``; a part may stand in brackets or double quotes.

        :raises InputError: it is not one or two names.
        """
        parts = []
        place = 0
        while True:
            found = _PART.match(text, place)
            if not found:
                raise _unreadable(text)
            double, bracket, plain = found.groups()
            parts.append(plain or (double or "").replace('""', '"') or (bracket or "").replace("]]", "]"))
            place = found.end()
            if place == len(text):
                break
            if text[place] != "." or len(parts) == 2:
                raise _unreadable(text)
            place += 1
        return cls(*parts) if len(parts) == 2 else cls(DEFAULT_SCHEMA, parts[0])

    @property
    def sql(self) -> str:
        """For statements: every part quoted."""
        return f"{quoted(self.namespace)}.{quoted(self.name)}"

    def __str__(self) -> str:
        return f"{_shown(self.namespace)}.{_shown(self.name)}"


def quoted(name: str) -> str:
    """A name for a statement, always quoted."""
    return "[" + name.replace("]", "]]") + "]"


def literal(text: str) -> str:
    """A text for a statement."""
    return "N'" + text.replace("'", "''") + "'"


def _shown(name: str) -> str:
    """A name for people, as the log of the table has it: in double quotes where it is not plain and lower case."""
    return name if re.fullmatch(r"[a-z_][a-z0-9_]*", name) else '"' + name.replace('"', '""') + '"'


def _unreadable(text: str) -> InputError:
    return InputError(
        f"{text!r} is not the name of a table.",
        next_step="Write schema.table, and [schema].[table] where a name has blanks or dots.",
    )

"""Names of tables as people write them, and as MySQL quotes them. Nothing is folded: case counts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from headwater.errors import InputError

_PART: Final = re.compile(r'\s*(?:"((?:[^"]|"")+)"|`((?:[^`]|``)+)`|([^\s."`]+))\s*')


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    """A table of a server.

    >>> TableName.parse("shop.Orders").sql, str(TableName.parse("`my shop`.orders"))
    ('`shop`.`Orders`', '"my shop".orders')
    """

    namespace: str
    name: str

    @classmethod
    def parse(cls, text: str, database: str = "") -> Self:
        """Read ``database.table``, or ``table`` in *database*; a part may stand in backticks or double quotes.

        :raises InputError: it is not one or two names, or names no database.
        """
        parts = []
        place = 0
        while True:
            found = _PART.match(text, place)
            if not found:
                raise _unreadable(text)
            double, back, plain = found.groups()
            parts.append(plain or (double or "").replace('""', '"') or (back or "").replace("``", "`"))
            place = found.end()
            if place == len(text):
                break
            if text[place] != "." or len(parts) == 2:
                raise _unreadable(text)
            place += 1
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

    def __str__(self) -> str:
        return f"{shown(self.namespace)}.{shown(self.name)}"


def quoted(name: str) -> str:
    """A name for a statement, always quoted."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """A text for a statement that is shown to a person."""
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def shown(name: str) -> str:
    """A name for people, as the log of the table has it: in double quotes where it is not plain and lower case."""
    return name if re.fullmatch(r"[a-z_][a-z0-9_]*", name) else '"' + name.replace('"', '""') + '"'


def _unreadable(text: str) -> InputError:
    return InputError(
        f"{text!r} is not the name of a table.",
        next_step="Write database.table, and `database`.`table` where a name has blanks or dots.",
    )

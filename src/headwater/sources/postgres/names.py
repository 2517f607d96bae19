"""Names of tables as people write them: folded as Postgres folds them, quoted where they must be."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from headwater.errors import InputError

DEFAULT_NAMESPACE = "public"

_PART = re.compile(r'\s*(?:"((?:[^"]|"")+)"|([^\W\d][\w$]*))\s*')
_LONGEST = 63


@dataclass(frozen=True, slots=True, order=True)
class TableName:
    """A table of a database.

    >>> TableName.parse("Orders").sql, TableName.parse('"Sales"."Order Lines"').sql
    ('"public"."orders"', '"Sales"."Order Lines"')
    """

    namespace: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``name`` or ``schema.name``; a part in double quotes is taken as it is, others in lower case.

        :raises InputError: it is not one or two names.
        """
        parts = []
        place = 0
        while True:
            found = _PART.match(text, place)
            if not found:
                raise _unreadable(text)
            quoted, plain = found.groups()
            parts.append(quoted.replace('""', '"') if quoted is not None else _folded(plain))
            place = found.end()
            if place == len(text):
                break
            if text[place] != "." or len(parts) == 2:
                raise _unreadable(text)
            place += 1
        if any(len(part.encode()) > _LONGEST for part in parts):
            raise InputError(
                f"The table name {text!r} is longer than the {_LONGEST} bytes that Postgres keeps.",
                next_step="Write the name as the database shows it.",
            )
        return cls(*parts) if len(parts) == 2 else cls(DEFAULT_NAMESPACE, parts[0])

    @property
    def sql(self) -> str:
        """For statements: every part quoted."""
        return f"{quoted(self.namespace)}.{quoted(self.name)}"

    def __str__(self) -> str:
        return f"{shown(self.namespace)}.{shown(self.name)}"


def quoted(name: str) -> str:
    """A name for a statement, always quoted."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text for a statement that is shown to a person."""
    return "'" + text.replace("'", "''") + "'"


def shown(name: str) -> str:
    """A name for people: quoted only where it must be to mean the same when it is read again."""
    return name if re.fullmatch(r"[a-z_][a-z0-9_]*", name) else quoted(name)


def _folded(plain: str) -> str:
    """As Postgres folds a name that is not quoted: the letters A to Z."""
    return "".join(letter.lower() if letter.isascii() else letter for letter in plain)


def _unreadable(text: str) -> InputError:
    return InputError(
        f"{text!r} is not the name of a table.",
        next_step='Write schema.table, and "Schema"."Table" where it has capitals, blanks or dots.',
    )

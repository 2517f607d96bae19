"""Names of tables as people write them: folded as Postgres folds them, quoted where they must be."""

from __future__ import annotations

import re
from typing import Self

from headwater.errors import InputError
from headwater.sources.qualified_name import QualifiedName, name_parts

DEFAULT_NAMESPACE = "public"

_PART = re.compile(r'\s*(?:"((?:[^"]|"")+)"|([^\W\d][\w$]*))\s*')
_LONGEST = 63
_NEXT_STEP = 'Write schema.table, and "Schema"."Table" where it has capitals, blanks or dots.'


class TableName(QualifiedName):
    """A table of a database.

    >>> TableName.parse("Orders").sql, TableName.parse('"Sales"."Order Lines"').sql
    ('"public"."orders"', '"Sales"."Order Lines"')
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``name`` or ``schema.name``; a part in double quotes is taken as it is, others in lower case.

        :raises InputError: it is not one or two names.
        """
        parts = name_parts(text, _PART, _read, _NEXT_STEP)
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


def quoted(name: str) -> str:
    """A name for a statement, always quoted."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text for a statement that is shown to a person."""
    return "'" + text.replace("'", "''") + "'"


def _folded(plain: str) -> str:
    """As Postgres folds a name that is not quoted: the letters A to Z."""
    return "".join(letter.lower() if letter.isascii() else letter for letter in plain)


def _read(found: re.Match[str]) -> str:
    quoted, plain = found.groups()
    return quoted.replace('""', '"') if quoted is not None else _folded(plain)

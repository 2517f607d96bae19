"""Names of collections as people write them: the database up to the first dot, then the collection."""

from __future__ import annotations

import re
from typing import Final, Self

from headwater.errors import InputError
from headwater.sources.qualified_name import QualifiedName

_QUOTED: Final = re.compile(r'"((?:[^"]|"")+)"')


class CollectionName(QualifiedName):
    """A collection of a server.

    >>> str(CollectionName.parse("shop.fs.files")), CollectionName.parse('"My shop".orders').namespace
    ('shop."fs.files"', 'My shop')
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str, database: str = "") -> Self:
        """Read ``database.collection``; a name without a dot is one in *database*. A part may stand in double quotes.

        :raises InputError: it is no such name, or names no database.
        """
        first, rest = _part(text)
        if rest is None:
            if not database:
                raise InputError(
                    f"The collection {text!r} is in no database.",
                    next_step=f"Write database.{text}, or name one in the address.",
                )
            return cls(database, first)
        name, more = _part(rest) if rest.startswith('"') else (rest, None)
        if not name or more is not None or "\0" in text:
            raise _unreadable(text)
        return cls(first, name)


def _part(text: str) -> tuple[str, str | None]:
    """The first part, and what follows its dot; ``None``: there is no dot."""
    found = _QUOTED.match(text)
    if found is None:
        part, dot, rest = text.partition(".")
    else:
        part, dot, rest = found[1].replace('""', '"'), text[found.end() : found.end() + 1], text[found.end() + 1 :]
    if not part or dot not in ("", ".") or (dot and not rest):
        raise _unreadable(text)
    return part, rest if dot else None


def _unreadable(text: str) -> InputError:
    return InputError(
        f"{text!r} is not the name of a collection.",
        next_step='Write database.collection, and "database"."collection" where a name has blanks.',
    )

"""QualifiedName: the name of a table, as people write and read it; each server quotes it in its own way. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from headwater.errors import InputError


@dataclass(frozen=True, slots=True, order=True)
class QualifiedName:
    """A table, and the schema or database that it is in."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{shown(self.namespace)}.{shown(self.name)}"


def shown(name: str) -> str:
    """A name for people, as the log of the table has it: in double quotes where it is not plain and lower case."""
    return name if re.fullmatch(r"[a-z_][a-z0-9_]*", name) else '"' + name.replace('"', '""') + '"'


def name_parts(
    text: str, pattern: re.Pattern[str], read: Callable[[re.Match[str]], str], next_step: str
) -> tuple[str, ...]:
    """One or two names with a dot between.

    :param pattern: one name, with the blanks around it. :param read: what it is called, without its quotes.
    :raises InputError: it is something else.
    """
    parts: list[str] = []
    place = 0
    while (found := pattern.match(text, place)) is not None:
        parts.append(read(found))
        place = found.end()
        if place == len(text):
            return tuple(parts)
        if text[place] != "." or len(parts) == 2:
            break
        place += 1
    raise InputError(f"{text!r} is not the name of a table.", next_step=next_step)

"""Where a key stands in a TOML file, for messages: the parser of the standard library does not tell. Pure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from typing import Any

_HEADER = re.compile(r"\s*(\[\[?)\s*(.+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[\w-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[\w-]+))*)\s*=""")


def line_of(text: str, path: Sequence[str | int]) -> int | None:
    """The line, from 1, of the key at *path*, or of the table that it is in; ``None`` when neither is found.

    A number in the path counts the tables of an array.
    """
    wanted, found = tuple(path), None
    best = 0
    here: tuple[str | int, ...] = ()
    counts: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.match(line)
        if header is not None and (names := _names(header[2])) is not None:
            if header[1] == "[[":
                counts[names] = counts.get(names, -1) + 1
            here = (*names, counts[names]) if names in counts else names
        else:
            key = _KEY.match(line)
            if key is None or (names := _names(key[1])) is None:
                continue
            if _common((*here, *names), wanted) == len(here) + len(names) > best:
                best, found = len(here) + len(names), number
            continue
        if _common(here, wanted) == len(here) > best:
            best, found = len(here), number
    return found


def _names(dotted: str) -> tuple[str, ...] | None:
    try:
        read: Any = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:
        return None
    names = []
    while isinstance(read, dict):
        ((name, read),) = read.items()
        names.append(name)
    return tuple(names)


def _common(one: Sequence[str | int], other: Sequence[str | int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count

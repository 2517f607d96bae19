"""Edits of a TOML file that keep what a person wrote, and the line of a key, for messages. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any, Final

import tomlkit
from tomlkit.items import AoT, Table

_MARK: Final = "headwater-8c1f6d"


def with_table(text: str, name: str, values: Mapping[str, Any]) -> str:
    """*text*, as it is, with one more ``[[name]]`` at its end.

    :raises ValueError: a value cannot be written as TOML.
    """
    return f"{text.rstrip()}\n\n{tomlkit.dumps({name: [values]})}"


def line_of(text: str, path: Sequence[str | int]) -> int | None:
    """The line, from 1, of the key at *path*, or of the table that it is in; ``None`` when neither exists.

    A number in the path counts the tables of an array.
    """
    for depth in range(len(path), 0, -1):
        document: Any = tomlkit.parse(text)
        try:
            parent = reduce(getitem, path[: depth - 1], document)
            item = parent[path[depth - 1]]
        except (LookupError, TypeError):
            continue
        if isinstance(item, Table):
            item.comment(_MARK)
        elif not isinstance(item, AoT):
            parent[path[depth - 1]] = _MARK
        before, mark, _ = tomlkit.dumps(document).partition(_MARK)
        if mark:
            return before.count("\n") + 1
    return None

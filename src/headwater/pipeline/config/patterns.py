"""Names of tables in the settings, some of which stand for several."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

_QUOTED: Final = re.compile(r'"(?:[^"]|"")*"')


def is_pattern(name: str) -> bool:
    """Whether *name* stands for several tables: ``public.*``, ``"Chinook".*``; not ``"odd*name"``."""
    plain = _QUOTED.sub("", name) if name.startswith('"') else name
    return any(letter in plain for letter in "*?[")


def matching(patterns: Sequence[str], tables: Sequence[str], home: str) -> list[str]:
    """Those of *tables* that a pattern, or a name of one in the schema or database *home*, stands for; in order."""
    return [
        table
        for table in tables
        if any(fnmatchcase(table, pattern) or table == f"{home}.{pattern}" for pattern in patterns)
    ]

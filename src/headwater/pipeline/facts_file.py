"""The file in which the process that runs a pipeline says how it is, also on a full disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from headwater.private_files import open_private

_ROOM: Final = 1 << 14
"""The file is padded to a multiple of this: it can then be overwritten without new room."""


def write_facts(path: Path, facts: dict[str, Any]) -> None:
    """Write *facts* so that a reader sees the old ones or the new ones.

    Where there is no room for a second file the old one is overwritten: a reader in that very moment sees none.

    :raises OSError: neither could be done.
    """
    text = json.dumps(facts).encode()
    text = text.ljust(-(-len(text) // _ROOM) * _ROOM)
    fresh = path.with_suffix(".new")
    try:
        with open_private(fresh, "wb") as file:
            file.write(text)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        with path.open("r+b", buffering=0) as old:
            old.write(text)
            old.truncate(len(text))


def read_facts(path: Path) -> dict[str, Any]:
    """What was written; nothing where there is no such file, or it is being overwritten."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return facts

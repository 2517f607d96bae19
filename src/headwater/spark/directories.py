"""Where things are kept that belong to the user and not to a project."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """What can be made again: ``$XDG_CACHE_HOME/headwater``."""
    return _of("XDG_CACHE_HOME", ".cache")


def data_directory() -> Path:
    """What cannot: ``$XDG_DATA_HOME/headwater``."""
    return _of("XDG_DATA_HOME", ".local/share")


def _of(variable: str, otherwise: str) -> Path:
    told = os.environ.get(variable, "")
    return (Path(told) if Path(told).is_absolute() else Path.home() / otherwise) / "headwater"

"""Versioned tables: a table of ours as it is at any epoch that is kept, and what changed between two of them.

>>> from headwater.versioned import VersionedTable
>>> kept = VersionedTable.open("state", "public.orders", "tables")  # doctest: +SKIP
>>> kept.snapshot(kept.newest_epoch, (0, kept.vnode_count))  # doctest: +SKIP
"""

from __future__ import annotations

from headwater.versioned.errors import (
    BaseGone,
    NotComplete,
    NotYet,
    TableNotKept,
    UnsupportedKey,
    VersionedError,
)
from headwater.versioned.pins import Pin, PinInfo
from headwater.versioned.table import Block, VersionedTable

__all__ = [
    "BaseGone",
    "Block",
    "NotComplete",
    "NotYet",
    "Pin",
    "PinInfo",
    "TableNotKept",
    "UnsupportedKey",
    "VersionedError",
    "VersionedTable",
]

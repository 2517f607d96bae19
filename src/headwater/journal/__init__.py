"""The journal: sessions of segments, append-only, that lose nothing.

>>> store = FsStore(directory)
>>> branch = start(store, "shop-mirror")
>>> head = store.append(branch.session, branch.segment, Entry("barrier", {"epoch": 42}), expected_head=branch.head)

The format is described in docs/formats/journal.md, the use in docs/journal.md.
"""

from __future__ import annotations

from headwater.journal.damage import repair, rescue, salvage, verify
from headwater.journal.entry import EMPTY, Durability, Entry, Head, Limits, Rewound, Truncation, new_id
from headwater.journal.export import export_jsonl, export_markdown, hide
from headwater.journal.fork import (
    Branch,
    Origin,
    children,
    compact,
    ensure_head_or_fork,
    fork,
    fork_at,
    lineage,
    origin_of,
    start,
)
from headwater.journal.fs_store import FsStore
from headwater.journal.retention import prune
from headwater.journal.run_log import RunLog
from headwater.journal.run_state import RunKind, RunState, replay
from headwater.journal.store import Store

__all__ = [
    "EMPTY",
    "Branch",
    "Durability",
    "Entry",
    "FsStore",
    "Head",
    "Limits",
    "Origin",
    "Rewound",
    "RunKind",
    "RunLog",
    "RunState",
    "Store",
    "Truncation",
    "children",
    "compact",
    "ensure_head_or_fork",
    "export_jsonl",
    "export_markdown",
    "fork",
    "fork_at",
    "hide",
    "lineage",
    "new_id",
    "origin_of",
    "prune",
    "repair",
    "replay",
    "rescue",
    "salvage",
    "start",
    "verify",
]

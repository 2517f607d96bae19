"""A fixed row of batches for a sink, delivered by a process that can be killed at any failpoint.

Run again it delivers all of them anew, as a query does that lost everything it knew: what the sink has it skips.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
from tests.store.sinks.file_sinks import DELETE, INSERT, ORDERS, UPDATE, Feed, IntegerOrder, order, own_rows

from headwater import failpoints
from headwater.sinks.open import open_sink
from headwater.sinks.sink import Sink, Staged, Token
from headwater.sources.table import SourceColumn, SourceTable
from headwater.stream.vnode import hash_keys

WIDE = replace(ORDERS, columns=(*ORDERS.columns, SourceColumn("note", pa.string(), "text", 9)))
WIDER = replace(WIDE, columns=(*WIDE.columns[:2], replace(WIDE.columns[2], type=pa.decimal128(20, 4)), WIDE.columns[3]))
LONG = "x" * 120


def deliver(sink: Sink) -> None:
    """Every batch, staged and committed."""
    for token, table, staged in batches(sink):
        sink.commit(table, token, staged)


def batches(sink: Sink, generation: int = 0) -> Any:
    feed = Feed(sink)

    def batch(table: SourceTable, epoch: int, plan: int, changes: Any = (), history: Any = (), **more: Any) -> Any:
        feed.table = table
        token: Token = replace(feed.token(epoch, plan), generation=generation)
        staged: list[Staged] = []
        if changes or "truncated" in more:
            staged.append(feed.stage_changes(token, changes, more.pop("truncated", None)))
        if history:
            staged.append(feed.stage_history(token, history, **more))
        return token, table, staged

    yield batch(ORDERS, 1, 1, [(INSERT, order(1000))], [order(key) for key in range(20)])
    yield batch(ORDERS, 2, 1, [(UPDATE, order(1, "paid")), (DELETE, order(2)), (INSERT, order(1001))])
    yield batch(ORDERS, 3, 1, [(INSERT, order(key, LONG)) for key in range(2000, 5000)])
    yield batch(WIDE, 4, 1, [(UPDATE, {**order(3, "noted"), "note": "n"}), (DELETE, order(1001))])
    changed = hash_keys(own_rows(WIDE, [order(1000), order(30)]), ("id",))
    yield batch(WIDE, 5, 2, [(INSERT, order(40))], [order(1000, "read"), order(30), order(31)], changed=changed)
    yield batch(WIDER, 6, 2, [(INSERT, {**order(41), "total": Decimal("0.0001")})])
    yield batch(WIDER, 7, 3, (), [order(10, "again")], ranges=[(10, 15)], replaces=True, order=IntegerOrder())
    yield batch(WIDER, 8, 3, [(INSERT, order(50)), (INSERT, order(51, "kept"))], truncated=(8, 1))
    yield batch(WIDER, 9, 3, [(INSERT, order(52)), (UPDATE, order(51, None, "2.00"), "status")])


MIRROR = {51: ("kept", "2.0000"), 52: ("new", "1.0000")}
"""What a mirror has in the end."""

CURRENT = {51: "kept", 52: "new"}
"""… and what is current of the versions."""

STEPS = {
    1: {**dict.fromkeys(range(20), "new"), 1000: "new"},
    7: {
        **dict.fromkeys((0, *range(4, 10), *range(15, 20), 30, 31, 40, 41), "new"),
        1: "paid",
        3: "noted",
        10: "again",
        1000: "read",
        **dict.fromkeys(range(2000, 5000), LONG),
    },
}
"""What it has after the batches with these epochs."""


def tune() -> None:
    """Chores that are due now and then are due at once."""
    from headwater.sinks import delta_log, manifests, parquet, rewrite

    parquet.SMALL_FILES = 2  # type: ignore[misc]
    parquet.LOOK_EVERY = 1  # type: ignore[misc]
    manifests.CHECKPOINT_MANIFESTS = 2  # type: ignore[misc]
    delta_log.CHECKPOINT_COMMITS = 2  # type: ignore[misc]
    rewrite.SMALL_FILES = 2  # type: ignore[misc]


def child(kind: str, mode: str, path: str, armed: str, upto: int) -> None:
    """Deliver with failpoints armed; stop after the batch with the epoch *upto*."""
    tune()
    failpoints.arm(armed)
    more = {"retention_hours": 0} if kind == "parquet" else {}
    sink = open_sink(kind, path=path, mode=mode, file_bytes=64 << 10, **more)
    for token, table, staged in batches(sink):
        sink.commit(table, token, staged)
        if token.epoch == upto:
            break


def count_hits(kind: str, mode: str, path: str) -> None:
    """Deliver, and write down how often each failpoint was passed."""
    hits: Counter[str] = Counter()
    original = failpoints.hit

    def counted(name: str) -> None:
        hits[name] += 1
        original(name)

    failpoints.hit = counted
    child(kind, mode, path, "", 0)
    Path(path, "_hits.json").write_text(json.dumps(hits))

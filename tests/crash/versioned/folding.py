"""A process that keeps a table: history, then epochs that are folded and merged, with a pin on the way.

Run again it goes on from what is there, as a query does that was killed.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.store.sinks.file_sinks import DELETE, INSERT, ORDERS, UPDATE, order
from tests.store.versioned.written import BACKFILL, QUERY, WrittenTable, applied, rows_at

from headwater import failpoints
from headwater.versioned.compaction import compact

EPOCHS = 6


def expected() -> dict[Any, Any]:
    now = {(key,): order(key) for key in range(30)}
    for number in range(EPOCHS):
        now[(number,)] = order(number, f"s{number}")
        now.pop((20 + number,), None)
        now[(100 + number,)] = order(100 + number)
    return now


def changes(number: int) -> list[Any]:
    return [(UPDATE, order(number, f"s{number}")), (DELETE, order(20 + number)), (INSERT, order(100 + number))]


def keep(folder: Path, generation: int) -> None:
    """Write the log where it is missing, and fold all of it."""
    kept = WrittenTable(folder, generation=generation, merge_runs=3)
    try:
        kept.sink.abort(ORDERS, QUERY, generation)
        if not kept.sink.folder(ORDERS).newest().history.get(f"{QUERY}/{BACKFILL}"):
            kept.history([order(key) for key in range(30)])
        else:
            kept.complete()
        table = kept.open()
        written = sum(key >= 100 for (key,) in rows_at(table, kept.newest))
        for number in range(written, EPOCHS):
            kept.write(*changes(number))
            pin = table.pin("keeper", name="keeper")
            before = rows_at(table, pin.epoch)
            kept.fold()
            kept.write()
            after = rows_at(table, kept.newest)
            assert applied(before, table.changes(pin.epoch, kept.newest, (0, 256))) == after
            pin.release()
            compact(kept.sink.folder(ORDERS), 2, kept_seconds=0)
        table.release("keeper")
        kept.fold()
        compact(kept.sink.folder(ORDERS), everything=True, kept_seconds=0)
        assert rows_at(table, kept.newest) == expected()
        left = sorted(path.name for path in kept.sink.folder(ORDERS).runs.iterdir())
        assert left == [run.name for run in kept.sink.folder(ORDERS).newest().runs], left
        table.close()
    finally:
        kept.close()


def kept_by_a_process(folder: Path, generation: int, armed: str) -> None:
    """Keep it, with failpoints armed, and write down how often each was passed."""
    hits: Counter[str] = Counter()
    original = failpoints.hit

    def counted(name: str) -> None:
        hits[name] += 1
        original(name)

    failpoints.hit = counted
    failpoints.arm(armed)
    keep(folder, generation)
    (folder / "hits.json").write_text(json.dumps(hits))

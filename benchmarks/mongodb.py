"""MongoDB: a change stream into the durable log, and a snapshot into columns, beside what its own client does.

Capture is timed as ``headwater capture`` does it, from the opening of the stream to the seal of the epoch that has the
last change; its bound is ``watch()``, whose events are decoded and thrown away. The snapshot is read by one task, as a
task of Spark reads it; its bound is ``find_raw_batches()``, thrown away. The decoder is measured from memory.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from _harness import Figure, best_in_turns, main, progress, seconds_of
from _mongodb_decode import measure_decode
from _servers import MongoServer
from _timed_capture import Begun, timed_capture
from headwater.sources.open import open_source
from headwater.sources.snapshots import open_snapshots
from headwater.sources.splits import KeyRange, SplitKind

TABLE = "bench.orders"
COLUMNS = {
    TABLE: "struct<_id: long, quantity: int, price: double, customer: string, note: string, created: date,"
    " details: json, open: bool>"
}
_BLOCK = 10_000
_BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def document(number: int) -> dict[str, Any]:
    return {
        "_id": number,
        "quantity": number % 1000,
        "price": number * 1.2345,
        "customer": f"customer {number % 977}",
        "note": f"a note of usual length for row {number}",
        "created": _BEGAN + timedelta(seconds=number),
        "details": {"kind": number % 7, "tags": ["a", "b"], "text": f"hello {number}"},
        "open": number % 3 > 0,
    }


class Bench:
    """A collection, and the changes that made it what it is: inserts, updates, deletes."""

    def __init__(self, server: MongoServer, rows: int) -> None:
        self.server, self.rows = server, rows
        orders = server.client.bench.orders
        orders.insert_one(document(0))
        source = open_source(server.dsn, spill=Path("unused"), columns=COLUMNS)
        self.tables = source.tables([TABLE])
        self.begun: Begun = source.begin(self.tables, resumed=False)
        for first in range(1, rows + 1, _BLOCK):
            orders.insert_many([document(number) for number in range(first, min(first + _BLOCK, rows + 1))])
        changed = rows // 4
        orders.update_many({"_id": {"$gt": rows - changed}}, {"$inc": {"quantity": 1}})
        orders.delete_many({"_id": {"$gt": 0, "$lte": changed // 4}})
        self.events = rows + changed + changed // 4
        self.end = source.include([])
        source.close()
        self.left = rows + 1 - changed // 4

    def watch(self) -> None:
        """Everything decoded by the client, and thrown away."""
        begun: Any = self.begun[0]
        resumed = {"_data": begun.token}
        with self.server.client.bench.orders.watch(resume_after=resumed, batch_size=20_000) as stream:
            for number, _ in enumerate(stream, 1):
                if number == self.events:
                    return

    def capture(self) -> float:
        """Seconds until all of it is durable."""
        return timed_capture(self.server.dsn, TABLE, self.begun, self.end, self.events, columns=COLUMNS).seconds

    def find_raw(self) -> None:
        for _ in self.server.client.bench.orders.find_raw_batches():
            pass

    def snapshot(self) -> None:
        source = open_snapshots(self.server.dsn)
        snapshot = source.export()
        read = source.read(self.tables[0], SplitKind.KEY, KeyRange(), snapshot.name)
        found = sum(batch.num_rows for batch in read)
        assert found == self.left, (found, self.left)


def measure(quick: bool) -> list[Figure]:
    rows, turns = (100_000, 1) if quick else (400_000, 3)
    with (
        progress("a real MongoDB"),
        MongoServer({"wiredTigerCacheSizeGB": "1", "oplogSize": "2000"}) as server,
    ):
        bench = Bench(server, rows)
        bench.snapshot()
        bench.find_raw()
        watched, captured, raw, read = best_in_turns(
            turns,
            lambda: seconds_of(bench.watch),
            bench.capture,
            lambda: seconds_of(bench.find_raw),
            lambda: seconds_of(bench.snapshot),
        )
    events, left = bench.events, bench.left
    return [
        *measure_decode(quick),
        Figure(
            "capture of MongoDB, wire to durable log / watch() decoded",
            events / captured,
            events / watched,
            2.0,
            "higher",
            "events/s",
            turns,
        ),
        Figure(
            "snapshot of MongoDB into columns / find_raw_batches() thrown away",
            left / read,
            left / raw,
            0.5,
            "higher",
            "docs/s",
            turns,
        ),
    ]


if __name__ == "__main__":
    main(__doc__, measure)

"""The shop of :mod:`tests.crash.capture.shop` on MongoDB: each transaction tells the ``ledger`` of itself.

The server keeps images of all changes, so that each is told exactly, whatever becomes of its document later.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from bson import ObjectId
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError
from tests.crash.capture.shop import _rows
from tests.db.mongodb.running import selected
from tests.servers.mongodb import MongoServer

from headwater.capture.replay import replay
from headwater.log_store import LogView
from headwater.sources.mongodb.source import MongoSource
from headwater.state import open_reader

COLUMNS = {
    "shop.orders": "struct<_id: objectId, n: long, amount: double, customer: string>",
    "shop.lines": "struct<_id: key, n: long, note: string>",
    "shop.ledger": "struct<_id: objectId, orders: int, lines: int>",
}
TABLES = tuple(COLUMNS)


def make_collections(server: MongoServer) -> None:
    for name in TABLES:
        server.client.shop.create_collection(name.partition(".")[2], changeStreamPreAndPostImages={"enabled": True})


class Writer(threading.Thread):
    """Runs transactions until it is told to end, over any crash of the server.

    :ivar confirmed: the ids of those whose commit the server confirmed.
    """

    def __init__(self, server: MongoServer, seed: str) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._rng = random.Random(seed)
        self._ended = threading.Event()
        self.confirmed: list[ObjectId] = []

    def end(self) -> None:
        self._ended.set()
        self.join(60)
        assert not self.is_alive()

    def run(self) -> None:
        while not self._ended.is_set():
            try:
                with self._server.client.start_session() as session:
                    self._transact(session)
                self._ended.wait(self._rng.random() * 0.01)
            except (PyMongoError, OSError):
                time.sleep(0.05)

    def _transact(self, session: ClientSession) -> None:
        shop, rng = self._server.client.shop, self._rng
        changes: Counter[str] = Counter()
        number, one_in = ObjectId(), rng.randint(5, 40)
        some: dict[str, Any] = {"n": {"$mod": [one_in, 1]}}
        with session.start_transaction():
            count = rng.choice((1, 3, 20, 20, 400))
            orders = [{"n": rng.randrange(1 << 40), "amount": rng.random(), "customer": f"c{n}"} for n in range(count)]
            changes["orders"] += len(shop.orders.insert_many(orders, session=session).inserted_ids)
            if rng.random() < 0.5:
                lines = [{"_id": {"order": number, "line": line}, "n": line, "note": "x" * 500} for line in (1, 2)]
                lines.append({"_id": rng.randrange(1 << 60), "n": rng.randrange(1 << 40), "note": "y"})
                changes["lines"] += len(shop.lines.insert_many(lines, session=session).inserted_ids)
                updated = shop.orders.update_many(some, {"$inc": {"amount": 1}}, session=session)
                changes["orders"] += 2 * updated.modified_count
            if rng.random() < 0.3:
                changes["lines"] += shop.lines.delete_many(some, session=session).deleted_count
                changes["orders"] += shop.orders.delete_many(some, session=session).deleted_count
            shop.ledger.insert_one({"_id": number, **changes}, session=session)
        self.confirmed.append(number)


def verify(server: MongoServer, store: Path, confirmed: list[ObjectId]) -> int:
    """The logs tell the collections, and every transaction once, whole, in order; how many there were.

    :raises AssertionError: they do not.
    """
    ledger = {
        str(found["_id"]): Counter(orders=found.get("orders", 0), lines=found.get("lines", 0), ledger=1)
        for found in server.client.shop.ledger.find()
    }
    assert {str(number) for number in confirmed} <= ledger.keys(), "a commit that was confirmed is gone from the server"
    found: defaultdict[bytes, Counter[str]] = defaultdict(Counter)
    epochs: defaultdict[bytes, set[int]] = defaultdict(set)
    positions: list[bytes] = []
    for table in TABLES:
        told = _rows(store, table)
        assert [position for *_, position in told] == sorted(position for *_, position in told), table
        for epoch, _, position in told:
            positions.append(position)
            found[position[:8]][table.removeprefix("shop.")] += 1
            epochs[position[:8]].add(epoch)
    assert len(positions) == len(set(positions)), "a change came twice"
    assert all(len(seen) == 1 for seen in epochs.values()), "transactions in more than one epoch"
    numbers = _numbers(store)
    assert {numbers[place]: +counts for place, counts in found.items()} == {
        number: +counts for number, counts in ledger.items()
    }
    for table in TABLES:
        _compare(server, store, table)
    return len(ledger)


def _numbers(store: Path) -> dict[bytes, str]:
    """The id of a transaction by its place."""
    with open_reader(store) as reader, reader.snapshot() as view:
        shown = LogView.open(view, "shop.ledger")
        batches = list(shown.read_range(0, shown.sealed))
    return {row["_position"][:8]: row["_id"] for batch in batches for row in batch.to_pylist()}


def _compare(server: MongoServer, store: Path, name: str) -> None:
    source = MongoSource(server.dsn, columns=COLUMNS)
    (table,) = source.tables([name])
    source.close()
    expected = selected(server, table)
    with open_reader(store) as reader, reader.snapshot() as view:
        found = replay(view, table.full_name).select(expected.schema.names)
    order = [(column, "ascending") for column in table.key_columns]
    assert found.num_rows == expected.num_rows, (name, found.num_rows, expected.num_rows)
    assert found.sort_by(order).cast(expected.schema).equals(expected.sort_by(order)), name

"""The shop of :mod:`tests.crash.capture.shop` on MongoDB.

The server keeps images of all changes, so that each is told exactly, whatever becomes of its document later.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pyarrow as pa
from bson import ObjectId
from pymongo.client_session import ClientSession
from pymongo.errors import PyMongoError
from tests.crash.capture.shop import Shop
from tests.db.mongodb.running import selected
from tests.servers.mongodb import MongoServer

from headwater.sources.table import SourceTable


class MongoShop(Shop):
    number = "_id"
    failures = (PyMongoError, OSError)
    columns = {  # noqa: RUF012
        "shop.orders": "struct<_id: objectId, n: long, amount: double, customer: string>",
        "shop.lines": "struct<_id: key, n: long, note: string>",
        "shop.ledger": "struct<_id: objectId, orders: int, lines: int>",
    }

    def __init__(self, server: MongoServer) -> None:
        self._server = server
        super().__init__(server.dsn)

    def make_tables(self) -> None:
        images = {"enabled": True}
        for name in self.tables:
            self._server.client.shop.create_collection(name.partition(".")[2], changeStreamPreAndPostImages=images)

    def connect(self) -> ClientSession:
        return self._server.client.start_session()

    def transact(self, session: ClientSession, rng: random.Random) -> str:
        shop = self._server.client.shop
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
        return str(number)

    def ledger(self) -> list[tuple[Any, ...]]:
        found = self._server.client.shop.ledger.find()
        return [(str(one["_id"]), one.get("orders", 0), one.get("lines", 0)) for one in found]

    def selected(self, table: SourceTable) -> pa.Table:
        return selected(self._server, table)

"""The shop of the demo in a MongoDB; see :mod:`headwater.demo.shop`, whose process it is, too.

Run as a process: ``python -m headwater.demo.mongodb_shop SEED RATE``.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pymongo
from bson.decimal128 import Decimal128
from pymongo.client_session import ClientSession
from pymongo.operations import DeleteOne, InsertOne, UpdateMany, UpdateOne

from headwater.demo.databases import DSN_VARIABLE
from headwater.demo.pace import TRANSACTIONS_PER_SECOND, paced

TABLES: Final = ("shop.customers", "shop.orders")
ORDERS: Final = "shop.orders"
PROCESS: Final = "headwater.demo.mongodb_shop"
SETTINGS: Final = """
[table."shop.customers".columns]
_id = "long"
name = "string"
email = "string"
since = "date"

[table."shop.orders".columns]
_id = "long"
customer = "long"
state = "string"
total = "decimal(12,2)"
lines = "array<struct<article: string, pieces: int, price: decimal(10,2)>>"
note = "json"
at = "date"
"""

_BLOCK = 20_000
_RECENT = 2000
_BEGAN = datetime(2024, 1, 1, tzinfo=UTC)

Client = pymongo.MongoClient[dict[str, Any]]


def create(dsn: str, rows: int) -> int:
    """Make the collections, with about *rows* documents of history in all. The number of the last order."""
    orders = max(1, rows * 10 // 11)
    customers = max(1, rows - orders)
    with connect(dsn) as client:
        shop = client.shop
        for name in ("customers", "orders"):
            shop.create_collection(name, changeStreamPreAndPostImages={"enabled": True})
        for first in range(1, customers + 1, _BLOCK):
            numbers = range(first, min(first + _BLOCK, customers + 1))
            shop.customers.insert_many([_customer(number) for number in numbers], ordered=False)
        for first in range(1, orders + 1, _BLOCK):
            numbers = range(first, min(first + _BLOCK, orders + 1))
            shop.orders.insert_many([_order(number, number % customers + 1) for number in numbers], ordered=False)
    return orders


def _customer(number: int) -> dict[str, Any]:
    since = _BEGAN + timedelta(minutes=number)
    return {"_id": number, "name": f"Customer {number}", "email": f"c{number}@example.com", "since": since}


def _order(number: int, customer: int) -> dict[str, Any]:
    return {
        "_id": number,
        "customer": customer,
        "state": ("paid", "sent", "done", "returned")[number % 4],
        "total": Decimal128(f"{number % 1000 * 125 / 100:.2f}"),
        "lines": [{"article": f"A{number % 977}", "pieces": 1 + line, "price": Decimal128("9.95")} for line in (0, 1)],
        "note": {"channel": "web", "weight": number % 70},
        "at": _BEGAN + timedelta(seconds=number),
    }


def connect(dsn: str) -> AbstractContextManager[Client]:
    """A client of the application."""
    client: Client = pymongo.MongoClient(dsn)
    return client


def held_bytes(client: Client) -> int:
    """What the server keeps of its log because of us: nothing, it keeps it by size."""
    return 0


class Application:
    """Orders come, are changed, get another line and go; most of those that change are recent."""

    def __init__(self, client: Client, seed: int, rate: float) -> None:
        self._client, self._shop = client, client.shop
        self._chance = random.Random(seed)
        self._orders = self._last("orders")
        self._customers = self._last("customers")
        self._size = max(8, round(rate / TRANSACTIONS_PER_SECOND))

    def _last(self, name: str) -> int:
        found = self._shop[name].find_one(sort=[("_id", -1)], projection={"_id": 1})
        return int(found["_id"]) if found else 0

    def transaction(self) -> None:
        """One commit of about as many changes as the rate asks for."""
        with self._client.start_session() as session:
            session.with_transaction(self._changes)

    def _changes(self, session: ClientSession) -> None:
        if self._chance.random() < 0.2:
            self._customers += 1
            self._shop.customers.insert_one(_customer(self._customers), session=session)
        first = self._orders + 1
        self._orders += self._size // 3
        customer = self._chance.randint(1, max(1, self._customers))
        made = [InsertOne(_order(number, customer)) for number in range(first, self._orders + 1)]
        changed = [self._order() for _ in range(self._size // 2)]
        line = {"article": "A0", "pieces": 1, "price": Decimal128("1.00")}
        self._shop.orders.bulk_write(
            [
                *made,
                UpdateMany({"_id": {"$in": changed}}, {"$set": {"state": "paid"}}),
                UpdateOne({"_id": self._order()}, {"$push": {"lines": {"$each": [line], "$slice": -5}}}),
                DeleteOne({"_id": self._order()}),
            ],
            session=session,
        )

    def _order(self) -> int:
        oldest = 1 if self._chance.random() < 0.02 else max(1, self._orders - _RECENT)
        return self._chance.randint(oldest, max(1, self._orders))


def main() -> None:
    """The process."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with connect(os.environ[DSN_VARIABLE]) as client:
        print(paced(Application(client, int(sys.argv[1]), float(sys.argv[2])).transaction, stop))


if __name__ == "__main__":
    main()

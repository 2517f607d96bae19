"""A query over a captured MongoDB, and somebody who writes meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tests.db.backfill.delivering import Delivering
from tests.db.mongodb.running import MongoCapture
from tests.db.writing import writing
from tests.servers.mongodb import MongoServer

TABLE = "shop.orders"


class MongoDelivering(Delivering):
    """As :class:`Delivering`, with the server's own documents as what is expected."""

    capture: MongoCapture

    def assert_equal(self, *tables: str) -> None:
        """The mirror is the source, each row of history came once, each change once."""
        for name in tables or self.options.tables:
            table = self.capture.logged(name)
            expected = {
                tuple(row[column] for column in table.key_columns): row
                for row in self.capture.selected(table).to_pylist()
            }
            found = self.sink.mirror.get(name, {})
            assert found.keys() == expected.keys(), (
                len(found.keys() - expected.keys()),
                len(expected.keys() - found.keys()),
            )
            wrong = [key for key, row in expected.items() if found[key] != row]
            assert not wrong, (len(wrong), [(found[key], expected[key]) for key in wrong[:3]])
            assert all(count == 1 for count in self.sink.changes.get(name, Counter()).values())


def create(server: MongoServer, rows: int = 3000) -> None:
    documents = [{"_id": n * 3, "state": "new", "total": n, "note": "xxxxxxxx"} for n in range(1, rows + 1)]
    server.client.shop.orders.insert_many(documents)


@contextmanager
def writer(server: MongoServer, pause: float = 0.002) -> Iterator[None]:
    """Somebody who writes all the time, in transactions and without: new documents, updates, replacements, deletes."""
    orders = server.client.shop.orders

    def write(number: int) -> None:
        at = number * 37 % 9000
        with server.client.start_session() as session, session.start_transaction():
            live = {"$set": {"state": "live", "total": number}}
            orders.update_one({"_id": at * 3 + 1}, live, upsert=True, session=session)
            paid = {"$set": {"state": "paid", "total": number}}
            orders.update_many({"_id": {"$gte": at, "$lte": at + 20}}, paid, session=session)
            orders.delete_one({"_id": at + 3}, session=session)
        orders.replace_one({"_id": at + 30}, {"total": number, "note": None}, upsert=True)

    with writing(write, pause):
        yield

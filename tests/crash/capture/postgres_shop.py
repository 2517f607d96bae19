"""The shop of :mod:`tests.crash.capture.shop` on Postgres, and its transactions for those who write them one by one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from tests.crash.capture.shop import Shop
from tests.db.capture.running import selected
from tests.servers.postgres import Database

from headwater.sources.table import SourceTable

TABLES = ("orders", "lines", "ledger")
Session = psycopg.Connection[tuple[Any, ...]]


class Transaction:
    """One transaction under way, counting its changes."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.changes: Counter[str] = Counter()

    def run(self, statement: str) -> int:
        """A statement that is not counted; how many rows it touched."""
        return self._session.execute(statement.encode()).rowcount

    def insert_orders(self, count: int) -> None:
        row = "nextval('ids'), random() * 1000, 'customer ' || i, now()"
        self.changes["orders"] += self.run(f"INSERT INTO orders SELECT {row} FROM generate_series(1, {count}) i")

    def insert_lines(self, count: int) -> None:
        row = "nextval('ids'), i, md5(i::text)"
        self.changes["lines"] += self.run(f"INSERT INTO lines SELECT {row} FROM generate_series(1, {count}) i")

    def update(self, table: str, change: str, one_in: int) -> None:
        self.changes[table] += self.run(f"UPDATE {table} SET {change} WHERE id % {one_in} = 0")

    def delete(self, table: str, one_in: int) -> None:
        self.changes[table] += self.run(f"DELETE FROM {table} WHERE id % {one_in} = 1")

    def change_keys(self, table: str, one_in: int) -> None:
        """Each is a delete and an insert."""
        self.changes[table] += 2 * self.run(f"UPDATE {table} SET id = nextval('ids') WHERE id % {one_in} = 2")

    def end(self) -> int:
        """Enter it in the ledger; its number."""
        values = f"pg_current_xact_id()::text::bigint, {self.changes['orders']}, {self.changes['lines']}"
        entered = self._session.execute(f"INSERT INTO ledger VALUES ({values}) RETURNING xid".encode()).fetchone()
        assert entered is not None
        return int(entered[0])


def transact(transaction: Transaction, rng: random.Random) -> None:
    """The statements of a transaction at random."""
    kind = rng.choices(
        ("insert", "both", "update", "delete", "keys", "savepoint", "large", "truncate"), (30, 25, 15, 12, 8, 6, 3, 1)
    )[0]
    one_in = rng.randint(5, 40)
    if kind == "insert":
        transaction.insert_orders(rng.randint(1, 20))
    elif kind == "both":
        transaction.insert_orders(rng.randint(1, 5))
        transaction.insert_lines(rng.randint(1, 5))
        transaction.update("orders", "amount = amount + 1", one_in)
    elif kind == "update":
        transaction.update("orders", "customer = 'changed'", one_in)
        transaction.update("lines", "note = NULL", one_in)
    elif kind == "delete":
        transaction.delete("lines", one_in)
        transaction.delete("orders", one_in)
    elif kind == "keys":
        transaction.change_keys("orders", one_in)
        transaction.change_keys("lines", one_in)
    elif kind == "savepoint":
        transaction.insert_lines(3)
        transaction.run("SAVEPOINT here")
        before = transaction.changes.copy()
        transaction.insert_orders(rng.choice((3, 800)))
        transaction.run("ROLLBACK TO SAVEPOINT here")
        transaction.changes = before
        transaction.insert_orders(2)
    elif kind == "large":
        transaction.insert_orders(rng.randint(1000, 4000))
        transaction.insert_lines(1000)
        transaction.delete("orders", 2)
    else:
        transaction.run(rng.choice(("TRUNCATE lines", "TRUNCATE orders, lines")))
        transaction.insert_lines(1)


class PostgresShop(Shop):
    schema = "public"
    number = "xid"
    place = slice(-4, None)
    failures = (psycopg.OperationalError,)

    def __init__(self, database: Database) -> None:
        self._database = database
        super().__init__(database.dsn)

    def make_tables(self) -> None:
        self._database.execute(
            "CREATE TABLE orders (id bigint PRIMARY KEY, amount numeric(18,4), customer text, at timestamptz)",
            "CREATE TABLE lines (id bigint, line int, note text, PRIMARY KEY (id, line))",
            "CREATE TABLE ledger (xid bigint PRIMARY KEY, orders int NOT NULL, lines int NOT NULL)",
            "CREATE SEQUENCE ids",
        )

    def connect(self) -> Session:
        return self._database.connect()

    def transact(self, session: Session, rng: random.Random) -> int:
        with session.transaction():
            transaction = Transaction(session)
            transact(transaction, rng)
            return transaction.end()

    def ledger(self) -> list[tuple[Any, ...]]:
        return self._database.execute("SELECT xid, orders, lines FROM ledger")

    def numbers(self, store: Path) -> dict[bytes, Hashable]:
        """As the ledger tells them, which are those in the positions."""
        told = super().numbers(store)
        assert told == {place: int.from_bytes(place, "big") for place in told}
        return told

    def selected(self, table: SourceTable) -> pa.Table:
        return selected(self._database, table)

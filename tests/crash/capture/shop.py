"""A shop whose transactions are known: writers at random, and what their logs must tell afterwards.

Each transaction leaves a row in ``ledger``: its number, and how many changes of each table it made. So the database
itself tells, after any crash, which transactions there were; the writers remember those whose commit was confirmed.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import psycopg
from tests.db.capture.running import selected
from tests.servers.postgres import Database

from headwater.capture.replay import replay
from headwater.log_store import LogView
from headwater.sources.open import open_source
from headwater.state import open_reader

TABLES = ("orders", "lines", "ledger")
Session = psycopg.Connection[tuple[Any, ...]]


def make_tables(database: Database) -> None:
    database.execute(
        "CREATE TABLE orders (id bigint PRIMARY KEY, amount numeric(18,4), customer text, at timestamptz)",
        "CREATE TABLE lines (id bigint, line int, note text, PRIMARY KEY (id, line))",
        "CREATE TABLE ledger (xid bigint PRIMARY KEY, orders int NOT NULL, lines int NOT NULL)",
        "CREATE SEQUENCE ids",
    )


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


class Writer(threading.Thread):
    """Runs transactions until it is told to end, over any crash of the server.

    :ivar confirmed: the numbers of those whose commit the server confirmed.
    """

    def __init__(self, database: Database, seed: str) -> None:
        super().__init__(daemon=True)
        self._database = database
        self._rng = random.Random(seed)
        self._ended = threading.Event()
        self.confirmed: list[int] = []

    def end(self) -> None:
        self._ended.set()
        self.join(60)
        assert not self.is_alive()

    def run(self) -> None:
        while not self._ended.is_set():
            try:
                with self._database.connect() as session:
                    self._write(session)
            except psycopg.OperationalError:
                time.sleep(0.05)

    def _write(self, session: Session) -> None:
        while not self._ended.is_set():
            with session.transaction():
                transaction = Transaction(session)
                transact(transaction, self._rng)
                number = transaction.end()
            self.confirmed.append(number)
            self._ended.wait(self._rng.random() * 0.01)


def verify(database: Database, store: Path, confirmed: list[int]) -> int:
    """The logs tell the tables, and every transaction once, whole, in order; how many there were.

    :raises AssertionError: they do not.
    """
    ledger = {xid: Counter(orders=orders, lines=lines, ledger=1) for xid, orders, lines in _ledger(database)}
    assert set(confirmed) <= ledger.keys(), "a commit that was confirmed is gone from the server"
    found: defaultdict[int, Counter[str]] = defaultdict(Counter)
    epochs: defaultdict[int, set[int]] = defaultdict(set)
    positions: list[bytes] = []
    for table in TABLES:
        rows = _rows(store, f"public.{table}")
        told = [position for _, _, position in rows]
        assert told == sorted(told), f"{table}: the order of the log is not that of the commits"
        positions += told
        for epoch, _, position in rows:
            xid = int.from_bytes(position[-4:], "big")
            found[xid][table] += 1
            epochs[xid].add(epoch)
    assert len(positions) == len(set(positions)), "a change came twice"
    assert {xid: +counts for xid, counts in found.items()} == {xid: +counts for xid, counts in ledger.items()}
    split = [xid for xid, seen in epochs.items() if len(seen) > 1]
    assert split == [], "transactions in more than one epoch"
    for table in TABLES:
        _compare(database, store, table)
    return len(ledger)


def _ledger(database: Database) -> list[tuple[Any, ...]]:
    return database.execute("SELECT xid, orders, lines FROM ledger")


def _rows(store: Path, log: str) -> list[tuple[int, int, bytes]]:
    """Epoch, place in it and position of each row of a log."""
    rows: list[tuple[int, int, bytes]] = []
    with open_reader(store) as reader, reader.snapshot() as view:
        shown = LogView.open(view, log)
        for batch in shown.read_range(0, shown.sealed):
            columns = (batch.column(name).to_pylist() for name in ("_epoch", "_seq", "_position"))
            rows += zip(*columns, strict=True)
    return sorted(rows)


def _compare(database: Database, store: Path, name: str) -> None:
    source = open_source(database.dsn, spill=store / "unused")
    (table,) = source.tables([name])
    source.close()
    expected = selected(database, table)
    with open_reader(store) as reader, reader.snapshot() as view:
        found = replay(view, table.full_name).select(expected.schema.names)
    order = [(column, "ascending") for column in table.key_columns]
    assert found.num_rows == expected.num_rows, (name, found.num_rows, expected.num_rows)
    assert found.sort_by(order).cast(expected.schema).equals(expected.sort_by(order)), name

"""The shop of :mod:`tests.crash.capture.shop` on MariaDB and MySQL: each transaction tells the ``ledger`` of itself."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pymysql
from tests.crash.capture.shop import _rows
from tests.db.mysql.running import selected
from tests.servers.mariadb import MariaDbServer

from headwater.capture.replay import replay
from headwater.log_store import LogView
from headwater.sources.open import open_source
from headwater.state import open_reader

TABLES = ("shop.orders", "shop.lines", "shop.ledger")


def make_tables(server: MariaDbServer) -> None:
    server.execute(
        "CREATE DATABASE shop",
        "CREATE TABLE shop.orders (id bigint AUTO_INCREMENT PRIMARY KEY, amount decimal(18,4), customer varchar(40))",
        "CREATE TABLE shop.lines (id bigint AUTO_INCREMENT, line int, note text, PRIMARY KEY (id, line))",
        "CREATE TABLE shop.ledger (id bigint AUTO_INCREMENT PRIMARY KEY, orders int NOT NULL, `lines` int NOT NULL)",
    )


class Writer(threading.Thread):
    """Runs transactions until it is told to end, over any crash of the server.

    :ivar confirmed: the numbers of those whose commit the server confirmed.
    """

    def __init__(self, server: MariaDbServer, seed: str) -> None:
        super().__init__(daemon=True)
        self._server = server
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
                with self._server.connect(autocommit=False) as session:
                    while not self._ended.is_set():
                        self._transact(session)
                        self._ended.wait(self._rng.random() * 0.01)
            except (pymysql.err.Error, OSError):
                time.sleep(0.05)

    def _transact(self, session: pymysql.Connection[Any]) -> None:
        changes: Counter[str] = Counter()
        with session.cursor() as cursor:

            def run(table: str, statement: str, times: int = 1) -> None:
                changes[table] += times * cursor.execute(statement)

            rng = self._rng
            count, one_in = rng.choice((1, 3, 20, 20, 1500)), rng.randint(5, 40)
            orders = ", ".join(f"({rng.random() * 1000:.4f}, 'customer {n}')" for n in range(count))
            run("orders", f"INSERT INTO shop.orders (amount, customer) VALUES {orders}")
            if rng.random() < 0.5:
                run("lines", "INSERT INTO shop.`lines` (line, note) VALUES (1, 'one'), (2, repeat('x', 2000))")
                run("orders", f"UPDATE shop.orders SET amount = amount + 1 WHERE id % {one_in} = 0", 2)
            if rng.random() < 0.3:
                run("lines", f"DELETE FROM shop.`lines` WHERE id % {one_in} = 1")
                run("orders", f"DELETE FROM shop.orders WHERE id % {one_in} = 1")
            if rng.random() < 0.1:
                cursor.execute("SAVEPOINT here")
                cursor.execute("INSERT INTO shop.orders (amount) VALUES (1)")
                cursor.execute("ROLLBACK TO SAVEPOINT here")
            cursor.execute(
                f"INSERT INTO shop.ledger (orders, `lines`) VALUES ({changes['orders']}, {changes['lines']})"
            )
            number = cursor.lastrowid
            session.commit()
        self.confirmed.append(number)


def verify(server: MariaDbServer, store: Path, confirmed: list[int]) -> int:
    """The logs tell the tables, and every transaction once, whole, in order; how many there were.

    :raises AssertionError: they do not.
    """
    rows = server.execute("SELECT id, orders, `lines` FROM shop.ledger")
    ledger = {number: Counter(orders=orders, lines=lines, ledger=1) for number, orders, lines in rows}
    assert set(confirmed) <= ledger.keys(), "a commit that was confirmed is gone from the server"
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


def _numbers(store: Path) -> dict[bytes, int]:
    """The number of a transaction by its place."""
    with open_reader(store) as reader, reader.snapshot() as view:
        shown = LogView.open(view, "shop.ledger")
        batches = list(shown.read_range(0, shown.sealed))
    return {row["_position"][:8]: row["id"] for batch in batches for row in batch.to_pylist()}


def _compare(server: MariaDbServer, store: Path, name: str) -> None:
    source = open_source(server.dsn, spill=store / "unused")
    (table,) = source.tables([name])
    source.close()
    expected = selected(server, table)
    with open_reader(store) as reader, reader.snapshot() as view:
        found = replay(view, table.full_name).select(expected.schema.names)
    order = [(column, "ascending") for column in table.key_columns]
    assert found.num_rows == expected.num_rows, (name, found.num_rows, expected.num_rows)
    assert found.sort_by(order).cast(expected.schema).equals(expected.sort_by(order)), name

"""The shop of :mod:`tests.crash.capture.shop` on SQL Server: each transaction tells the ``ledger`` of itself."""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from pathlib import Path

from tests.crash.capture.shop import _rows
from tests.db.sqlserver.running import selected
from tests.servers.sqlserver import AnySqlServer, track

from headwater.capture.replay import replay
from headwater.log_store import LogView
from headwater.sources.open import open_source
from headwater.state import open_reader

TABLES = ("shop.orders", "shop.lines", "shop.ledger")


def make_tables(server: AnySqlServer) -> None:
    server.execute(
        "CREATE TABLE shop.orders (id bigint NOT NULL PRIMARY KEY, amount decimal(18,4), customer nvarchar(40))",
        "CREATE TABLE shop.lines (id bigint NOT NULL, line int NOT NULL, note nvarchar(100), PRIMARY KEY (id, line))",
        "CREATE TABLE shop.ledger (id bigint NOT NULL PRIMARY KEY, orders int NOT NULL, lines int NOT NULL)",
    )
    track(server, "orders", "lines", "ledger")


class Writer(threading.Thread):
    """Runs transactions until it is told to end. :ivar confirmed: the numbers of those that are committed."""

    def __init__(self, server: AnySqlServer, seed: str, first: int) -> None:
        super().__init__(daemon=True)
        self._server, self._first = server, first
        self._rng = random.Random(seed)
        self._ended = threading.Event()
        self.failure: BaseException | None = None
        self.confirmed: list[int] = []

    def end(self) -> None:
        self._ended.set()
        self.join(60)
        assert not self.is_alive()
        assert self.failure is None, self.failure

    def run(self) -> None:
        number = self._first
        try:
            while not self._ended.is_set():
                number += 1
                self._transact(number)
                self._ended.wait(self._rng.random() * 0.1)
        except BaseException as error:
            self.failure = error

    def _transact(self, number: int) -> None:
        rng = self._rng
        count = rng.choice((1, 3, 20, 100))
        keys = [number * 1000 + n for n in range(count)]
        values = ", ".join(f"({key}, {rng.random() * 1000:.4f}, N'customer {key}')" for key in keys)
        statements = [f"INSERT INTO shop.orders VALUES {values}"]
        changes = Counter(orders=count, lines=0)
        if rng.random() < 0.5:
            statements.append(f"INSERT INTO shop.lines VALUES ({number}, 1, N'one'), ({number}, 2, N'two')")
            statements.append(f"UPDATE shop.orders SET amount = amount + 1 WHERE id BETWEEN {keys[0]} AND {keys[-1]}")
            changes += Counter(orders=2 * count, lines=2)
        if rng.random() < 0.3:
            statements.append(f"DELETE FROM shop.orders WHERE id = {keys[0]}")
            changes["orders"] += 1
        statements.append(f"INSERT INTO shop.ledger VALUES ({number}, {changes['orders']}, {changes['lines']})")
        self._server.execute("BEGIN TRANSACTION; " + "; ".join(statements) + "; COMMIT")
        self.confirmed.append(number)


def verify(server: AnySqlServer, store: Path, confirmed: list[int]) -> int:
    """The logs tell the tables, and every transaction once, whole, in order; how many there were.

    :raises AssertionError: they do not.
    """
    rows = server.execute("SELECT id, orders, lines FROM shop.ledger")
    ledger = {number: Counter(orders=orders, lines=lines, ledger=1) for number, orders, lines in rows}
    assert set(confirmed) == ledger.keys()
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


def _compare(server: AnySqlServer, store: Path, name: str) -> None:
    source = open_source(server.dsn, spill=store / "unused")
    (table,) = source.tables([name])
    source.close()
    expected = selected(server, table)
    with open_reader(store) as reader, reader.snapshot() as view:
        found = replay(view, table.full_name).select(expected.schema.names)
    order = [(column, "ascending") for column in table.key_columns]
    assert found.num_rows == expected.num_rows, (name, found.num_rows, expected.num_rows)
    assert found.sort_by(order).cast(expected.schema).equals(expected.sort_by(order)), name

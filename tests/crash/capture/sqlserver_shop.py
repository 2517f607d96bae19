"""The shop of :mod:`tests.crash.capture.shop` on SQL Server, which is never killed."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from contextlib import AbstractContextManager, nullcontext

import pyarrow as pa
from tests.crash.capture.shop import Shop
from tests.db.sqlserver.running import selected
from tests.servers.sqlserver import AnySqlServer, track

from headwater.sources.table import SourceTable


class SqlServerShop(Shop):
    pause = 0.1

    def __init__(self, server: AnySqlServer) -> None:
        self._server = server
        self._numbers = itertools.count(1)
        super().__init__(server.dsn)

    def make_tables(self) -> None:
        self._server.execute(
            "CREATE TABLE shop.orders (id bigint NOT NULL PRIMARY KEY, amount decimal(18,4), customer nvarchar(40))",
            "CREATE TABLE shop.lines"
            " (id bigint NOT NULL, line int NOT NULL, note nvarchar(100), PRIMARY KEY (id, line))",
            "CREATE TABLE shop.ledger (id bigint NOT NULL PRIMARY KEY, orders int NOT NULL, lines int NOT NULL)",
        )
        track(self._server, "orders", "lines", "ledger")

    def connect(self) -> AbstractContextManager[None]:
        return nullcontext()

    def transact(self, session: None, rng: random.Random) -> int:
        number, count = next(self._numbers), rng.choice((1, 3, 20, 100))
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
        return number

    def ledger(self) -> list[tuple[int, int, int]]:
        return self._server.execute("SELECT id, orders, lines FROM shop.ledger")

    def selected(self, table: SourceTable) -> pa.Table:
        return selected(self._server, table)

"""The shop of :mod:`tests.crash.capture.shop` on MariaDB and MySQL."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pymysql
from tests.crash.capture.shop import Shop
from tests.db.mysql.running import selected
from tests.servers.mariadb import MariaDbServer

from headwater.sources.table import SourceTable

NUMBER = "bigint AUTO_INCREMENT"


class MySqlShop(Shop):
    failures = (pymysql.err.Error, OSError)

    def __init__(self, server: MariaDbServer) -> None:
        self._server = server
        super().__init__(server.dsn)

    def make_tables(self) -> None:
        self._server.execute(
            "CREATE DATABASE shop",
            f"CREATE TABLE shop.orders (id {NUMBER} PRIMARY KEY, amount decimal(18,4), customer varchar(40))",
            f"CREATE TABLE shop.lines (id {NUMBER}, line int, note text, PRIMARY KEY (id, line))",
            f"CREATE TABLE shop.ledger (id {NUMBER} PRIMARY KEY, orders int NOT NULL, `lines` int NOT NULL)",
        )

    def connect(self) -> pymysql.Connection[Any]:
        return self._server.connect(autocommit=False)

    def transact(self, session: pymysql.Connection[Any], rng: random.Random) -> int:
        changes: Counter[str] = Counter()
        with session.cursor() as cursor:

            def run(table: str, statement: str, times: int = 1) -> None:
                changes[table] += times * cursor.execute(statement)

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
            session.commit()
            return int(cursor.lastrowid)

    def ledger(self) -> list[tuple[Any, ...]]:
        return self._server.execute("SELECT id, orders, `lines` FROM shop.ledger")

    def selected(self, table: SourceTable) -> pa.Table:
        return selected(self._server, table)

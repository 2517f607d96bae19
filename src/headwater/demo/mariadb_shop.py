"""The shop of the demo in a MariaDB; see :mod:`headwater.demo.shop`, whose process it is, too.

Run as a process: ``python -m headwater.demo.mariadb_shop SEED RATE``.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from typing import Any, Final

import pymysql

from headwater.databases.mysql import MySqlAddress
from headwater.demo.databases import DSN_VARIABLE
from headwater.demo.pace import TRANSACTIONS_PER_SECOND, paced

TABLES: Final = ("shop.customers", "shop.orders", "shop.order_lines")
ORDERS: Final = "shop.orders"
PROCESS: Final = "headwater.demo.mariadb_shop"

_LINES = 2
_RECENT = 2000

_SCHEMA = (
    "CREATE TABLE shop.customers (id BIGINT PRIMARY KEY, name TEXT NOT NULL, email TEXT,"
    " since TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6))",
    "CREATE TABLE shop.orders (id BIGINT PRIMARY KEY, customer BIGINT NOT NULL, state VARCHAR(20) NOT NULL,"
    " total DECIMAL(12,2), note JSON, at TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6))",
    "CREATE TABLE shop.order_lines (order_id BIGINT, line INT, article CHAR(36), pieces INT, price DECIMAL(10,2),"
    " PRIMARY KEY (order_id, line))",
)


def create(dsn: str, rows: int) -> int:
    """Make the tables, with about *rows* rows of history in all. The number of the last order."""
    orders = max(1, rows * 10 // (10 * (1 + _LINES) + 1))
    customers = max(1, rows - orders * (1 + _LINES))
    with connect(dsn) as session, session.cursor() as cursor:
        for statement in _SCHEMA:
            cursor.execute(statement)
        cursor.execute(
            "INSERT INTO shop.customers SELECT seq, CONCAT('Customer ', seq), CONCAT('c', seq, '@example.com'),"
            f" TIMESTAMP'2024-01-01 00:00:00' + INTERVAL seq MINUTE FROM shop.seq_1_to_{customers}"
        )
        cursor.execute(
            f"INSERT INTO shop.orders SELECT seq, seq % {customers} + 1, ELT(seq % 4 + 1, 'paid', 'sent', 'done',"
            " 'returned'), seq % 1000 * 1.25, JSON_OBJECT('channel', 'web', 'weight', seq % 70),"
            f" TIMESTAMP'2024-01-01 00:00:00' + INTERVAL seq SECOND FROM shop.seq_1_to_{orders}"
        )
        cursor.execute(
            "INSERT INTO shop.order_lines SELECT o.seq, n.seq, UUID(), n.seq * 2, 9.95"
            f" FROM shop.seq_1_to_{orders} o JOIN shop.seq_1_to_{_LINES} n"
        )
    return orders


def connect(dsn: str) -> pymysql.Connection[Any]:
    """A session of the application."""
    socket = MySqlAddress(dsn).options["unix_socket"]
    return pymysql.connect(user="root", unix_socket=socket, autocommit=True, charset="utf8mb4")


def held_bytes(session: pymysql.Connection[Any]) -> int:
    """What the server keeps of its log because of us: nothing, it keeps it by age."""
    return 0


class Application:
    """Orders come, are changed, are moved to another number and go; most of those that change are recent."""

    def __init__(self, session: pymysql.Connection[Any], seed: int, rate: float) -> None:
        self._cursor = session.cursor()
        self._chance = random.Random(seed)
        self._orders = self._last("orders")
        self._customers = self._last("customers")
        self._size = max(8, round(rate / TRANSACTIONS_PER_SECOND))

    def _last(self, table: str) -> int:
        self._cursor.execute(f"SELECT COALESCE(MAX(id), 0) FROM shop.{table}")
        row = self._cursor.fetchone()
        return int(row[0]) if row else 0

    def transaction(self) -> None:
        """One commit of about as many changes as the rate asks for."""
        self._cursor.execute("BEGIN")
        if self._chance.random() < 0.2:
            self._customers += 1
            self._cursor.execute(
                "INSERT INTO shop.customers (id, name, email) VALUES (%s, %s, %s)",
                [self._customers, f"Customer {self._customers}", f"c{self._customers}@example.com"],
            )
        self._new_orders(self._size // 6)
        self._later_changes(self._size // 2)
        self._cursor.execute("COMMIT")

    def _new_orders(self, count: int) -> None:
        first = self._orders + 1
        self._orders += count
        customer = self._chance.randint(1, max(1, self._customers))
        numbers = range(first, self._orders + 1)
        self._cursor.executemany(
            "INSERT INTO shop.orders (id, customer, state, total, note) VALUES (%s, %s, 'new', %s, %s)",
            [(number, customer, number % 1000 * 1.25, '{"channel": "web", "weight": 1.10}') for number in numbers],
        )
        self._cursor.executemany(
            "INSERT INTO shop.order_lines (order_id, line, article, pieces, price) VALUES (%s, %s, UUID(), %s, 9.95)",
            [(number, line, line * 2) for number in numbers for line in range(1, _LINES + 1)],
        )

    def _later_changes(self, count: int) -> None:
        changed = ", ".join(str(self._order()) for _ in range(count))
        self._cursor.execute(
            f"UPDATE shop.orders SET state = 'paid', total = LEAST(total * 1.19, 1e9) WHERE id IN ({changed})"
        )
        self._cursor.execute("DELETE FROM shop.order_lines WHERE order_id = %s AND line = %s", [self._order(), _LINES])
        if self._chance.random() < 0.3:
            self._cursor.execute("UPDATE IGNORE shop.orders SET id = -id WHERE id = %s", [self._order()])
        if self._chance.random() < 0.1:
            self._cursor.execute("DELETE FROM shop.orders WHERE id < 0")

    def _order(self) -> int:
        oldest = 1 if self._chance.random() < 0.02 else max(1, self._orders - _RECENT)
        return self._chance.randint(oldest, max(1, self._orders))


def main() -> None:
    """The process."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with connect(os.environ[DSN_VARIABLE]) as session:
        print(paced(Application(session, int(sys.argv[1]), float(sys.argv[2])).transaction, stop))


if __name__ == "__main__":
    main()

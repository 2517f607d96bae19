"""The shop of the demo: three tables with a history, and an application that goes on writing to them.

Run as a process: ``python -m headwater.demo.shop SEED RATE``, with the connection string in the environment variable
:data:`DSN_VARIABLE`. It writes about RATE changes a second until it is told to stop, and prints how many transactions
it committed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from typing import Final

import psycopg

from headwater.demo.databases import DSN_VARIABLE
from headwater.demo.pace import TRANSACTIONS_PER_SECOND, paced

TABLES: Final = ("public.customers", "public.orders", "public.order_lines")
ORDERS: Final = "public.orders"
PROCESS: Final = "headwater.demo.shop"
_HELD = b"SELECT max(pg_current_wal_lsn() - restart_lsn)::bigint FROM pg_replication_slots"

_LINES = 2
_RECENT = 2000

_SCHEMA = """
CREATE TABLE customers (id bigint, name text NOT NULL, email text, since timestamptz DEFAULT now());
CREATE TABLE orders (id bigint, customer bigint NOT NULL, state text NOT NULL, total numeric(12,2),
                     note jsonb, at timestamptz DEFAULT now());
CREATE TABLE order_lines (order_id bigint, line int, article uuid DEFAULT gen_random_uuid(), pieces int,
                          price numeric(10,2));
"""
_KEYS = """
ALTER TABLE customers ADD PRIMARY KEY (id);
ALTER TABLE orders ADD PRIMARY KEY (id);
ALTER TABLE order_lines ADD PRIMARY KEY (order_id, line);
ANALYZE;
"""
_CUSTOMERS = """
INSERT INTO customers
SELECT i, 'Customer ' || i, 'c' || i || '@example.com', timestamptz '2024-01-01 00:00Z' + i * interval '1 minute'
FROM generate_series(1, %s::bigint) i
"""
_ORDERS = """
INSERT INTO orders
SELECT i, i %% %s + 1, (ARRAY['paid', 'sent', 'done', 'returned'])[i %% 4 + 1], i %% 1000 * 1.25,
       jsonb_build_object('channel', 'web', 'weight', i %% 70),
       timestamptz '2024-01-01 00:00Z' + i * interval '1 second'
FROM generate_series(1, %s::bigint) i
"""
_ORDER_LINES = """
INSERT INTO order_lines
SELECT i, n, md5(i::text || n)::uuid, n * 2, 9.95 FROM generate_series(1, %s::bigint) i, generate_series(1, %s) n
"""


def create(dsn: str, rows: int) -> int:
    """Make the tables, with about *rows* rows of history in all. The number of the last order."""
    orders = max(1, rows * 10 // (10 * (1 + _LINES) + 1))
    customers = max(1, rows - orders * (1 + _LINES))
    with psycopg.connect(dsn, autocommit=True) as session:
        session.execute(_SCHEMA)
        session.execute(_CUSTOMERS, [customers])
        session.execute(_ORDERS, [customers, orders])
        session.execute(_ORDER_LINES, [orders, _LINES])
        session.execute(_KEYS)
    return orders


def connect(dsn: str) -> psycopg.Connection[tuple[object, ...]]:
    """A session of the application."""
    return psycopg.connect(dsn, autocommit=True)


def held_bytes(session: psycopg.Connection[tuple[object, ...]]) -> int:
    """What the server keeps of its log because of us."""
    row = session.execute(_HELD).fetchone()
    return int(str(row[0] or 0)) if row else 0


class Application:
    """Orders come, are changed, are moved to another number and go; most of those that change are recent."""

    def __init__(self, session: psycopg.Connection[tuple[object, ...]], seed: int, rate: float) -> None:
        self._session = session
        self._chance = random.Random(seed)
        self._orders = self._last("orders")
        self._customers = self._last("customers")
        self._size = max(8, round(rate / TRANSACTIONS_PER_SECOND))

    def _last(self, table: str) -> int:
        row = self._session.execute(f"SELECT max(id) FROM {table}".encode()).fetchone()
        return int(str(row[0])) if row and row[0] is not None else 0

    def transaction(self) -> None:
        """One commit of about as many changes as the rate asks for."""
        with self._session.transaction():
            if self._chance.random() < 0.2:
                self._new_customer()
            self._new_orders(self._size // 6)
            self._later_changes(self._size // 2)

    def _new_customer(self) -> None:
        self._customers += 1
        self._session.execute(
            "INSERT INTO customers (id, name, email) VALUES (%s, %s, %s)",
            [self._customers, f"Customer {self._customers}", f"c{self._customers}@example.com"],
        )

    def _new_orders(self, count: int) -> None:
        first = self._orders + 1
        self._orders += count
        self._session.execute(
            "INSERT INTO orders (id, customer, state, total, note) "
            "SELECT i, %s, 'new', i %% 1000 * 1.25, jsonb_build_object('channel', 'web', 'weight', 1.10) "
            "FROM generate_series(%s::bigint, %s::bigint) i",
            [self._chance.randint(1, max(1, self._customers)), first, self._orders],
        )
        self._session.execute(
            "INSERT INTO order_lines (order_id, line, pieces, price) SELECT i, n, n * 2, 9.95 "
            "FROM generate_series(%s::bigint, %s::bigint) i, generate_series(1, %s) n",
            [first, self._orders, _LINES],
        )

    def _later_changes(self, count: int) -> None:
        self._session.execute(
            "UPDATE orders SET state = 'paid', total = least(total * 1.19, 1e9) WHERE id = ANY(%s)",
            [[self._order() for _ in range(count)]],
        )
        self._session.execute("DELETE FROM order_lines WHERE order_id = %s AND line = %s", [self._order(), _LINES])
        if self._chance.random() < 0.3:
            self._session.execute("UPDATE orders SET id = -id WHERE id = %s", [self._order()])
        if self._chance.random() < 0.1:
            self._session.execute("DELETE FROM orders WHERE id < 0")

    def _order(self) -> int:
        oldest = 1 if self._chance.random() < 0.02 else max(1, self._orders - _RECENT)
        return self._chance.randint(oldest, max(1, self._orders))


def write(dsn: str, seed: int, rate: float, stop: threading.Event) -> int:
    """Write until *stop*, at an even pace. How many transactions were committed."""
    with connect(dsn) as session:
        return paced(Application(session, seed, rate).transaction, stop)


def main() -> None:
    """The process."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print(write(os.environ[DSN_VARIABLE], int(sys.argv[1]), float(sys.argv[2]), stop))


if __name__ == "__main__":
    main()

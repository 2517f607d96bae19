"""The shop of the demo: three tables, and an application that never stops writing to them.

Run as a process: ``python -m headwater.demo.shop DSN SEED``; it writes until it is told to stop, and prints how many
transactions it committed.
"""

from __future__ import annotations

import random
import signal
import sys
import threading

import psycopg

TABLES = ("public.customers", "public.orders", "public.order_lines")

_SCHEMA = """
CREATE TABLE customers (id bigint PRIMARY KEY, name text NOT NULL, email text, since timestamptz DEFAULT now());
CREATE TABLE orders (id bigint PRIMARY KEY, customer bigint NOT NULL, state text NOT NULL, total numeric(12,2),
                     note jsonb, at timestamptz DEFAULT now());
CREATE TABLE order_lines (order_id bigint, line int, article uuid DEFAULT gen_random_uuid(), pieces int,
                          price numeric(10,2), PRIMARY KEY (order_id, line));
"""


def create(dsn: str) -> None:
    """Make the tables."""
    with psycopg.connect(dsn, autocommit=True) as session:
        session.execute(_SCHEMA)


def write(dsn: str, seed: int, stop: threading.Event) -> int:
    """Write until *stop*: orders come, change, move to another number and go. How many transactions were committed."""
    chance = random.Random(seed)
    committed, customer, order = 0, 0, 0
    with psycopg.connect(dsn, autocommit=True) as session:
        while not stop.is_set():
            first, count = order + 1, chance.randint(1, 20)
            order += count
            with session.transaction():
                if customer < 10 or chance.random() < 0.3:
                    customer += 1
                    session.execute(
                        "INSERT INTO customers (id, name, email) VALUES (%s, %s, %s)",
                        [customer, f"Customer {customer}", f"c{customer}@example.com"],
                    )
                _new_orders(session, first, count, chance.randint(1, customer))
                _later_changes(session, chance, order)
            committed += 1
    return committed


def _new_orders(session: psycopg.Connection[tuple[object, ...]], first: int, count: int, customer: int) -> None:
    session.execute(
        "INSERT INTO orders (id, customer, state, total, note) "
        "SELECT i, %s, 'new', i %% 1000 * 1.25, jsonb_build_object('channel', 'web', 'weight', 1.10) "
        "FROM generate_series(%s::bigint, %s::bigint) i",
        [customer, first, first + count - 1],
    )
    session.execute(
        "INSERT INTO order_lines (order_id, line, pieces, price) SELECT i, n, n * 2, 9.95 "
        "FROM generate_series(%s::bigint, %s::bigint) i, generate_series(1, 3) n",
        [first, first + count - 1],
    )


def _later_changes(session: psycopg.Connection[tuple[object, ...]], chance: random.Random, order: int) -> None:
    chosen = chance.randint(1, order)
    session.execute(
        "UPDATE orders SET state = 'paid', total = total * 1.19 WHERE id BETWEEN %s AND %s + 5", [chosen] * 2
    )
    if chance.random() < 0.3:
        session.execute("DELETE FROM order_lines WHERE order_id = %s AND line = 3", [chosen])
    if chance.random() < 0.1:
        session.execute("UPDATE orders SET id = -id WHERE id = %s", [chosen])
    if chance.random() < 0.05:
        session.execute("DELETE FROM orders WHERE id < 0")


def main() -> None:
    """The process."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    print(write(sys.argv[1], int(sys.argv[2]), stop))


if __name__ == "__main__":
    main()

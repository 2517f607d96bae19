"""A table of MySQL or MariaDB whose history is read, and somebody who writes meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.db.writing import writing
from tests.servers.mariadb import MariaDbServer

TABLE = "shop.orders"


def create(server: MariaDbServer, rows: int = 3000) -> None:
    server.execute("CREATE TABLE shop.orders (id BIGINT PRIMARY KEY, state VARCHAR(9), total DECIMAL(10,2), note TEXT)")
    for first in range(0, rows, 1000):
        values = ", ".join(f"({n * 3}, 'new', {n}, 'xxxxxxxx')" for n in range(first + 1, min(first + 1000, rows) + 1))
        server.execute(f"INSERT INTO shop.orders VALUES {values}")


@contextmanager
def writer(server: MariaDbServer, pause: float = 0.002) -> Iterator[None]:
    """Somebody who writes all the time: new rows, updates, deletes, other keys."""
    with server.connect() as session, session.cursor() as cursor:

        def write(number: int) -> None:
            at = number * 37 % 9000
            cursor.execute("BEGIN")
            cursor.execute(
                f"INSERT INTO shop.orders VALUES ({at * 3 + 1}, 'live', {number}, 'a')"
                f" ON DUPLICATE KEY UPDATE total = {number}"
            )
            cursor.execute(
                f"UPDATE shop.orders SET state = 'paid', total = {number} WHERE id BETWEEN {at} AND {at + 20}"
            )
            cursor.execute(f"DELETE FROM shop.orders WHERE id = {at + 3}")
            cursor.execute("COMMIT")
            cursor.execute(f"UPDATE IGNORE shop.orders SET id = id + 100000 WHERE id = {at + 30}")

        with writing(write, pause):
            yield

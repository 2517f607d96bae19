"""A process that changes the table at a steady rate, and reports when it sent the commit of each transaction.

A transaction has ten changes: two inserts, one delete of an earlier insert, and seven updates of random rows. Each row
is as likely as any other; the random numbers are the same in each run. The last update sets ``quantity`` to a number
that only grows: the greatest one in a mirror shows up to which transaction it has them.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psycopg

from _backfill_table import Orders

CHANGES = 10
UPDATES = 7
FIRST_STAMP = 1_000_000


@dataclass(frozen=True, slots=True)
class Commits:
    """When transactions were committed, in seconds of the clock on the wall; number *n* has the stamp first + n."""

    times: list[float]
    first: int

    @property
    def next_stamp(self) -> int:
        return self.first + len(self.times)

    def before(self, stamp: int) -> int:
        """How many transactions a mirror has whose greatest stamp is *stamp*."""
        return max(0, stamp - self.first + 1)

    def rate_since(self, moment: float) -> float:
        """Changes per second from *moment* on."""
        times = [time for time in self.times if time > moment]
        return CHANGES * (len(times) - 1) / (times[-1] - times[0])


class LiveWriter:
    """Writes from its entry until :meth:`stop`.

    :param span: only the last *span* rows of the table are updated. :param first: its first stamp.
    """

    def __init__(
        self, orders: Orders, changes_per_second: int, folder: Path, *, span: int, first: int = FIRST_STAMP
    ) -> None:
        self._output = folder / f"commits{first}.json"
        self._order = {
            "dsn": orders.database.dsn,
            "table": orders.name,
            "rows": orders.rows,
            "span": span,
            "first": first,
            "rate": changes_per_second / CHANGES,
            "output": str(self._output),
        }

    def __enter__(self) -> Self:
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._order))
        self._process.stdin.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> Commits:
        """Stop it. :returns: what it committed."""
        self._process.terminate()
        if self._process.wait():
            raise RuntimeError(f"The writer ended with {self._process.returncode}.")
        return Commits(json.loads(self._output.read_text()), int(str(self._order["first"])))


def updated_rows(rows: int, span: int, seed: int) -> Iterator[list[int]]:
    """The ids that each transaction updates: random ones of the last *span* of the ids up to *rows*."""
    chance = random.Random(seed)
    while True:
        yield chance.sample(range(rows - span + 1, rows + 1), UPDATES)


def _write(dsn: str, table: str, rows: int, span: int, first: int, rate: float, output: str) -> None:
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    times: list[float] = []
    updated = updated_rows(rows, span, first)
    columns = "price, customer, note, created, changed, details, open, token"
    insert = (
        f"INSERT INTO {table} (id, quantity, {columns}) "
        f"SELECT new, 0, {columns} FROM {table}, unnest(%s::bigint[]) new WHERE id = %s"
    )
    with psycopg.connect(dsn) as session:
        start, number = time.monotonic(), 0
        while not stopped:
            row, *others = next(updated)
            new = rows + 1 + 2 * (first - FIRST_STAMP + number)
            session.execute(insert, [[new, new + 1], row])
            session.execute(f"DELETE FROM {table} WHERE id = %s", [new - 2])
            session.execute(f"UPDATE {table} SET changed = now() WHERE id = ANY(%s)", [others])
            session.execute(f"UPDATE {table} SET quantity = %s WHERE id = %s", [first + number, row])
            times.append(time.time())
            session.commit()
            number += 1
            time.sleep(max(0.0, start + number / rate - time.monotonic()))
    Path(output).write_text(json.dumps(times))


if __name__ == "__main__":
    _write(**json.load(sys.stdin))

"""A process that changes the table at a steady rate, and tells when each of its transactions was committed.

A transaction has ten changes: two inserts, one delete of an earlier insert, seven updates. The last update sets
``quantity`` to a number that only grows: the greatest one in a mirror tells up to which transaction it has them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

CHANGES = 10
FIRST_STAMP = 1_000_000


@dataclass(frozen=True, slots=True)
class Commits:
    """When the transactions were committed, in seconds of the clock on the wall; the number *n* is stamp first + n."""

    times: list[float]

    def before(self, stamp: int) -> int:
        """How many transactions a mirror has whose greatest stamp is *stamp*."""
        return max(0, stamp - FIRST_STAMP + 1)


@contextmanager
def live_writes(dsn: str, table: str, rows: int, changes_per_second: int, folder: Path) -> Iterator[list[Commits]]:
    """Write while it is open; the list has the commits afterwards."""
    output = folder / "commits.json"
    order = {"dsn": dsn, "table": table, "rows": rows, "rate": changes_per_second / CHANGES, "output": str(output)}
    process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    process.stdin.write(json.dumps(order))
    process.stdin.close()
    made: list[Commits] = []
    try:
        yield made
        if process.poll() is not None:
            raise RuntimeError(f"The writer ended with {process.returncode}.")
    finally:
        process.terminate()
        process.wait()
    made.append(Commits(json.loads(output.read_text())))


def _write(dsn: str, table: str, rows: int, rate: float, output: str) -> None:
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    times: list[float] = []
    columns = "price, customer, note, created, changed, details, open, token"
    insert = (
        f"INSERT INTO {table} (id, quantity, {columns}) "
        f"SELECT new, 0, {columns} FROM {table}, unnest(%s::bigint[]) new WHERE id = %s"
    )
    with psycopg.connect(dsn) as session:
        session.execute("SET synchronous_commit = off")
        session.commit()
        start, number = time.monotonic(), 0
        while not stopped:
            row = (number * 7919 * (CHANGES - 3)) % (rows - CHANGES) + 1
            new = rows + 1 + 2 * number
            session.execute(insert, [[new, new + 1], row])
            session.execute(f"DELETE FROM {table} WHERE id = %s", [new - 2])
            session.execute(f"UPDATE {table} SET changed = now() WHERE id > %s AND id <= %s", [row, row + CHANGES - 4])
            session.execute(f"UPDATE {table} SET quantity = %s WHERE id = %s", [FIRST_STAMP + number, row])
            session.commit()
            times.append(time.time())
            number += 1
            time.sleep(max(0.0, start + number / rate - time.monotonic()))
    Path(output).write_text(json.dumps(times))


if __name__ == "__main__":
    _write(**json.load(sys.stdin))

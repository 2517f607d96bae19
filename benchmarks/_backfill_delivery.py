"""One delivery of a table by a pipeline, timed from outside: by what its sink shows, and by what its slot holds."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Self

from _backfill_table import Orders
from _harness import Speed
from headwater.pipeline.pipeline import Pipeline

_LOOK_SECONDS = 0.2
_WAIT_SECONDS = 1800.0
_BATCHES = 2
_numbers = count(1)


class Delivery:
    """A pipeline that runs in a session, for one table and one sink.

    :param options: of the sink; without any the sink is a directory in *folder*.
    """

    def __init__(self, spark: Any, orders: Orders, kind: str, folder: Path, **options: Any) -> None:
        self.name = f"bench{next(_numbers)}"
        self.orders = orders
        self.target = folder / self.name / "sink"
        self._kind, self._spark = kind, spark
        source = {"dsn": orders.database.dsn, "tables": [orders.full_name], "slot": self.name, "publication": self.name}
        self._pipeline = Pipeline(source, store=folder / self.name / "store", name=self.name)
        self._pipeline.sink(kind, **(options or {"path": self.target}))
        self._began = 0.0

    def __enter__(self) -> Self:
        self._began = time.time()
        self._pipeline.start(self._spark)
        return self

    def __exit__(self, *_: object) -> None:
        self._pipeline.stop()
        forget_slot(self.orders, self.name)

    def wait_for_rows(self) -> Speed:
        """Wait until the sink, a directory, shows all rows of a table that no session changes."""
        table = self.target / self.orders.full_name
        end = time.monotonic() + _WAIT_SECONDS
        while True:
            self._check(end)
            batches = _visible_batches(table, self._kind)
            rows = sum(rows for _, rows in batches)
            if rows > self.orders.rows:
                raise RuntimeError(f"{rows} rows were delivered, not {self.orders.rows}.")
            if rows == self.orders.rows:
                return Speed.of_batches(self._began, batches)
            time.sleep(_LOOK_SECONDS)

    def wait_for_history(self) -> None:
        """Wait until changes alone flow."""
        end = time.monotonic() + _WAIT_SECONDS
        while not self._pipeline.status().is_live:
            self._check(end)
            time.sleep(_LOOK_SECONDS)

    def wait_until_live(self) -> None:
        """Wait until changes alone flow, and two batches of them are over: what waited in the log is delivered."""
        self.wait_for_history()
        end = time.monotonic() + _WAIT_SECONDS
        enough = self._batches() + _BATCHES
        while self._batches() < enough:
            self._check(end)
            time.sleep(_LOOK_SECONDS)

    def _batches(self) -> int:
        return self._pipeline.status().sinks[0].batches

    def _check(self, end: float) -> None:
        if self._pipeline.wait(0) or time.monotonic() > end:
            raise RuntimeError(f"The pipeline did not go on: {self._pipeline.status()}")


def _visible_batches(table: Path, kind: str) -> list[tuple[float, int]]:
    """When each batch with rows became visible, in seconds since 1970, and its rows.

    A commit is one file, which has its name from the moment on in which the batch is visible.
    """
    folder, rows_of = {"delta": ("_delta_log", _delta_rows), "parquet": ("_headwater", _parquet_rows)}[kind]
    commits = sorted((table / folder).glob("[0-9]*.json"))
    batches = [(commit.stat().st_ctime, rows_of(commit.read_text())) for commit in commits]
    return [(moment, rows) for moment, rows in batches if rows]


def _delta_rows(commit: str) -> int:
    adds = [action["add"] for action in map(json.loads, commit.splitlines()) if "add" in action]
    return sum(json.loads(add["stats"])["numRecords"] for add in adds if add["dataChange"])


def _parquet_rows(commit: str) -> int:
    manifest = json.loads(commit)
    return 0 if manifest["removed"] else sum(file["rows"] for file in manifest["files"])


def forget_slot(orders: Orders, name: str) -> None:
    """Drop the slot and the publication *name*, once no process uses them."""
    drop = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active AND slot_name = '{}'"
    end = time.monotonic() + 30
    while orders.database.value(f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{name}'"):
        orders.database.execute(drop.format(name))
        if time.monotonic() > end:
            raise RuntimeError(f"Slot {name} is still in use.")
        time.sleep(_LOOK_SECONDS)
    orders.database.execute(f"DROP PUBLICATION IF EXISTS {name}")


@contextmanager
def watched_slot(orders: Orders, slot: str) -> Iterator[list[int]]:
    """While it is open, look how much log the server keeps for *slot*; the list holds one number: the most so far."""
    ended = threading.Event()
    most = [0]
    query = (
        "SELECT coalesce(max(pg_wal_lsn_diff(pg_current_wal_insert_lsn(), restart_lsn)), 0)::bigint "
        f"FROM pg_replication_slots WHERE slot_name = '{slot}'"
    )

    def watch() -> None:
        with orders.database.connect() as session:
            while not ended.wait(_LOOK_SECONDS):
                row = session.execute(query.encode()).fetchone()
                most[0] = max(most[0], int(row[0]) if row else 0)

    thread = threading.Thread(target=watch, name="slot", daemon=True)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()

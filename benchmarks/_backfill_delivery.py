"""One delivery of a table by a pipeline, timed from outside: what its query told, and what its slot held."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Self

from _backfill_table import Orders
from headwater.backfill.control import status
from headwater.pipeline.pipeline import Pipeline

_LOOK_SECONDS = 0.2
_WAIT_SECONDS = 1800.0
_BATCHES = 2
_numbers = count(1)


class Delivery:
    """A pipeline that runs in a session, for one table and one sink.

    :param options: of the sink; by themselves it is a directory in *folder*.
    :ivar began: when its query was first seen, in seconds of the clock on the wall.
    """

    def __init__(self, spark: Any, orders: Orders, kind: str, folder: Path, **options: Any) -> None:
        self.name = f"bench{next(_numbers)}"
        self.orders = orders
        self.target = folder / self.name / "sink"
        self._spark = spark
        self._query: Any = None
        source = {"dsn": orders.database.dsn, "tables": [orders.full_name], "slot": self.name, "publication": self.name}
        self._pipeline = Pipeline(source, store=folder / self.name / "store", name=self.name)
        self._pipeline.sink(kind, **(options or {"path": self.target}))
        self.began = 0.0

    def __enter__(self) -> Self:
        self._pipeline.start(self._spark)
        end = time.monotonic() + 60
        while self._query is None:
            self._check(end)
            self._query = next((one for one in self._spark.streams.active if one.name.startswith(self.name)), None)
            time.sleep(0.005)
        self.began = time.time()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipeline.stop()
        forget_slot(self.orders, self.name)

    def wait_for_history(self) -> float:
        """Until all history is delivered; the seconds from the start of the query to the end of its last batch."""
        end = time.monotonic() + _WAIT_SECONDS
        while True:
            self._check(end)
            told = status(self._pipeline.config.store, self._pipeline.config.query(self._pipeline.config.sink[0]))
            batches = self._history_batches()
            if told is not None and batches and _is_delivered(told.value, batches[-1]):
                return max(map(_ended, batches)) - self.began
            time.sleep(_LOOK_SECONDS)

    def history_seconds(self) -> float:
        """What the batches that had history took, without the start of the query."""
        return float(sum(batch["durationMs"]["triggerExecution"] for batch in self._history_batches())) / 1000

    def wait_until_live(self) -> None:
        """Until changes alone flow, and two batches of them are over: what had waited in the log is delivered."""
        end = time.monotonic() + _WAIT_SECONDS
        while not self._pipeline.status().is_live:
            self._check(end)
            time.sleep(_LOOK_SECONDS)
        enough = len(self.batches()) + _BATCHES
        while len(self.batches()) < enough:
            self._check(end)
            time.sleep(_LOOK_SECONDS)

    def batches(self) -> list[Any]:
        """What Spark told of each batch."""
        return list(self._query.recentProgress)

    def _history_batches(self) -> list[Any]:
        return [one for one in self.batches() if _offset(one, "endOffset")["p"] > _offset(one, "startOffset")["p"]]

    def _check(self, end: float) -> None:
        if self._pipeline.wait(0) or time.monotonic() > end:
            raise RuntimeError(f"The pipeline did not go on: {self._pipeline.status()}")


def _is_delivered(told: dict[str, Any], last: Any) -> bool:
    is_read = all(table["phase"] in ("settling", "done") for table in told["tables"].values())
    return is_read and bool(_offset(last, "endOffset")["p"] >= told["plan"])


def _offset(progress: Any, which: str) -> dict[str, int]:
    told = progress["sources"][0][which]
    found = json.loads(told) if isinstance(told, str) else told
    return found or {"e": 0, "p": 0}


def _ended(progress: Any) -> float:
    started = datetime.fromisoformat(progress["timestamp"]).timestamp()
    return float(started + progress["durationMs"]["triggerExecution"] / 1000)


def forget_slot(orders: Orders, name: str) -> None:
    """Drop the slot and the publication *name*, once nobody uses them."""
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
    """While it is open, how much log the server keeps for *slot*; the list has one number afterwards: the most."""
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

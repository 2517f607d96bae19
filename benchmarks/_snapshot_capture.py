"""A capture at a steady load, alone and beside a new downstream that reads its history from a kept table.

The capture is a process of its own, as ``headwater capture`` runs it; so is the one that writes. The downstream is what
a new sink of files does: the whole table as of an epoch, through Spark, into Parquet, again and again. On a full
machine the one that writes becomes slower, too: what is compared is the share of its changes that is durable in time.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _backfill_table import Orders
from _backfill_writer import CHANGES, Commits, LiveWriter
from _harness import Figure
from _kept_table import KeptOrders
from _servers import Database
from _snapshot_spark import kept_rows
from headwater.log_store import LogView
from headwater.log_store.errors import LogNotFound
from headwater.state import open_reader
from headwater.state.errors import StoreNotFound

CHANGES_PER_SECOND = 2_000
_DRAINED_BYTES = 512 << 10


def beside_capture(spark: Any, kept: KeptOrders, orders: Orders, folder: Path, seconds: float, turns: int) -> Figure:
    """The share of the committed changes that is durable in time: *turns* times alone and beside the downstream."""
    store = folder / "capture"
    command = [sys.executable, "-m", "headwater.cli.main", "capture", orders.database.dsn, "--store", str(store)]
    windows: list[tuple[bool, Window]] = []
    with subprocess.Popen([*command, "--table", orders.full_name], stderr=subprocess.DEVNULL) as capture:
        try:
            with LiveWriter(orders, CHANGES_PER_SECOND, folder, span=orders.rows) as writer:
                _wait_for_changes(store, orders.full_name)
                for is_beside in (False, True, True, False, False, True)[: 2 * turns]:
                    windows.append((is_beside, _window(spark, kept, folder, store, orders, seconds, is_beside)))
                commits = writer.stop()
        finally:
            capture.terminate()
    alone, beside = (_share([one for is_one, one in windows if is_one is wanted], commits) for wanted in (False, True))
    name = "share of the changes that is captured in time, beside a new downstream / alone"
    return Figure(name, beside, alone, 0.9, "higher", runs=turns)


@dataclass(frozen=True, slots=True)
class Window:
    """What was captured from one time to another, in seconds of the clock on the wall."""

    start: float
    end: float
    changes: int


def _share(windows: list[Window], commits: Commits) -> float:
    committed = sum(CHANGES for one in windows for moment in commits.times if one.start <= moment < one.end)
    return sum(one.changes for one in windows) / committed


def _window(
    spark: Any, kept: KeptOrders, folder: Path, store: Path, orders: Orders, seconds: float, is_beside: bool
) -> Window:
    ended = threading.Event()

    def downstream() -> None:
        while not ended.is_set():
            kept_rows(spark, kept).write.mode("overwrite").parquet(str(folder / "downstream"))

    _wait_until_drained(orders.database)
    thread = threading.Thread(target=downstream, daemon=True)
    if is_beside:
        thread.start()
        time.sleep(1.0)
    start, before = time.time(), _changes(store, orders.full_name)
    time.sleep(seconds)
    made = Window(start, time.time(), _changes(store, orders.full_name) - before)
    ended.set()
    if is_beside:
        thread.join()
    return made


def _changes(store: Path, log: str) -> int:
    with open_reader(store) as reader, reader.snapshot() as view:
        return sum(end.rows for end in LogView.open(view, log).epochs())


def _wait_until_drained(database: Database) -> None:
    """Until the capture has all but the last moment of what was committed."""
    behind = (
        "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), confirmed_flush_lsn)::bigint FROM pg_replication_slots"
    )
    end = time.monotonic() + 60
    while int(database.value(behind)) > _DRAINED_BYTES:
        if time.monotonic() > end:
            raise RuntimeError("The capture does not keep up.")
        time.sleep(0.02)


def _wait_for_changes(store: Path, log: str) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if _changes(store, log):
                return
        except (StoreNotFound, LogNotFound):
            pass
        time.sleep(0.1)
    raise RuntimeError("The capture did not begin.")

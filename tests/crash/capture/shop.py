"""A shop whose transactions are known: writers at random, and what the logs of its tables must tell afterwards.

Each transaction leaves a row in ``ledger``: its number, and how many changes of ``orders`` and ``lines`` it made. So
the database itself tells, after any crash, which transactions there were; the writers remember those whose commit was
confirmed. What differs from one kind of database to another is a :class:`Shop` of each.
"""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from tests.crash.capture.capture_process import CaptureProcess, wait_for
from tests.replay import replay

from headwater.log_store import LogView
from headwater.sources.offset import CdcOffset
from headwater.sources.open import open_source
from headwater.sources.table import SourceTable
from headwater.state import open_reader


class Shop(ABC):
    """The shop in one kind of database.

    :cvar schema: of its tables, as their logs name it.
    :cvar number: the column of ``ledger`` with the number of a transaction.
    :cvar place: the bytes of a row's position that are those of its transaction.
    :cvar failures: what a session fails with when the server is killed; none: this one never is.
    :cvar pause: seconds, at the most, that a writer waits after a transaction.
    :cvar columns: of collections without a schema.
    """

    schema: ClassVar[str] = "shop"
    number: ClassVar[str] = "id"
    place: ClassVar[slice] = slice(8)
    failures: ClassVar[tuple[type[Exception], ...]] = ()
    pause: ClassVar[float] = 0.01
    columns: ClassVar[Mapping[str, str]] = {}

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.tables = tuple(f"{self.schema}.{name}" for name in ("orders", "lines", "ledger"))

    @abstractmethod
    def make_tables(self) -> None: ...

    @abstractmethod
    def connect(self) -> AbstractContextManager[Any]:
        """A session for transactions, one after the other."""

    @abstractmethod
    def transact(self, session: Any, rng: random.Random) -> Hashable:
        """A transaction at random, committed; its number."""

    @abstractmethod
    def ledger(self) -> Sequence[tuple[Hashable, int, int]]:
        """Of each transaction its number, and its changes of ``orders`` and ``lines``."""

    @abstractmethod
    def selected(self, table: SourceTable) -> pa.Table:
        """The rows of a table as the server has them now."""

    def numbers(self, store: Path) -> dict[bytes, Hashable]:
        """The number of each transaction by its place, as the log of ``ledger`` tells it."""
        told = rows(store, f"{self.schema}.ledger", self.number)
        return {row["_position"][self.place]: row[self.number] for row in told}


class ShopProcess(CaptureProcess):
    """One capture of a shop, whose server's log ends now where *end_of_log* tells."""

    def __init__(self, shop: Shop, folder: Path, end_of_log: Callable[[], CdcOffset]) -> None:
        self._shop, self._end_of_log = shop, end_of_log
        super().__init__(shop, folder, shop.tables)

    def start(self, *arguments: str, armed: str = "") -> None:
        columns = [part for name, text in self._shop.columns.items() for part in ("--columns", f"{name}={text}")]
        super().start(*columns, *arguments, armed=armed)

    def catch_up(self) -> None:
        target = self._end_of_log()

        def is_there() -> bool:
            offset = self.offset()
            return self.runs() and offset is not None and offset >= target

        wait_for(is_there, "the capture to come to the end of the log")


class Writer(threading.Thread):
    """Runs transactions until it is told to end, over any crash of the server.

    :ivar confirmed: the numbers of those whose commit the server confirmed.
    """

    def __init__(self, shop: Shop, seed: str) -> None:
        super().__init__(daemon=True)
        self._shop = shop
        self._rng = random.Random(seed)
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self.confirmed: list[Hashable] = []

    def end(self) -> None:
        """:raises AssertionError: it had failed, and not by a crash of the server."""
        self._ended.set()
        self.join(60)
        assert not self.is_alive()
        assert self._failure is None, self._failure

    def run(self) -> None:
        try:
            while not self._ended.is_set():
                try:
                    with self._shop.connect() as session:
                        self._write(session)
                except self._shop.failures:
                    time.sleep(0.05)
        except BaseException as error:
            self._failure = error

    def _write(self, session: Any) -> None:
        while not self._ended.is_set():
            self.confirmed.append(self._shop.transact(session, self._rng))
            self._ended.wait(self._rng.random() * self._shop.pause)


def rows(store: Path, log: str, *columns: str) -> list[dict[str, Any]]:
    """Epoch and position of each row of a log, and some of its columns, in its order."""
    names = ["_epoch", "_seq", "_position", *columns]
    with open_reader(store) as reader, reader.snapshot() as view:
        shown = LogView.open(view, log)
        found = [row for batch in shown.read_range(0, shown.sealed) for row in batch.select(names).to_pylist()]
    return sorted(found, key=lambda row: (row["_epoch"], row["_seq"]))


def verify(shop: Shop, store: Path, confirmed: Sequence[Hashable]) -> int:
    """The logs tell the tables, and every transaction once, whole, in order; how many there were.

    :raises AssertionError: they do not.
    """
    ledger = {number: Counter(orders=orders, lines=lines, ledger=1) for number, orders, lines in shop.ledger()}
    assert set(confirmed) <= ledger.keys(), "a commit that was confirmed is gone from the server"
    assert shop.failures or set(confirmed) == ledger.keys(), "every commit is confirmed by a server that lives"
    found: defaultdict[bytes, Counter[str]] = defaultdict(Counter)
    epochs: defaultdict[bytes, set[int]] = defaultdict(set)
    positions: list[bytes] = []
    for table in shop.tables:
        told = rows(store, table)
        own = [row["_position"] for row in told]
        assert own == sorted(own), f"{table}: the order of the log is not that of the commits"
        positions += own
        for row in told:
            place = row["_position"][shop.place]
            found[place][table.removeprefix(f"{shop.schema}.")] += 1
            epochs[place].add(row["_epoch"])
    assert len(positions) == len(set(positions)), "a change came twice"
    assert all(len(seen) == 1 for seen in epochs.values()), "transactions in more than one epoch"
    numbers = shop.numbers(store)
    assert {numbers[place]: +counts for place, counts in found.items()} == {
        number: +counts for number, counts in ledger.items()
    }
    for table in shop.tables:
        _compare(shop, store, table)
    return len(ledger)


def _compare(shop: Shop, store: Path, name: str) -> None:
    source = open_source(shop.dsn, spill=store / "unused", columns=shop.columns)
    (table,) = source.tables([name])
    source.close()
    expected = shop.selected(table)
    with open_reader(store) as reader, reader.snapshot() as view:
        found = replay(view, table.full_name).select(expected.schema.names)
    order = [(column, "ascending") for column in table.key_columns]
    assert found.num_rows == expected.num_rows, (name, found.num_rows, expected.num_rows)
    assert found.sort_by(order).cast(expected.schema).equals(expected.sort_by(order)), name

"""Kept tables on Spark: as of any epoch, net changes between two, while somebody writes and runs are merged."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.servers.postgres import Database
from tests.spark.driven import source_of
from tests.spark.keeper import Keeper

from headwater.log_store.errors import EpochGone
from headwater.spark import kept_reader
from headwater.versioned import VersionedTable
from headwater.versioned.folder import TableFolder
from headwater.versioned.pins import pins_in

LEFT, RIGHT = "public.accounts", "public.savings"
ACCOUNTS, MONEY = 200, 1000


class Transfers:
    """Moves money between two tables, a transaction each, until it is told to stop."""

    def __init__(self, database: Database, seed: int = 7) -> None:
        self._database, self._random = database, random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with psycopg.connect(self._database.dsn, autocommit=True) as session:
            while not self._stop.wait(0.01):
                one, other = self._random.sample((LEFT, RIGHT), 2)
                amount, a, b = self._random.randrange(50), *self._random.choices(range(ACCOUNTS), k=2)
                with session.transaction():
                    session.execute(f"UPDATE {one} SET amount = amount - %s WHERE id = %s", [amount, a])
                    session.execute(
                        f"INSERT INTO {other} VALUES (%s, %s, 'new') ON CONFLICT (id) DO UPDATE "
                        f"SET amount = {other}.amount + EXCLUDED.amount",
                        [b, amount],
                    )
                    if self._random.random() < 0.2:
                        session.execute(f"DELETE FROM {one} WHERE id = %s AND amount = 0", [a])

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)


@pytest.fixture
def keeper(newest_postgres: Database, tmp_path: Path) -> Iterator[Keeper]:
    newest_postgres.execute(
        f"CREATE TABLE {LEFT} (id int PRIMARY KEY, amount bigint, name text)",
        f"CREATE TABLE {RIGHT} (id int PRIMARY KEY, amount bigint, name text)",
    )
    made = Keeper(newest_postgres, tmp_path, [LEFT, RIGHT])
    yield made
    made.close()


def fill(database: Database) -> None:
    with database.connect() as session, session.transaction():
        for table in (LEFT, RIGHT):
            session.execute(
                f"INSERT INTO {table} SELECT n, {MONEY}, 'row ' || n FROM generate_series(0, {ACCOUNTS - 1}) n"
            )


def read(spark: Any, keeper: Keeper, table: str, **options: object) -> Any:
    reader = spark.read.format("headwater").option("table", table).option("store", keeper.store)
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load()


def rows(frame: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in frame.collect())


def test_any_epoch_is_a_consistent_cut_while_a_writer_goes_on_and_runs_are_merged(
    spark: Any, keeper: Keeper, newest_postgres: Database
) -> None:
    """Epoch consistency across tables: money moves between two tables, and its sum is one at every epoch."""
    fill(newest_postgres)
    first = keeper.catch_up()
    writer = Transfers(newest_postgres)
    for _ in range(4):
        time.sleep(0.3)
        keeper.fold()
    keeper.fold_on()
    seen: list[tuple[int, list[Any]]] = []
    try:
        for _ in range(3):
            with keeper.table(LEFT).pin("test") as pin, keeper.table(RIGHT).pin("test", pin.epoch):
                frames = [read(spark, keeper, table, asOfEpoch=pin.epoch, parallelism=2) for table in (LEFT, RIGHT)]
                seen.append((pin.epoch, [rows(frame) for frame in frames]))
                time.sleep(0.5)
    finally:
        writer.stop()
    assert keeper.folds >= 2
    assert len({epoch for epoch, _ in seen}) == 3
    for epoch, found in seen:
        assert found == [keeper.model(LEFT, epoch), keeper.model(RIGHT, epoch)]
        assert sum(row[1] for table in found for row in table) == 2 * ACCOUNTS * MONEY
    last = keeper.catch_up()
    base = keeper.table(LEFT).base_epoch
    assert first < base < last
    with pytest.raises(EpochGone, match=r"folded.*oldest|folded up to"):
        keeper.table(LEFT).table(first)
    left, right = keeper.table(LEFT), keeper.table(RIGHT)
    keeper.fold_off()
    for epoch in sealed(keeper, max(left.base_epoch, right.base_epoch), last):
        assert money(left, epoch) + money(right, epoch) == 2 * ACCOUNTS * MONEY


def sealed(keeper: Keeper, after: int, upto: int) -> list[int]:
    """Epochs in between, a hundred at most."""
    found = keeper.epochs(LEFT, after, upto)
    return found[:: max(1, len(found) // 100)]


def money(table: VersionedTable, epoch: int) -> int:
    return sum(
        sum(batch.column("amount").to_pylist())
        for batch in table.snapshot(epoch, (0, table.vnode_count), columns=["amount"])
    )


def test_net_changes_are_one_record_for_each_key(spark: Any, keeper: Keeper, newest_postgres: Database) -> None:
    fill(newest_postgres)
    before = keeper.catch_up()
    pin = keeper.table(LEFT).pin("test", before)
    newest_postgres.execute(
        f"UPDATE {LEFT} SET amount = amount + 1 WHERE id < 20",
        f"UPDATE {LEFT} SET amount = amount + 1 WHERE id < 10",
        f"INSERT INTO {LEFT} VALUES (900, 1, 'came'), (901, 1, 'came and went')",
        f"DELETE FROM {LEFT} WHERE id IN (5, 30, 901)",
        f"INSERT INTO {LEFT} VALUES (30, 7, 'back')",
    )
    after = keeper.catch_up()
    keeper.fold()
    was = {row[0]: row for row in keeper.model(LEFT, before)}
    now = {row[0]: row for row in keeper.model(LEFT, after)}
    expected = [(*row, "delete") for key, row in was.items() if key not in now]
    expected += [(*row, "insert") for key, row in now.items() if key not in was]
    for key in was.keys() & now.keys():
        if was[key] != now[key]:
            expected += [(*was[key], "update_preimage"), (*now[key], "update_postimage")]
    changes = read(spark, keeper, LEFT, startEpoch=before, endEpoch=after, net="true", parallelism=2)
    assert changes.columns == ["id", "amount", "name", "_change_type"]
    assert rows(changes) == sorted(expected)
    newest = read(spark, keeper, LEFT, startEpoch=before, net="true", preimages="false", columns="_change_type,id")
    assert rows(newest) == sorted((row[-1], row[0]) for row in expected if row[-1] != "update_preimage")
    pin.release()


def test_a_table_can_be_read_as_of_a_time_and_with_some_columns_only(
    spark: Any, keeper: Keeper, newest_postgres: Database
) -> None:
    fill(newest_postgres)
    keeper.catch_up()
    time.sleep(0.2)
    then = datetime.now(UTC)
    time.sleep(0.2)
    newest_postgres.execute(f"DELETE FROM {LEFT}")
    keeper.catch_up()
    assert read(spark, keeper, LEFT, asOfEpoch="newest").count() == 0
    past = read(spark, keeper, "accounts", asOfTimestamp=then.isoformat(), columns="name,id")
    assert past.columns == ["name", "id"]
    assert past.count() == ACCOUNTS
    with pytest.raises(Exception, match=r"no column '_commit_version'.*startEpoch without net"):
        read(spark, keeper, LEFT, asOfEpoch="newest", columns="id,_commit_version")


def test_an_epoch_is_pinned_while_it_is_read_and_let_go_afterwards(
    spark: Any, keeper: Keeper, newest_postgres: Database
) -> None:
    fill(newest_postgres)
    epoch = keeper.catch_up()
    frame = read(spark, keeper, LEFT, asOfEpoch=epoch, snapshotSeconds=15)
    assert frame.count() == ACCOUNTS
    pins = keeper.table(LEFT).pins()
    assert [(pin.owner, pin.epoch) for pin in pins] == [("spark read", epoch)]
    newest_postgres.execute(f"UPDATE {LEFT} SET amount = 0")
    keeper.catch_up()
    assert keeper.fold() <= epoch, "the base does not go past it"
    assert {row["amount"] for row in frame.collect()} == {MONEY}, "every action reads the same epoch"
    end = time.monotonic() + 60
    while keeper.table(LEFT).pins():
        assert time.monotonic() < end
        time.sleep(0.2)
    assert keeper.fold() > epoch
    with pytest.raises(Exception, match=r"epoch \d+ is gone|is folded"):
        read(spark, keeper, LEFT, asOfEpoch=epoch).count()
    with pytest.raises(Exception, match=r"is folded"):
        frame.count()


def test_a_keeper_that_is_forked_finds_the_store_closed_and_the_epoch_pinned(
    keeper: Keeper, newest_postgres: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(newest_postgres)
    keeper.catch_up()
    keeper.fold()
    source = source_of(newest_postgres, tmp_path, LEFT, store=keeper.store, asOfEpoch="newest")
    reader: Any = source.reader(source.schema())
    seen: list[str] = []
    close = VersionedTable.close

    def closed(table: VersionedTable) -> None:
        seen.append("closed")
        close(table)

    def kept(*given: object) -> None:
        seen.extend(pin.owner for pin in pins_in(TableFolder(keeper.folder, LEFT).path))

    monkeypatch.setattr(VersionedTable, "close", closed)
    monkeypatch.setattr(kept_reader, "keep", kept)
    reader.partitions()
    assert seen == ["closed", "spark read"]


def test_a_table_that_is_not_kept_says_what_to_do(spark: Any, keeper: Keeper) -> None:
    with pytest.raises(Exception, match=r'not kept.*kind = "table"'):
        read(spark, keeper, "public.others", asOfEpoch="newest")

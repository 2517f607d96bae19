"""A stream of a kept table through a real Spark: its rows come from our own copy, and no database is asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.servers.postgres import Database
from tests.spark.collecting import mirrored
from tests.spark.keeper import Keeper, Row

LEFT = "public.accounts"
NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"


@pytest.fixture
def keeper(newest_postgres: Database, tmp_path: Path) -> Iterator[Keeper]:
    newest_postgres.execute(f"CREATE TABLE {LEFT} (id int PRIMARY KEY, amount bigint, name text)")
    made = Keeper(newest_postgres, tmp_path, [LEFT])
    newest_postgres.execute(f"INSERT INTO {LEFT} SELECT n, 1000, 'row ' || n FROM generate_series(1, 300) n")
    made.catch_up()
    made.fold()
    yield made
    made.close()


class Collected:
    """What a stream has delivered."""

    def __init__(self, spark: Any, keeper: Keeper, checkpoint: Path, **options: str) -> None:
        self._batches: dict[int, list[dict[str, Any]]] = {}
        """By their numbers: Spark gives the last one again where it was stopped before it wrote down its end."""
        self._checkpoint = str(checkpoint)
        given = {"source": NOWHERE, "store": keeper.store, "table": LEFT, "capture": "none", **options}
        self._frame = spark.readStream.format("headwater").options(**given).load()
        self._query: Any = None

    def __enter__(self) -> Collected:
        writer = self._frame.writeStream.foreachBatch(self._take).option("checkpointLocation", self._checkpoint)
        self._query = writer.trigger(processingTime="0 seconds").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._query.stop()

    def _take(self, batch: Any, number: int) -> None:
        self._batches[number] = [row.asDict() for row in batch.collect()]

    @property
    def _rows(self) -> list[dict[str, Any]]:
        return [row for rows in list(self._batches.values()) for row in rows]

    def rows(self, count: int) -> list[dict[str, Any]]:
        """In the order of the commits, once there are *count*, and no more."""
        end = time.monotonic() + 60
        while len(rows := self._rows) < count:
            assert self._query.isActive, self._query.exception()
            assert time.monotonic() < end, f"{len(rows)} of {count} rows"
            time.sleep(0.05)
        assert len(rows) == count
        return sorted(rows, key=lambda row: row["_commit_version"])

    def table(self, count: int) -> list[Row]:
        return sorted(tuple(row.values()) for row in mirrored(self.rows(count)).values())


def test_a_stream_has_the_rows_of_the_kept_table_then_each_change_once_and_goes_on_after_a_stop(
    spark: Any, keeper: Keeper, newest_postgres: Database, tmp_path: Path
) -> None:
    newest_postgres.execute(f"UPDATE {LEFT} SET amount = 1 WHERE id = 1")
    keeper.catch_up()
    stream = Collected(spark, keeper, tmp_path / "checkpoint")
    with stream:
        assert stream.table(300) == keeper.model(LEFT, keeper.newest()), "with the update, which does not come again"
        newest_postgres.execute(f"UPDATE {LEFT} SET amount = 2 WHERE id = 2", f"DELETE FROM {LEFT} WHERE id = 3")
        assert stream.table(302) == keeper.model(LEFT, keeper.catch_up())
    assert not keeper.table(LEFT).pins(), "what was read is held no longer"
    newest_postgres.execute(f"INSERT INTO {LEFT} VALUES (1000, 4, 'new')")
    with stream:
        assert stream.table(303) == keeper.model(LEFT, keeper.catch_up())


def test_a_stream_since_an_epoch_has_the_changes_after_it_and_no_rows_of_before(
    spark: Any, keeper: Keeper, newest_postgres: Database, tmp_path: Path
) -> None:
    since = keeper.newest()
    newest_postgres.execute(f"UPDATE {LEFT} SET amount = 2 WHERE id = 2", f"DELETE FROM {LEFT} WHERE id = 3")
    with Collected(spark, keeper, tmp_path / "checkpoint", since=str(since)) as stream:
        kinds = [(row["_change_type"], row["id"]) for row in stream.rows(2)]
        assert kinds == [("update_postimage", 2), ("delete", 3)]
        newest_postgres.execute(f"INSERT INTO {LEFT} VALUES (1000, 4, 'new')")
        assert [row["id"] for row in stream.rows(3)] == [2, 3, 1000]

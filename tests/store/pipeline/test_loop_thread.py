"""A delivery loop that opens a second time, because a parked table returns; and the job that it begins with."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.here import Here

from headwater.backfill.offset import QueryOffset
from headwater.pipeline.sink_query import LoopThread
from headwater.sinks.parquet import ParquetSink
from headwater.state.query_store import QueryStore, open_query_store

pytestmark = pytest.mark.store


class Returning:
    """A planner that has nothing to deliver, and whose parked table returns."""

    generation, backfill_id = 1, "b"

    def __init__(self) -> None:
        self.returning: list[str] = []

    def resume(self, committed: object) -> tuple[QueryOffset, None]:
        return QueryOffset(1, 1), None

    def plan(self, start: QueryOffset, **_: object) -> QueryOffset:
        self.returning = ["public.orders"]
        return start

    def close(self) -> None:
        pass


class Reopened:
    """A delivery that hangs when it opens its second planner."""

    name, parks_rows, may_park = "shop-parquet", False, ()

    def __init__(self, state: str, store: QueryStore) -> None:
        self.store = self.state = state
        self.sink = ParquetSink(f"{state}/changes")
        self._store, self._is_open = store, False
        self.opens, self.goes_on = threading.Event(), threading.Event()

    def open_planner(self, recover: Any, *_: object) -> Returning:
        if self._is_open:
            self.opens.set()
            self.goes_on.wait(60)
            raise InterruptedError
        self._is_open = True
        recover(self._store, "b", [])
        return Returning()


def test_the_status_shows_what_a_second_loop_waits_for_while_it_opens(tmp_path: Path) -> None:
    jobs: Any = Here()
    with open_query_store(str(tmp_path), Reopened.name) as store:
        delivery: Any = Reopened(str(tmp_path), store)
        running = LoopThread(lambda: delivery, delivery.name, jobs)
        assert delivery.opens.wait(30), running.error
        assert running.waits_for is not None
        assert running.waits_for[0] == "the sink"
        delivery.goes_on.set()
        running.stop()
    assert isinstance(running.error, InterruptedError)


class Away(Here):
    """A Spark whose first job fails as soon as *ends* is set."""

    def __init__(self) -> None:
        super().__init__()
        self.ends, self.jobs = threading.Event(), 0

    def run(self, function: Any, inputs: Any, description: str) -> Any:
        self.jobs += 1
        assert self.ends.wait(60)
        raise ConnectionRefusedError("Spark is away.")


def test_one_job_at_the_start_is_all_that_small_batches_ask_of_spark_and_its_failure_ends_the_loop(
    tmp_path: Path,
) -> None:
    jobs: Any = Away()
    with open_query_store(str(tmp_path), Reopened.name) as store:
        delivery: Any = Reopened(str(tmp_path), store)
        running = LoopThread(lambda: delivery, delivery.name, jobs, small_in_driver=True)
        assert delivery.opens.wait(30), "its loop was opened a second time"
        jobs.ends.set()
        while not running.is_stopping:
            assert running.is_alive
        delivery.goes_on.set()
        running.stop()
    assert jobs.jobs == 1
    assert isinstance(running.error, ConnectionRefusedError)

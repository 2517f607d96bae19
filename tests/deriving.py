"""Deriving: a derived table, brought on batch by batch when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headwater.backfill.loop import DeliveryLoop
from headwater.derive.delivery import DerivedDelivery
from headwater.derive.derivation import Derivation
from headwater.derive.planner import DerivedPlanner
from headwater.sinks.sink import Sink
from headwater.spark.jobs import FrameJobs
from headwater.state.query_store import own_state


class Deriving:
    """One derivation by a delivery loop, which is opened again when its tables must be read once more.

    :param store: of the logs. :param folder: of the kept tables.
    :param spark: the session; nothing, where a test asks nothing of Spark.
    :ivar batches: that were delivered.
    """

    def __init__(
        self,
        store: str,
        folder: str,
        derivation: Derivation,
        function: Callable[..., Any],
        sink: Sink,
        spark: Any = None,
    ) -> None:
        query = f"shop-{derivation.name}"
        self._delivery = DerivedDelivery(
            query,
            store,
            own_state(store, query),
            folder,
            derivation,
            function,
            sink,
            lambda: spark,
            lambda kind, fields: None,
        )
        self._jobs = FrameJobs(spark, query)
        self.batches = 0
        self._loop = self._open()

    def _open(self) -> DeliveryLoop[DerivedPlanner]:
        return DeliveryLoop(self._delivery, self._jobs)

    @property
    def epoch(self) -> int:
        """Up to which the table is delivered."""
        planner = self._loop.planner
        return 0 if planner.returning else max(self._loop.position.epoch, planner.epoch)

    def step(self) -> bool:
        """One batch; whether there was one."""
        if self._loop.planner.returning:
            self._loop.close()
            self._loop = self._open()
        if not self._loop.plan(0.0):
            return False
        self._loop.deliver()
        self.batches += 1
        return True

    def plan(self) -> bool:
        """Only plan the next batch; whether there is one."""
        return self._loop.plan(0.0)

    def close(self) -> None:
        self._loop.close()

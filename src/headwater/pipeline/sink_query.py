"""SinkQuery: the delivery loop of one sink, with the states of every part that is looked after
(:mod:`headwater.pipeline.supervised_query`).
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from typing import Any, Final

from headwater.backfill.claims import Delivery
from headwater.backfill.loop import Deliverable, DeliveryLoop, Planner
from headwater.backfill.query import QueryOptions
from headwater.pipeline.config import PipelineConfig, SinkSection
from headwater.pipeline.sink_requests import SinkWish
from headwater.pipeline.sink_state import forget_sink, let_back, rewind_sink
from headwater.pipeline.spark_host import SparkHost
from headwater.pipeline.supervised_query import Note, SinkState, SupervisedQuery
from headwater.sinks.delivery_look import read_parked
from headwater.spark.failure import Failure
from headwater.spark.jobs import SparkJobs

_BATCH_SECONDS: Final = 60.0
"""So long the end of a batch is waited for when a sink stops; then its Spark job is cancelled."""
_CANCEL_SECONDS: Final = 5.0


class LoopThread:
    """A delivery loop in its own thread; another one when a parked table returns.

    :param stop: is set to end it.
    :param small_in_driver: see :class:`~headwater.backfill.loop.DeliveryLoop`. Then one empty job runs beside the first
        batches: a Spark that does not work ends the loop before it is needed.
    :ivar loop: once it is open. :ivar error: why it ended, if it ended by itself.
    :ivar batches: that were delivered. :ivar turns: of the loop, with or without a batch.
    """

    def __init__(
        self,
        delivery: Deliverable[Planner],
        jobs: SparkJobs,
        stop: threading.Event | None = None,
        *,
        small_in_driver: bool = False,
    ) -> None:
        self._delivery, self._jobs, self._small_in_driver = delivery, jobs, small_in_driver
        self._stop = stop or threading.Event()
        self.loop: DeliveryLoop[Planner] | None = None
        self.error: BaseException | None = None
        self.batches = self.turns = 0
        self._thread = threading.Thread(target=self._run, name="headwater-delivery", daemon=True)
        self._thread.start()
        if small_in_driver:
            threading.Thread(target=self._check_spark, name="headwater-spark-check", daemon=True).start()

    def _check_spark(self) -> None:
        try:
            self._jobs.run(int, [0], f"headwater {self._delivery.name}: check")
        except CancelledError:
            pass
        except BaseException as error:
            self.error = error
            self._stop.set()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                with DeliveryLoop(self._delivery, self._jobs, small_in_driver=self._small_in_driver) as self.loop:
                    self.loop.run(self._stop, self._turned)
                let_back(self._delivery.store, self._delivery.name, self.loop.planner.returning)
        except CancelledError:
            pass  # stopped while it waited for Spark: the planned batch is delivered by the next run
        except BaseException as error:
            self.error = error

    def _turned(self, delivered: bool) -> None:
        self.batches += delivered
        self.turns += 1

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def ask_to_stop(self) -> None:
        self._stop.set()

    def stop(self) -> None:
        """End it: after its batch, if that ends soon."""
        self._stop.set()
        self._thread.join(_BATCH_SECONDS)
        if self._thread.is_alive():
            self._jobs.cancel()
            self._thread.join(_CANCEL_SECONDS)


class SinkQuery(SupervisedQuery):
    """One sink of a pipeline."""

    kind = "sink"

    def __init__(
        self, config: PipelineConfig, section: SinkSection, options: QueryOptions, host: SparkHost, note: Note
    ) -> None:
        super().__init__(config, section.label, host, note)
        self._section, self._options = section, options
        self._running: LoopThread | None = None
        self._batches = 0

    def lost(self) -> None:
        self.ask_to_stop()
        self._running = None
        if self.state is SinkState.RUNNING:
            self._failed(Failure.of_text("SparkEnded", "SparkContext was shut down: its Java process is gone."))

    def _start(self) -> None:
        self.seen_ms = None
        sink = self._section.open()
        sink.check()
        letters = str(self._config.dead_letters(self._section))
        refused = letters if self._section.bad_rows == "park" else None
        stop = threading.Event()
        jobs = SparkJobs(lambda: self._host.spark(stop), self._options.query)
        small_in_driver = self._config.spark.small_batches == "driver"
        delivery = Delivery(self._options, sink, refused, letters)
        self._running = LoopThread(delivery, jobs, stop, small_in_driver=small_in_driver)
        self._batches = 0

    def _look(self) -> None:
        running = self._running
        assert running is not None
        alive = running.is_alive
        self.seen_ms = time.time_ns() // 1_000_000
        if running.turns:
            self.failure = None  # a turn ended, perhaps without anything to deliver: what was wrong is over
        loop = running.loop
        if loop is not None and running.batches > self._batches:
            self.batches += running.batches - self._batches
            self._batches = running.batches
            self.epoch = max(self.epoch, loop.position.epoch)
            self._progressed()
        if not alive and running.error is not None:
            self._failed(Failure.of(running.error))
        elif not alive and not running.is_stopping:
            self._failed(Failure.of_text("LoopEnded", "The delivery ended by itself."))

    def _failed(self, failure: Failure) -> None:
        self._running = None
        super()._failed(failure)

    # -- requests --------------------------------------------------------------------------------------------------

    def _forget(self) -> list[str]:
        return forget_sink(self._config, self._section)

    def _rewind(self, epoch: int | None) -> dict[str, Any]:
        before = self.state
        self._end(SinkState.STARTING if before is SinkState.RUNNING else before)
        result = rewind_sink(self._config, self._section, epoch)
        if before is not SinkState.PAUSED:
            self._begin_anew()
        return result

    def _let_back(self) -> list[str]:
        if self.state is SinkState.RUNNING and read_parked(self._options.store, self._options.query):
            self._end(SinkState.STARTING)
        return let_back(self._options.store, self._options.query)

    def _rest(self, state: SinkState, wish: SinkWish) -> None:
        self._requests.put_wish(self.label, wish)
        self._end(state)
        self.failure = None
        self._tell(state.value)

    def _end(self, state: SinkState) -> None:
        """End the query, if there is one, and be in *state*."""
        self.ask_to_stop()
        self.stop()
        self.state = state

    # -- the end ---------------------------------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        if self._running is not None:
            self._running.ask_to_stop()

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._look()
        self._running = None
        self._stopped()

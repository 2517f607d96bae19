"""LoopQuery: a delivery loop in its own thread, with the states of every part that is looked after
(:mod:`headwater.pipeline.supervised_query`). SinkQuery: that of one sink.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Final

from headwater.backfill.claims import Delivery
from headwater.backfill.loop import Deliverable, DeliveryLoop, Planner
from headwater.backfill.planner import QueryPlanner
from headwater.backfill.query import QueryOptions
from headwater.pipeline.config import PipelineConfig, SinkSection
from headwater.pipeline.sink_control import DesiredState, SinkControl
from headwater.pipeline.sink_state import forget_sink, let_back, rewind_sink
from headwater.pipeline.spark_host import SparkHost
from headwater.pipeline.supervised_query import Note, SinkState, SupervisedQuery
from headwater.sinks.delivery import now_ms, read_parked
from headwater.spark.failure import Failure
from headwater.spark.jobs import SparkJobs

_BATCH_SECONDS: Final = 60.0
"""So long the end of a batch is waited for when a sink stops; then its Spark job is cancelled."""
_CANCEL_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.5


class LoopThread:
    """A delivery loop in its own thread; another one when a parked table returns.

    :param open_delivery: called in that thread: it can wait for servers. :param name: of the query.
    :param stop: is set to end it.
    :param small_in_driver: see :class:`~headwater.backfill.loop.DeliveryLoop`. Then one empty job runs beside the first
        batches: a Spark that does not work ends the loop before it is needed.
    :param look: is called with the planner after a turn, at most twice a second, and at the end, in that thread.
    :ivar loop: ``None``: it is being opened. :ivar error: why it ended, if it ended by itself.
    :ivar batches: that were delivered. :ivar rows: that were. :ivar turns: of the loop, with or without a batch.
    """

    def __init__(
        self,
        open_delivery: Callable[[], Deliverable[Planner]],
        name: str,
        jobs: SparkJobs,
        stop: threading.Event | None = None,
        *,
        small_in_driver: bool = False,
        look: Callable[[Any], None] = lambda planner: None,
    ) -> None:
        self._open_delivery, self._name, self._jobs = open_delivery, name, jobs
        self._small_in_driver, self._look, self._looked = small_in_driver, look, 0.0
        self._stop = stop or threading.Event()
        self._opening: tuple[str, int] = "the sink", now_ms()
        self.loop: DeliveryLoop[Planner] | None = None
        self.error: BaseException | None = None
        self.batches = self.rows = self.turns = 0
        self._counted = 0  # rows of this loop that are in `rows`
        self._thread = threading.Thread(target=self._run, name="headwater-delivery", daemon=True)
        self._thread.start()
        if small_in_driver:
            threading.Thread(target=self._check_spark, name="headwater-spark-check", daemon=True).start()

    def _check_spark(self) -> None:
        try:
            self._jobs.run(int, [0], f"headwater {self._name}: check")
        except CancelledError:
            pass
        except BaseException as error:
            self.error = error
            self._stop.set()

    def _run(self) -> None:
        try:
            delivery = self._open_delivery()
            while not self._stop.is_set():
                self._opening, self.loop = ("the sink", now_ms()), None
                with DeliveryLoop(delivery, self._jobs, small_in_driver=self._small_in_driver) as self.loop:
                    self._counted = 0
                    self.loop.run(self._stop, self._turned)
                    self._look(self.loop.planner)
                let_back(delivery.store, delivery.state, delivery.name, self.loop.planner.returning)
        except CancelledError:
            pass  # stopped while it waited for Spark: the planned batch is delivered by the next run
        except BaseException as error:
            self.error = self.error or error  # a Spark that does not work is the cause

    def _turned(self, delivered: bool) -> None:
        if self.loop is not None:
            rows = self.loop.rows
            self.rows, self._counted = self.rows + rows - self._counted, rows
        self.batches += delivered
        self.turns += 1
        now = time.monotonic()
        if self.loop is not None and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            self._look(self.loop.planner)

    @property
    def waits_for(self) -> tuple[str, int] | None:
        """What it waits for now, and since when (milliseconds)."""
        loop = self.loop
        return self._opening if loop is None else loop.waits_for

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def ask_to_stop(self) -> None:
        self._stop.set()

    def stop(self) -> None:
        """End it: after its batch, if that ends soon. It takes at most 65 s, also when Java does not answer."""
        self._stop.set()
        self._thread.join(_BATCH_SECONDS)
        if self._thread.is_alive():
            threading.Thread(target=self._cancel, name="headwater-cancel", daemon=True).start()
            self._thread.join(_CANCEL_SECONDS)

    def _cancel(self) -> None:
        with suppress(Exception):  # a Java that has ended, for example
            self._jobs.cancel()


class LoopQuery(SupervisedQuery):
    """A part of a pipeline that a delivery loop delivers."""

    def __init__(self, config: PipelineConfig, label: str, host: SparkHost, note: Note, control: SinkControl) -> None:
        super().__init__(config, label, host, note, control)
        self._running: LoopThread | None = None
        self._batches = self._rows = 0

    @abstractmethod
    def _open(self, stop: threading.Event) -> LoopThread:
        """Its loop, which waits for servers in its own thread; *stop* ends it."""

    def _lose(self) -> None:
        self.ask_to_stop()
        self._running = None
        if self.state is SinkState.RUNNING:
            self._failed(Failure.of_text("SparkEnded", "SparkContext was shut down: its Java process is gone."))

    def _start(self) -> None:
        self.seen_ms = None
        self._running = self._open(threading.Event())
        self._batches = self._rows = 0

    @property
    def waits_for(self) -> tuple[str, int] | None:
        running = self._running
        return None if running is None else running.waits_for

    def _look(self) -> None:
        running = self._running
        assert running is not None
        alive = running.is_alive
        self.seen_ms = time.time_ns() // 1_000_000
        if running.turns:
            self.failure = None  # a turn ended, perhaps without anything to deliver: what was wrong is over
        loop = running.loop
        if loop is not None:
            self._policy.started()
        if loop is not None and running.batches > self._batches:
            self.batches += running.batches - self._batches
            self._batches = running.batches
            self.rows += running.rows - self._rows
            self._rows = running.rows
            self.epoch = max(self.epoch, loop.position.epoch)
            self._progressed()
        if not alive and running.error is not None:
            self._failed(Failure.of(running.error))
        elif not alive and not running.is_stopping:
            self._failed(Failure.of_text("LoopEnded", "The delivery ended by itself."))
        elif not alive:  # it was to end, and that took longer than the request for it has waited
            self.state = SinkState.STARTING

    def _failed(self, failure: Failure) -> None:
        self._running = None
        super()._failed(failure)

    # -- requests --------------------------------------------------------------------------------------------------

    def _rest(self, state: SinkState) -> None:
        if state is SinkState.DROPPED:  # what is forgotten next is not started again
            self._control.set_desired_state(self.label, DesiredState.DROPPED)
        self._end(state)
        if state is SinkState.PAUSED:
            self._control.put_desired_state(self.label, DesiredState.PAUSED)
        self.failure = None
        self._tell(state.value)

    def _end(self, state: SinkState) -> None:
        """End the query, if there is one, and be in *state*."""
        self.ask_to_stop()
        self.stop()
        self.state = state

    # -- the end ---------------------------------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        running = self._running
        if running is not None:
            running.ask_to_stop()

    def stop(self) -> None:
        with self.lock:
            if self._running is not None:
                self._running.stop()
                self._look()
            self._running = None
            self._stopped()


class SinkQuery(LoopQuery):
    """One sink of a pipeline."""

    kind = "sink"

    def __init__(
        self,
        config: PipelineConfig,
        section: SinkSection,
        options: QueryOptions,
        host: SparkHost,
        note: Note,
        control: SinkControl,
    ) -> None:
        super().__init__(config, section.label, host, note, control)
        self._section, self._options = section, options
        self._phases: dict[str, str] = {}

    def _open(self, stop: threading.Event) -> LoopThread:
        query = self._options.query
        jobs = SparkJobs(lambda: self._host.spark(stop), query)
        small_in_driver = self._config.spark.small_batches == "driver"
        return LoopThread(self._delivery, query, jobs, stop, small_in_driver=small_in_driver, look=self._note_phases)

    def _note_phases(self, planner: QueryPlanner) -> None:
        """In the thread of the loop: nothing is read from the store."""
        for name, table in planner.status()["tables"].items():
            before, phase = self._phases.get(name), table["phase"]
            if before != phase:
                self._phases[name] = phase
                self._note("phase_changed", {"sink": self.label, "table": name, "from": before, "to": phase})

    def _delivery(self) -> Delivery:
        """In the thread of the loop."""
        sink = self._section.open()
        sink.check()
        letters = str(self._config.dead_letters(self._section))
        refused = letters if self._section.bad_rows == "park" else None
        return Delivery(self._options, sink, refused, letters)

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
        if self.state is SinkState.RUNNING and read_parked(self._config.state, self._options.query):
            self._end(SinkState.STARTING)
        return let_back(self._options.store, self._config.state, self._options.query)

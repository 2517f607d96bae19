"""SinkQuery: the query of Spark that delivers to one sink, with the states of every part that is looked after
(:mod:`headwater.pipeline.supervised_query`).
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

from headwater.backfill.query import QueryOptions
from headwater.pipeline.config import PipelineConfig, SinkSection
from headwater.pipeline.sink_requests import SinkWish
from headwater.pipeline.sink_state import forget_sink, let_back, rewind_sink
from headwater.pipeline.spark_host import SparkHost
from headwater.pipeline.supervised_query import STOP_SECONDS, Note, SinkState, SupervisedQuery, failure_of
from headwater.private_files import FILE_MODE, make_private
from headwater.sinks.delivery_look import read_parked
from headwater.sinks.sink import Sink
from headwater.spark.failure import Failure
from headwater.spark.heartbeat import BEAT_SUFFIX


class SinkQuery(SupervisedQuery):
    """One sink of a pipeline."""

    kind = "sink"

    def __init__(
        self, config: PipelineConfig, section: SinkSection, options: QueryOptions, host: SparkHost, note: Note
    ) -> None:
        super().__init__(config, section.label, host, note)
        self._section, self._options = section, options
        self._stop_file = config.work / "run" / f"{section.label}.stop"
        self._beat_file = self._stop_file.with_suffix(BEAT_SUFFIX)
        self._query: Any = None
        self._batch: int | None = None

    def lost(self) -> None:
        self._query = None
        if self.state is SinkState.RUNNING:
            self._failed(Failure.of_text("SparkEnded", "SparkContext was shut down: its Java process is gone."))

    def _start(self) -> None:
        self._stop_file.unlink(missing_ok=True)
        self._beat_file.unlink(missing_ok=True)
        self.seen_ms = None
        sink = self._section.open()
        sink.check()
        self._query = self._begin(sink)
        self._batch = None

    def _begin(self, sink: Sink) -> Any:
        from headwater.spark.claim_check import FORMAT, OPTION, ClaimDelivery

        checkpoint = self._config.checkpoint(self._section)
        make_private(checkpoint)
        letters = str(self._config.dead_letters(self._section))
        refused = letters if self._section.bad_rows == "park" else None
        delivery = ClaimDelivery(self._options, sink, str(self._stop_file), refused, letters).to_option()
        claims = self._host.for_query().readStream.format(FORMAT).option(OPTION, delivery).load()
        return (
            claims.writeStream.format(FORMAT)
            .option(OPTION, delivery)
            .option("checkpointLocation", str(checkpoint))
            .queryName(self._options.query)
            .start()
        )

    def _look(self) -> None:
        try:
            active = self._query.isActive
            told = self._query.lastProgress
        except Exception as error:
            if self._host.is_alive:  # otherwise all sinks are told
                self._failed(failure_of(error))
            return
        self.seen_ms = time.time_ns() // 1_000_000
        if told is not None:
            self.failure = None  # a trigger ended, perhaps without anything to deliver: what was wrong is over
            self._progress(told)
        if not active:
            self._failed(self._why_it_ended())

    def _why_it_ended(self) -> Failure:
        try:
            error = self._query.exception()
        except Exception as lost:
            return failure_of(lost)
        return failure_of(error) if error else Failure.of_text("QueryEnded", "The query ended by itself.")

    def _progress(self, told: Any) -> None:
        batch = int(told["batchId"])
        if batch == self._batch or told["sources"][0]["startOffset"] == told["sources"][0]["endOffset"]:
            return
        self.batches += 1 if self._batch is None else max(batch - self._batch, 1)
        self._batch = batch
        self._progressed()
        offset = told["sources"][0]["endOffset"]
        found = json.loads(offset) if isinstance(offset, str) else offset
        self.epoch = max(self.epoch, int(found["e"]))

    def _failed(self, failure: Failure) -> None:
        self._query = None
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
        with suppress(OSError):  # a full disk: the query is ended in the middle of a batch, which is repeated
            self._stop_file.touch(FILE_MODE)

    def stop(self) -> None:
        if self._query is not None:
            end = time.monotonic() + STOP_SECONDS
            try:
                while self._query.isActive and not self._is_idle() and time.monotonic() < end:
                    time.sleep(0.02)
                self._look()
                if self._query is not None:
                    self._query.stop()
            except Exception as error:
                self.failure = failure_of(error)
        self._query = None
        self._stop_file.unlink(missing_ok=True)
        self._stopped()

    def _is_idle(self) -> bool:
        status = self._query.status
        return not status["isDataAvailable"] and not status["isTriggerActive"]

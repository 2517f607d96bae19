"""SinkQuery: the query that delivers to one sink, started again when it fails.

========  =================================================  ====================================
state     meaning                                            goes to
========  =================================================  ====================================
starting  it was not started yet                             running, waiting, failed, paused
running   Spark runs it                                      waiting, failed, paused, stopped
waiting   it failed, and is started again after a pause      running, waiting, failed, paused, stopped
failed    a person must act first                            starting (retry), paused, stopped
paused    a person paused it                                 starting (resume), dropped, stopped
dropped   nothing is known of it, its logs do not wait       starting (resume), stopped
stopped   it was told to                                     (the end)
========  =================================================  ====================================
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from typing import Any, Final

from headwater.backfill.query import QueryOptions
from headwater.errors import HeadwaterError
from headwater.pipeline.config import PipelineConfig, SinkSection
from headwater.pipeline.restarts import RestartPolicy
from headwater.pipeline.sink_requests import SinkRequest, SinkRequestKind, SinkRequests, SinkWish
from headwater.pipeline.sink_state import forget_sink, let_back, rewind_sink
from headwater.pipeline.spark_host import SparkHost
from headwater.sinks.coordinator import read_parked
from headwater.sinks.sink import Sink
from headwater.spark.failure import Failure

_STOP_SECONDS: Final = 60.0


class SinkState(Enum):
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    FAILED = "failed"
    PAUSED = "paused"
    DROPPED = "dropped"
    STOPPED = "stopped"


class SinkQuery:
    """One sink of a pipeline; one thread.

    :ivar epoch: the newest epoch that is delivered, as Spark told. :ivar batches: since it was first started.
    """

    def __init__(
        self,
        config: PipelineConfig,
        section: SinkSection,
        options: QueryOptions,
        host: SparkHost,
        note: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._config, self._section, self._options, self._host, self._note = config, section, options, host, note
        self._stop_file = config.work / "run" / f"{section.label}.stop"
        self._policy = RestartPolicy()
        self._query: Any = None
        self._retry_at = 0.0
        self._batch: int | None = None
        self._requests = SinkRequests(config.work)
        self.state = SinkState.STARTING
        wish = self._requests.wish(section.label)
        if wish.paused or wish.dropped:
            self.state = SinkState.DROPPED if wish.dropped else SinkState.PAUSED
        self.failure: Failure | None = None
        self.restarts = self.batches = self.epoch = 0

    @property
    def label(self) -> str:
        return self._section.label

    def step(self) -> None:
        """Look after it: start it, notice what it did, start it again."""
        if self.state is SinkState.RUNNING:
            self._look()
        elif self.state is SinkState.STARTING or (
            self.state is SinkState.WAITING and time.monotonic() >= self._retry_at
        ):
            self._start()

    def lost(self) -> None:
        """Its session is gone."""
        self._query = None
        if self.state is SinkState.RUNNING:
            self._failed(Failure.of_text("SparkEnded", "SparkContext was shut down: its Java process is gone."))

    def _start(self) -> None:
        try:
            self._stop_file.unlink(missing_ok=True)
            sink = self._section.open()
            sink.check()
            self._query = self._begin(sink)
        except Exception as error:
            self._failed(failure_of(error))
            return
        self.state, self._batch = SinkState.RUNNING, None

    def _begin(self, sink: Sink) -> Any:
        from headwater.spark.claim_check import FORMAT, OPTION, ClaimDelivery

        checkpoint = self._config.checkpoint(self._section)
        checkpoint.mkdir(parents=True, exist_ok=True)
        letters = str(self._config.dead_letters(self._section)) if self._section.bad_rows == "park" else None
        delivery = ClaimDelivery(self._options, sink, str(self._stop_file), letters).to_option()
        claims = self._host.session().readStream.format(FORMAT).option(OPTION, delivery).load()
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
        if told is not None:
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
        self._policy.progressed()
        self.failure = None
        offset = told["sources"][0]["endOffset"]
        found = json.loads(offset) if isinstance(offset, str) else offset
        self.epoch = max(self.epoch, int(found["e"]))

    def _failed(self, failure: Failure) -> None:
        self._query = None
        if failure.next_step is None:
            logs = self._config.work / "logs"
            failure = replace(failure, next_step=f"Look at {logs}; headwater run goes on from where it was.")
        self.failure = failure
        pause = self._policy.pause(failure)
        fields = {"sink": self.label, "error": failure.kind, "text": str(failure)}
        if pause is None:
            self.state = SinkState.FAILED
            self._note("notice", fields | {"event": "sink_failed"})
            return
        self.restarts += 1
        self.state, self._retry_at = SinkState.WAITING, time.monotonic() + pause
        self._note("notice", fields | {"event": "sink_restarts", "pause_seconds": round(pause, 1)})

    # -- requests --------------------------------------------------------------------------------------------------

    def serve(self, request: SinkRequest) -> dict[str, Any]:
        """Do what is asked. :raises HeadwaterError: it cannot be done; nothing has changed."""
        match request.kind:
            case SinkRequestKind.PAUSE:
                if self.state is not SinkState.DROPPED:
                    self._rest(SinkState.PAUSED, SinkWish(paused=True))
            case SinkRequestKind.RESUME:
                if self.state is SinkState.DROPPED:  # a process that died may have left something
                    forget_sink(self._config, self._section)
                if self.state in (SinkState.PAUSED, SinkState.DROPPED):
                    self._requests.put_wish(self.label, SinkWish())
                    self._begin_anew()
            case SinkRequestKind.RETRY:
                return self._retry()
            case SinkRequestKind.REWIND:
                return self._rewind(request.epoch)
            case SinkRequestKind.DROP:
                self._rest(SinkState.DROPPED, SinkWish(dropped=True))
                return {"tables": forget_sink(self._config, self._section)}
        return {"state": self.state.value}

    def _rewind(self, epoch: int | None) -> dict[str, Any]:
        before = self.state
        self._end(SinkState.STARTING if before is SinkState.RUNNING else before)
        result = rewind_sink(self._config, self._section, epoch)
        if before is not SinkState.PAUSED:
            self._begin_anew()
        return result

    def _retry(self) -> dict[str, Any]:
        """Start it now, unless it is paused, and let the tables come back that it had parked."""
        if self.state is SinkState.RUNNING and read_parked(self._options.store, self._options.query):
            self._end(SinkState.STARTING)
        back = let_back(self._options.store, self._options.query)
        if self.state in (SinkState.STARTING, SinkState.FAILED, SinkState.WAITING):
            self._begin_anew()
        return {"state": self.state.value, "tables": back}

    def _rest(self, state: SinkState, wish: SinkWish) -> None:
        self._requests.put_wish(self.label, wish)
        self._end(state)
        self.failure = None
        self._note("notice", {"sink": self.label, "event": f"sink_{state.value}"})

    def _begin_anew(self) -> None:
        self._policy.progressed()
        self.failure, self.state = None, SinkState.STARTING
        self._note("notice", {"sink": self.label, "event": "sink_starts"})

    def _end(self, state: SinkState) -> None:
        """End the query, if there is one, and be in *state*."""
        self.ask_to_stop()
        self.stop()
        self.state = state

    # -- the end ---------------------------------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        """No batch begins from now on."""
        self._stop_file.touch()

    def stop(self) -> None:
        """Wait until its batch is over, then end it."""
        if self._query is not None:
            end = time.monotonic() + _STOP_SECONDS
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
        if self.state not in (SinkState.FAILED, SinkState.PAUSED, SinkState.DROPPED):
            self.state = SinkState.STOPPED

    def _is_idle(self) -> bool:
        status = self._query.status
        return not status["isDataAvailable"] and not status["isTriggerActive"]


def failure_of(error: BaseException) -> Failure:
    """What an exception of ours, or of Spark, says."""
    if isinstance(error, HeadwaterError):
        return Failure.of(error)
    return Failure.of_text(type(error).__name__, str(error), "\n".join(_traces(error)))


def _traces(error: BaseException | None) -> Iterator[str]:
    """What an exception of Spark knows beside its text, and its causes."""
    while error is not None:
        yield str(getattr(error, "_stackTrace", None) or "")
        error = getattr(error, "_cause", None) or error.__cause__
        yield "" if error is None else f"{type(error).__name__}: {error}"

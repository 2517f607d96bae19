"""SupervisedQuery: what delivers to one sink, or keeps one derived table going: started again when it fails.

========  =================================================  =============================
state     meaning                                            goes to
========  =================================================  =============================
starting  it was not started yet                             running, waiting, failed, paused
running   it delivers                                        waiting, failed, paused, stopped
waiting   it failed, and is started again after a pause      running, waiting, failed, paused, stopped
failed    a person must act first                            starting (retry), paused, stopped
paused    a person paused it                                 starting (resume), dropped, stopped
dropped   nothing is known of it, its logs do not wait       starting (resume), stopped
stopped   it was told to                                     (the end)
========  =================================================  =============================
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any, ClassVar

from headwater.control.command import DropSink, PauseSinks, ResumeSinks, RetrySink, RewindSink, SinkCommand
from headwater.pipeline.config import PipelineConfig
from headwater.pipeline.sink_control import DesiredState, SinkControl
from headwater.pipeline.spark_host import SparkHost
from headwater.sinks.errors import SINK_NAME
from headwater.spark.failure import Failure, RestartPolicy
from headwater.system.retry import DELIVERY

Note = Callable[[str, dict[str, Any]], None]


class SinkState(Enum):
    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting"
    FAILED = "failed"
    PAUSED = "paused"
    DROPPED = "dropped"
    STOPPED = "stopped"


class SupervisedQuery(ABC):
    """One part of a pipeline that is looked after by its name. What it was asked is done in another thread.

    After a failed delivery it waits as :data:`~headwater.system.retry.DELIVERY` says, until a batch is delivered.

    :param note: writes an entry of the journal. :param control: has the state that it is to be in.
    :param clock: seconds, for the pauses.
    :ivar lock: of the one who looks after it, or does what it was asked. It can be held as long as a batch takes.
    :ivar epoch: the newest epoch that is delivered. :ivar batches: since it was first started. :ivar rows: delivered
        since then.
    :ivar seen_ms: when it last answered, where it can be asked.
    :raises StateError: the state that it is to be in cannot be read.
    """

    kind: ClassVar[str]
    """What entries of the journal call it."""

    def __init__(
        self,
        config: PipelineConfig,
        label: str,
        host: SparkHost,
        note: Note,
        control: SinkControl,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self.label, self._host, self._note, self._control = config, label, host, note, control
        self._policy, self._clock = RestartPolicy(DELIVERY), clock
        self.lock = threading.RLock()
        self._is_lost = False
        self._retry_at = 0.0
        desired = control.desired_state(label)
        self.state = SinkState.STARTING if desired is DesiredState.RUNNING else SinkState(desired.value)
        self.failure: Failure | None = None
        self.restarts = self.batches = self.rows = self.epoch = 0
        self.seen_ms: int | None = None

    @property
    def waits_for(self) -> tuple[str, int] | None:
        """What it waits for now, and since when (milliseconds), where that can hang."""
        return None

    def step(self) -> None:
        """Look after it: start it, notice what it did, start it again; later, if it does what it was asked."""
        if self.lock.acquire(blocking=False):
            try:
                self._step()
            finally:
                self.lock.release()

    def _step(self) -> None:
        if self._is_lost:
            self._is_lost = False
            self._lose()
        if self.state is SinkState.RUNNING:
            self._look()
        elif self.state is SinkState.STARTING or (self.state is SinkState.WAITING and self._clock() >= self._retry_at):
            try:
                self._start()
            except Exception as error:
                self._failed(Failure.of(error))
            else:
                self.state = SinkState.RUNNING

    @abstractmethod
    def _start(self) -> None:
        """Start it, without waiting for a server; what it raises is its failure."""

    @abstractmethod
    def _look(self) -> None:
        """Notice what it did since."""

    def lost(self) -> None:
        """Its session is gone; noticed with the next step."""
        self._is_lost = True

    @abstractmethod
    def _lose(self) -> None:
        """Its session is gone."""

    @abstractmethod
    def ask_to_stop(self) -> None:
        """No batch begins from now on."""

    @abstractmethod
    def stop(self) -> None:
        """Wait until what it was asked is done and its batch is over, then end it."""

    def _progressed(self) -> None:
        """A batch was delivered."""
        self.failure = None
        self._policy.progressed()

    def _failed(self, failure: Failure) -> None:
        if failure.next_step is None:
            step = f"Look at {self._config.logs}; headwater run goes on from where it was."
            failure = replace(failure, next_step=step)
        elif failure.next_step.endswith(f" {SINK_NAME}"):
            failure = replace(failure, next_step=failure.next_step.removesuffix(SINK_NAME) + self.label)
        self.failure = failure
        pause = self._policy.pause(failure)
        fields = {"error": failure.kind, "text": str(failure), "trace": failure.trace}
        if pause is None:
            self.state = SinkState.FAILED
            self._tell("failed", **fields)
            return
        self.restarts += 1
        self.state, self._retry_at = SinkState.WAITING, self._clock() + pause
        self._tell("restarts", **fields, pause_seconds=round(pause, 1))

    def _begin_anew(self) -> None:
        self._policy.progressed()
        self.failure, self.state = None, SinkState.STARTING
        self._tell("starts")

    # -- requests --------------------------------------------------------------------------------------------------

    def serve(self, command: SinkCommand) -> dict[str, Any]:
        """Do what is asked of it; what was done. :raises HeadwaterError: it cannot be done; nothing has changed."""
        match command:
            case PauseSinks():
                if self.state is not SinkState.DROPPED:
                    self._rest(SinkState.PAUSED)
            case ResumeSinks(sink=sink):
                if self.state is SinkState.DROPPED and sink is not None:
                    self._forget()  # a process that died can have left something
                if self.state is SinkState.PAUSED or (self.state is SinkState.DROPPED and sink is not None):
                    self._control.put_desired_state(self.label, DesiredState.RUNNING)
                    self._begin_anew()
            case RetrySink():
                back = self._let_back()
                if self.state in (SinkState.STARTING, SinkState.FAILED, SinkState.WAITING):
                    self._begin_anew()
                return {"state": self.state.value, "tables": back}
            case RewindSink(epoch=epoch):
                return self._rewind(epoch)
            case DropSink():
                self._rest(SinkState.DROPPED)
                return {"state": self.state.value, "tables": self._forget()}
        return {"state": self.state.value}

    @abstractmethod
    def _rest(self, state: SinkState) -> None:
        """End it, and be in *state* from now on: dropped durably on return, paused durably with the answer."""

    @abstractmethod
    def _forget(self) -> list[str]:
        """Forget all that is known of it, while it rests; the tables that it had."""

    @abstractmethod
    def _let_back(self) -> list[str]:
        """Before it is started anew: let tables come back that it had parked; which."""

    @abstractmethod
    def _rewind(self, epoch: int | None) -> dict[str, Any]:
        """Deliver again what came after *epoch*."""

    def _stopped(self) -> None:
        if self.state not in (SinkState.FAILED, SinkState.PAUSED, SinkState.DROPPED):
            self.state = SinkState.STOPPED

    def _tell(self, event: str, **fields: Any) -> None:
        self._note("notice", {self.kind: self.label, "event": f"{self.kind}_{event}"} | fields)

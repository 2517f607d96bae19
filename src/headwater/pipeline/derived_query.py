"""DerivedQuery: keeps one derived table going, started again when it fails. Its states are those of a sink
(:mod:`headwater.pipeline.sink_query`): it can be paused, resumed, retried and dropped as one.

Steps run in a thread of their own: a batch of Spark that takes long holds up nobody else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from headwater import failpoints
from headwater.derive.state import FOLDER as DERIVATIONS
from headwater.pipeline.config import KEPT_KIND, DeriveSection, PipelineConfig
from headwater.pipeline.errors import CannotRewind, SinkRequestFailed
from headwater.pipeline.restarts import RestartPolicy
from headwater.pipeline.sink_query import SinkState, failure_of
from headwater.pipeline.sink_requests import SinkRequest, SinkRequestKind, SinkRequests, SinkWish
from headwater.pipeline.spark_host import SparkHost
from headwater.sinks.coordinator import FOLDER as DELIVERIES
from headwater.spark.failure import Failure
from headwater.spark.options import KEPT_TABLES
from headwater.state.beside import remove_beside

BEFORE_STEP = failpoints.register("pipeline.derive_before_step")
"""Before each durable step of forgetting a derived table."""
_STOP_SECONDS: Final = 60.0

Note = Callable[[str, dict[str, Any]], None]


class DerivedQuery:
    """One derived table of a pipeline.

    :ivar epoch: the newest epoch that is delivered. :ivar batches: since it was first started.
    """

    def __init__(self, config: PipelineConfig, section: DeriveSection, host: SparkHost, note: Note) -> None:
        self._config, self._section, self._host, self._note = config, section, host, note
        self._policy = RestartPolicy()
        self._requests = SinkRequests(config.work)
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._problems: list[BaseException] = []
        self._retry_at = 0.0
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
        """Look after it: start it, notice that it failed, start it again."""
        if self.state is SinkState.RUNNING:
            assert self._thread is not None
            if not self._thread.is_alive():
                self._thread = None
                if self._problems:
                    self._failed(failure_of(self._problems[0]))
                else:  # it was to end, and that took longer than who asked for it has waited
                    self.state = SinkState.STARTING
        elif self.state is SinkState.STARTING or (
            self.state is SinkState.WAITING and time.monotonic() >= self._retry_at
        ):
            self._start()

    def lost(self) -> None:
        """Its session is gone: the thread notices by itself, and ends."""

    def _start(self) -> None:
        try:
            function = self._section.derivation.load(Path(self._section.path or "."))
            sink = next(one for one in self._config.sink if one.label == self._section.sink).open()
            sink.check()
            session = self._host.session()
        except Exception as error:
            self._failed(failure_of(error))
            return
        self._stopping.clear()
        self._problems = []  # of this thread alone: one that did not end in time tells nobody any more
        arguments = (function, sink, session, self._problems)
        self._thread = threading.Thread(
            target=self._run, args=arguments, name=f"headwater-derive-{self.label}", daemon=True
        )
        self._thread.start()
        self.state = SinkState.RUNNING

    def _run(self, function: Any, sink: Any, session: Any, problems: list[BaseException]) -> None:
        """In the thread."""
        from headwater.derive.runner import DerivedRunner, Place

        config, section = self._config, self._section
        place = Place(config.store, str(tables_folder(config)), config.query(section), self._host.parallelism)
        try:
            runner = DerivedRunner(place, section.derivation, function, sink, session, self._note)
            done = 0
            try:
                while not self._stopping.is_set():
                    more = runner.step()
                    self.epoch = max(self.epoch, runner.epoch)
                    if runner.batches > done:
                        self.batches += runner.batches - done
                        done = runner.batches
                        self.failure = None
                        self._policy.progressed()
                    self._stopping.wait(section.interval_seconds if more or runner.epoch else 1.0)
            finally:
                runner.close()
            if not self._stopping.is_set():
                raise RuntimeError("A derived table ended by itself.")
        except BaseException as error:
            problems.append(error)

    def _failed(self, failure: Failure) -> None:
        if failure.next_step is None:
            logs = self._config.work / "logs"
            failure = replace(failure, next_step=f"Look at {logs}; headwater run goes on from where it was.")
        self.failure = failure
        pause = self._policy.pause(failure)
        fields = {"derive": self.label, "error": failure.kind, "text": str(failure)}
        if pause is None:
            self.state = SinkState.FAILED
            self._note("notice", fields | {"event": "derive_failed"})
            return
        self.restarts += 1
        self.state, self._retry_at = SinkState.WAITING, time.monotonic() + pause
        self._note("notice", fields | {"event": "derive_restarts", "pause_seconds": round(pause, 1)})

    # -- requests --------------------------------------------------------------------------------------------------

    def serve(self, request: SinkRequest) -> dict[str, Any]:
        """Do what is asked. :raises HeadwaterError: it cannot be done; nothing has changed."""
        match request.kind:
            case SinkRequestKind.PAUSE:
                if self.state is not SinkState.DROPPED:
                    self._rest(SinkState.PAUSED, SinkWish(paused=True))
            case SinkRequestKind.RESUME:
                if self.state in (SinkState.PAUSED, SinkState.DROPPED):
                    if self.state is SinkState.DROPPED:  # a process that died may have left something
                        forget_derived(self._config, self._section)
                    self._requests.put_wish(self.label, SinkWish())
                    self._begin_anew()
            case SinkRequestKind.RETRY:
                if self.state in (SinkState.STARTING, SinkState.FAILED, SinkState.WAITING):
                    self._begin_anew()
                return {"state": self.state.value, "tables": []}
            case SinkRequestKind.DROP:
                self._rest(SinkState.DROPPED, SinkWish(dropped=True))
                forget_derived(self._config, self._section)
                return {"tables": [self._section.derivation.full_name]}
            case SinkRequestKind.REWIND:
                raise cannot_rewind(self.label)
        return {"state": self.state.value}

    def _rest(self, state: SinkState, wish: SinkWish) -> None:
        self.ask_to_stop()
        if not self._has_ended():  # it would commit, and pin, what is forgotten meanwhile
            raise SinkRequestFailed(
                f"{self.label} is in a batch that has not ended within {_STOP_SECONDS:g} s.",
                next_step="Ask again: it ends with that batch.",
            )
        self._requests.put_wish(self.label, wish)
        self.state, self.failure = state, None
        self._note("notice", {"derive": self.label, "event": f"derive_{state.value}"})

    def _begin_anew(self) -> None:
        self._policy.progressed()
        self.failure, self.state = None, SinkState.STARTING
        self._note("notice", {"derive": self.label, "event": "derive_starts"})

    # -- the end ---------------------------------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        """No batch begins from now on."""
        self._stopping.set()

    def stop(self) -> None:
        """Wait until its batch is over."""
        self._has_ended()
        if self.state not in (SinkState.FAILED, SinkState.PAUSED, SinkState.DROPPED):
            self.state = SinkState.STOPPED

    def _has_ended(self) -> bool:
        """Wait for its thread; whether that has ended."""
        if self._thread is None:
            return True
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            return False
        self._thread = None
        if self._problems and self.failure is None:
            self.failure = failure_of(self._problems[0])
        return True


def tables_folder(config: PipelineConfig) -> Path:
    """Where the kept tables of the pipeline are."""
    kept = next(one for one in config.sink if one.kind == KEPT_KIND)
    return Path(kept.options.get("path") or config.work / KEPT_TABLES)


def forget_derived(config: PipelineConfig, section: DeriveSection) -> None:
    """Forget all that is known of the derived table, which nobody derives now; what the sink has stays.

    What a process that died left of it goes when it is done again.
    """
    from headwater.derive.runner import Place, release_pins

    query = config.query(section)
    failpoints.hit(BEFORE_STEP)
    release_pins(Place(config.store, str(tables_folder(config)), query), section.derivation)
    for folder in (DELIVERIES, DERIVATIONS):
        failpoints.hit(BEFORE_STEP)
        remove_beside(config.store, folder, query)


def cannot_rewind(label: str) -> CannotRewind:
    """What is said of a derived table that is to be set back."""
    return CannotRewind(
        f"{label} is a derived table: it is made anew, not set back.",
        next_step=f"Run: headwater sink drop {label} && headwater sink resume {label}",
    )

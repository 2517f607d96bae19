"""The supervisor of a pipeline: one capture, one query per sink, and what happens when one of them fails.

What passes is tried again after a growing pause; a sink that fails does not touch the others; what needs a person stops
that part and says what to do. Only one process supervises a store.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from headwater.control.command import (
    AddSink,
    PipelineCommand,
    SinkCommand,
    StopPipeline,
    command_name,
)
from headwater.control.request import Request, inbox_of
from headwater.errors import HeadwaterError
from headwater.pipeline.config import KEPT_KIND, DeriveSection, PipelineConfig, SinkSection, load, matching
from headwater.pipeline.derived_query import DerivedQuery
from headwater.pipeline.errors import AlreadyRunning, ConfigError, PipelineError
from headwater.pipeline.run_journal import RunJournal
from headwater.pipeline.sink_control import SinkControl
from headwater.pipeline.sink_query import SinkQuery
from headwater.pipeline.sink_request import SinkRequest, problem_of
from headwater.pipeline.spark_host import SparkHost
from headwater.pipeline.supervised_query import SinkState, SupervisedQuery
from headwater.pipeline.tables import CapturedTables, capture_settings, choose_tables, sink_tables
from headwater.spark.capture_child import CaptureKeeper
from headwater.spark.failure import Failure, RestartPolicy
from headwater.state.board import open_board
from headwater.state.location import local_folder
from headwater.system.files import make_private, make_root
from headwater.system.owner_lock import OwnedElsewhereError, OwnerLock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RUN_FOLDER: Final = "run"
LOCK_FILE: Final = "run.lock"
STATUS: Final = "status"
"""The record on the board of the pipeline store in which the process that runs the pipeline says how it is."""
_STEP_SECONDS: Final = 0.2
_BEAT_SECONDS: Final = 0.5
_JOURNAL_SECONDS: Final = 60.0


def make_folders(config: PipelineConfig) -> None:
    """Create the local directories of the pipeline, private. :raises UnsafeDirectory: another user can write one."""
    for folder in (config.work, local_folder(config.store)):
        if folder is not None:
            make_root(folder)
    make_private(config.work / RUN_FOLDER)
    make_private(config.logs)


class Supervisor:
    """Runs one pipeline in the thread that calls :meth:`run`; other threads may look and stop it.

    :param spark: a session of the caller's own. :param file: that the settings are from: sinks can be added there.
    """

    def __init__(self, config: PipelineConfig, spark: SparkSession | None = None, file: Path | None = None) -> None:
        if not config.sink:
            raise ConfigError(
                "The pipeline has no sink.", key="sink", next_step='Add [[sink]] with kind = "delta" and path = "lake".'
            )
        self._config, self._file = config, file
        self._tables: tuple[str, ...] = ()
        self._host = SparkHost(config, spark)
        self._control = SinkControl(config.state)
        self._board = open_board(config.state)
        self._stop = threading.Event()
        self._capture: CaptureKeeper | None = None
        self._sinks: list[SupervisedQuery] = []
        self._serving: list[SinkRequest] = []
        self._captured = CapturedTables(config.store)
        self._waiting: set[str] = set()
        """Tables without a log so far."""
        self._measured = 0.0
        self._noted: dict[str, int] = {}
        """The batches of each sink that the journal knows."""
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="headwater-heartbeat", daemon=True)
        self._left_out: dict[str, str] = {}
        self._started_ms = time.time_ns() // 1_000_000
        self.state = "starting"
        self.failure: Failure | None = None

    @property
    def config(self) -> PipelineConfig:
        """The settings, with the sinks that were added since."""
        return self._config

    @property
    def run_folder(self) -> Path:
        return self._config.work / RUN_FOLDER

    def stop(self) -> None:
        """End cleanly: batches end, the capture seals. Any thread, also a signal handler."""
        self._stop.set()

    def run(self, begun: threading.Event | None = None) -> Failure | None:
        """Until :meth:`stop`, or until nothing is left to run; why it ended then.

        :param begun: set once nobody else can run it.
        :raises AlreadyRunning: another process runs it.
        """
        make_folders(self._config)
        with ExitStack() as stack:  # whatever fails: no thread and no process is left behind
            stack.enter_context(self._lock())
            stack.callback(self._close_control)
            self._write_status()
            self._heart.start()
            stack.callback(self._end)
            if begun is not None:
                begun.set()
            stack.callback(self._host.stop)
            self._host.begin()
            self._journal = RunJournal(self._config.work, self._config.name)
            stack.callback(self._end_journal)
            stack.callback(self._stop_parts)
            try:
                self._supervise()
            except (HeadwaterError, OSError) as error:
                self.failure = Failure.of(error)
        return self.failure

    def _lock(self) -> OwnerLock:
        try:
            return OwnerLock(self.run_folder / LOCK_FILE, str(self._config.work))
        except OwnedElsewhereError as error:
            raise AlreadyRunning(str(self._config.work), str(error.owner), error.owner.pid) from None

    def _supervise(self) -> None:
        policy = RestartPolicy()
        while not self._stop.is_set():
            try:
                if self._capture is None:
                    self._serve(StopPipeline)  # also while the source does not answer
                    self._capture = self._prepare()
                self._step(self._capture)
            except (HeadwaterError, OSError) as error:  # of this process: its store does not answer, the disk is full
                self.failure = Failure.of(error)
                pause = policy.pause(self.failure)
                if pause is None:
                    return
                self._stop.wait(pause)
                continue
            if self._is_over():
                return
            self.failure = None
            policy.progressed()
            self._stop.wait(_STEP_SECONDS)
        self.failure = None  # it was told to stop: that is no failure

    def _prepare(self) -> CaptureKeeper:
        """Choose the tables, and make the parts; nothing is started. It can be called again after an error."""
        self._control.open()
        chosen = choose_tables(self._config)
        self._tables, self._waiting = chosen.names, set(chosen.names)
        self._left_out = {name: " ".join(filter(None, why)) for name, why in chosen.left_out.items()}
        sinks: list[SupervisedQuery] = [self._query_of(section) for section in self._config.sink]
        self._sinks = sinks + [self._derived_of(section) for section in self._config.derive]
        for name, reason in self._left_out.items():
            self._journal.note("notice", {"event": "table_left_out", "table": name, "text": reason})
        return CaptureKeeper(
            partial(capture_settings, self._config, chosen.names, CapturedTables(self._config.store)),
            log=self._config.logs / "capture.log",
            note=self._journal.note,
        )

    def _step(self, capture: CaptureKeeper) -> None:
        """Look after each part."""
        capture.step()
        if self._waiting:
            self._waiting -= (self._captured.poll() or {}).keys()
        if not self._host.is_alive:
            self._host.forget()
            for sink in self._sinks:
                sink.lost()
        if not self._waiting:
            for sink in self._sinks:
                sink.step()
            self.state = "running"
        if any(sink.batches for sink in self._sinks):
            self._host.prepare_next_start()
        self._serve()
        self._note_commands(capture)
        self._note_progress()

    def _serve(self, only: type[PipelineCommand] | None = None) -> None:
        """Do what was asked of the pipeline, and begin with what was asked of its sinks.

        :param only: commands of this kind.
        """
        asked = self._control.requests(only)
        begun = {one.id for one in self._serving}  # one that is over since that look is answered
        self._serving = [one for one in self._serving if not one.is_over]
        for request in asked:
            if request.id in begun:
                continue
            problem: HeadwaterError | None = None
            effect: dict[str, Any] = {}
            try:
                if isinstance(request.command, get_args(SinkCommand)):
                    self._begin(request, request.command)
                    continue
                effect = self._apply(request)
            except Exception as error:  # the pipeline goes on, whatever one sink cannot do
                problem = problem_of(error)
            self._control.answer(request, problem, effect)

    def _begin(self, request: Request, command: SinkCommand) -> None:
        """Begin with what *request* asks of a sink, or of all."""
        sinks = list(self._sinks) if command.sink is None else [self._sink(command.sink)]
        self._serving.append(SinkRequest(request, command, sinks, self._serving, self._control, self._stop))

    def _note_commands(self, capture: CaptureKeeper) -> None:
        """Note in the journal what was asked of the pipeline, its queries and its capture, and by which user."""
        labels = {self._config.query(section): section.label for section in self._config.parts}
        for served in inbox_of(self._config.state).take_served():
            label = labels.get(served.request.target)
            self._journal.command(**served.to_json(**({} if label is None else {"sink": label})))
        for command in capture.take_commands():
            self._journal.command(**command)

    def _apply(self, request: Request) -> dict[str, Any]:
        """Do what *request* asks of the pipeline, without waiting for a batch; what was done."""
        match request.command:
            case StopPipeline():
                if request.asked_us >= self._started_ms * 1000:  # else it was for a run that was killed
                    self.stop()
                return {"state": "stopping"}
            case AddSink(sink=label):
                if all(sink.label != label for sink in self._sinks):
                    self._add(label)
                return {"sinks": {label: self._sink(label).state.value}}
        raise PipelineError(f"A pipeline cannot do {command_name(type(request.command))!r}.")

    def _sink(self, label: str) -> SupervisedQuery:
        sink = next((sink for sink in self._sinks if sink.label == label), None)
        if sink is None:
            raise ConfigError(f"The pipeline has no sink {label!r}.", key="sink")
        return sink

    def _add(self, label: str) -> None:
        if self._file is None:
            raise ConfigError("The pipeline was not started from a file.", key="sink", next_step="Start it again.")
        config = load(self._file)
        section = next((one for one in config.parts if one.label == label), None)
        if section is None:
            raise ConfigError(f"{self._file} has no sink {label!r}.", key="sink")
        if isinstance(section, DeriveSection):
            self._sinks.append(self._derived_of(section))
            self._config = self._config.model_copy(update={"derive": [*self._config.derive, section]})
            self._journal.note("notice", {"event": "derive_added", "derive": label})
            return
        made = self._query_of(section)
        self._config = self._config.model_copy(update={"sink": [*self._config.sink, section]})
        self._sinks.append(made)
        self._journal.note("notice", {"event": "sink_added", "sink": label})

    def _query_of(self, section: SinkSection) -> SinkQuery:
        found = sink_tables(self._config, section, self._tables, self._left_out)
        options = self._config.query_options(section, found)
        return SinkQuery(self._config, section, options, self._host, self._journal.note, self._control)

    def _derived_of(self, section: DeriveSection) -> DerivedQuery:
        home = self._config.home
        takers = [sink for sink in self._config.sink if sink.kind == KEPT_KIND]
        kept = [name for sink in takers for name in matching(sink.tables, self._tables, home)]
        missing = next((name for name in section.tables if name not in kept), None)
        if missing is not None:
            raise ConfigError(
                f"The derived table {section.label!r} is made of {missing}, which is not kept.",
                key="derive.tables",
                next_step=f"Kept are {', '.join(kept) or 'none'}.",
            )
        return DerivedQuery(self._config, section, self._host, self._journal.note, self._control)

    def _is_over(self) -> bool:
        """Whether nothing is left that a restart could help."""
        if self._capture is not None and self._capture.has_failed:
            self.failure = self._capture.failure
            return True
        is_asked = any(not one.is_over for one in self._serving)
        if not is_asked and all(sink.state is SinkState.FAILED for sink in self._sinks):
            self.failure = self._sinks[0].failure
            return True
        return False

    # -- the end, in this order: each of them runs whatever the one before raised --------------------------------------

    def _stop_parts(self) -> None:
        self.state = "stopping"
        self._stop.set()  # of what was asked, nothing is begun any more
        for sink in self._sinks:
            sink.ask_to_stop()
        threads = [threading.Thread(target=sink.stop, name=f"headwater-stop-{sink.label}") for sink in self._sinks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for request in self._serving:  # it answers, or was not begun
            request.wait()
        if self._capture is not None:
            self._capture.stop()
        failed = [sink.failure for sink in self._sinks if sink.state is SinkState.FAILED and sink.failure is not None]
        if self.failure is None and failed:
            self.failure = failed[0]

    def _end_journal(self) -> None:
        if self._capture is not None:
            self._note_commands(self._capture)
        self._note_progress(now=True)
        failure = self.failure
        self._journal.end(None if failure is None else str(failure), "" if failure is None else failure.trace)

    def _end(self) -> None:
        self.state = "failed" if self.failure is not None else "stopped"
        self._ended.set()
        self._heart.join()
        self._write_status()

    def _close_control(self) -> None:
        with suppress(HeadwaterError, OSError):  # nothing is left to write there
            self._control.close()

    # -- what others see -------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What only this process knows, for :mod:`headwater.pipeline.status`."""
        return {
            "pid": os.getpid(),
            "started_ms": self._started_ms,
            "updated_ms": time.time_ns() // 1_000_000,
            "state": self.state,
            "failure": None if self.failure is None else self.failure.to_json(),
            "left_out": self._left_out,
            "capture": None if self._capture is None else self._capture.facts,
            "sinks": {
                sink.label: {
                    "state": sink.state.value,
                    "failure": None if sink.failure is None else sink.failure.to_json(),
                    "restarts": sink.restarts,
                    "batches": sink.batches,
                    "epoch": sink.epoch,
                    "seen_ms": sink.seen_ms,
                    "waits_for": sink.waits_for,
                }
                for sink in list(self._sinks)
            },
        }

    def _note_progress(self, *, now: bool = False) -> None:
        """Note in the journal what was delivered since the last note: each minute, or *now*."""
        if now or time.monotonic() - self._measured >= _JOURNAL_SECONDS:
            self._measured = time.monotonic()
            for sink in self._sinks:
                if sink.batches != self._noted.get(sink.label, 0):
                    self._noted[sink.label] = sink.batches
                    figures = {"epoch": sink.epoch, "batches": sink.batches, "rows": sink.rows}
                    self._journal.note("metric", {"sink": sink.label, **figures})

    def _beat(self) -> None:
        """Write the status again and again, whatever the supervising thread waits for."""
        while not self._ended.wait(max(_BEAT_SECONDS, self._board.poll_seconds)):
            self._write_status()

    def _write_status(self) -> None:
        with suppress(HeadwaterError, OSError):  # a place that cannot be written does not end the pipeline
            self._board.write(STATUS, json.dumps(self.facts()).encode())

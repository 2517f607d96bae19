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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headwater.backfill.control import status as query_status
from headwater.capture import TableState
from headwater.errors import HeadwaterError
from headwater.journal.errors import OwnedElsewhereError
from headwater.journal.owner import OwnerLock
from headwater.pipeline.capture_process import CaptureProcess
from headwater.pipeline.config import KEPT_KIND, DeriveSection, PipelineConfig, SinkSection, load, matching
from headwater.pipeline.derived_query import DerivedQuery
from headwater.pipeline.errors import AlreadyRunning, ConfigError, PipelineError
from headwater.pipeline.restarts import RestartPolicy
from headwater.pipeline.run_journal import RunJournal
from headwater.pipeline.sink_control import SinkControl, SinkRequest, SinkRequestKind, sink_request
from headwater.pipeline.sink_query import SinkQuery
from headwater.pipeline.spark_host import SparkHost
from headwater.pipeline.supervised_query import Note, SinkState, SupervisedQuery
from headwater.pipeline.tables import ChosenTables, captured_tables, choose_tables, sink_tables
from headwater.private_files import make_private, make_root
from headwater.spark.failure import Failure
from headwater.state.board import open_board
from headwater.state.location import local_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RUN_FOLDER: Final = "run"
LOCK_FILE: Final = "run.lock"
STATUS: Final = "status"
"""The record on the board of the pipeline store in which the process that runs the pipeline says how it is."""
_STEP_SECONDS: Final = 0.2
_TELL_SECONDS: Final = 0.5
_JOURNAL_SECONDS: Final = 60.0


def make_folders(config: PipelineConfig) -> None:
    """Create the local directories of the pipeline, private. :raises UnsafeDirectory: another user can write one."""
    for folder in (config.work, local_folder(config.store)):
        if folder is not None:
            make_root(folder)
    make_private(config.work / RUN_FOLDER)
    make_private(config.logs)


class CaptureKeeper:
    """Keeps the capture running; one thread."""

    def __init__(self, config: PipelineConfig, tables: tuple[str, ...], note: Note) -> None:
        self._config, self._tables, self._note = config, tables, note
        self._policy = RestartPolicy()
        self._process: CaptureProcess | None = None
        self._retry_at = 0.0
        self.restarts = 0
        self.failure: Failure | None = None
        self.has_failed = False

    @property
    def facts(self) -> dict[str, Any]:
        """What it tells of itself."""
        process = self._process
        told: dict[str, Any] = {"state": "down" if self.failure else "starting"}
        if process is not None:
            told = process.facts | {"pid": process.pid}
        told["process_restarts"] = self.restarts
        if self.has_failed:
            told["state"] = "failed"
        if self.failure is not None:
            told["last_error"], told["next_step"] = self.failure.message, self.failure.next_step
        return told

    def _running_tables(self) -> list[str]:
        """Those that go on: one that has stopped waits for a person, and does not keep the others from starting."""
        known = captured_tables(self._config.store)
        return [name for name in self._tables if name not in known or known[name].state is TableState.ACTIVE]

    def step(self) -> None:
        """Start it, or start it again."""
        if self.has_failed:
            return
        if self._process is None:
            if time.monotonic() >= self._retry_at:
                self._start()
            return
        failure = self._process.failure()
        if failure is not None:
            self._fail(failure)
        elif self._process.facts.get("epochs") or self._process.facts["state"] == "running":
            self.failure = None
            self._policy.started()
            self._policy.progressed()

    def _start(self) -> None:
        log = self._config.logs / "capture.log"
        try:
            self._process = CaptureProcess(self._config, self._running_tables(), log)
        except (HeadwaterError, OSError) as error:
            self._fail(Failure.of(error))

    def _fail(self, failure: Failure) -> None:
        self._process, self.failure = None, failure
        pause = self._policy.pause(failure)
        fields = {"part": "capture", "error": failure.kind, "text": str(failure)}
        if pause is None:
            self.has_failed = True
            self._note("notice", fields | {"event": "capture_failed"})
            return
        self.restarts += 1
        self._retry_at = time.monotonic() + pause
        self._note("notice", fields | {"event": "capture_restarts", "pause_seconds": round(pause, 1)})

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


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
        self._phases: dict[tuple[str, str], str] = {}
        self._told = self._measured = 0.0
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
        with ExitStack() as stack:
            stack.enter_context(self._lock())
            stack.callback(self._control.close)
            self._write_status()
            self._heart.start()
            if begun is not None:
                begun.set()
            self._host.begin()
            self._journal = RunJournal(self._config.work, self._config.name)
            try:
                self._supervise()
            except (HeadwaterError, OSError) as error:
                self.failure = Failure.of(error)
            finally:
                self._end()
        return self.failure

    def _lock(self) -> OwnerLock:
        try:
            return OwnerLock(self.run_folder / LOCK_FILE, str(self._config.work))
        except OwnedElsewhereError as error:
            raise AlreadyRunning(str(self._config.work), str(error.owner), error.owner.pid) from None

    def _supervise(self) -> None:
        chosen = self._choose()
        if chosen is None:
            return
        self._tables = chosen.names
        self._left_out = {name: " ".join(filter(None, why)) for name, why in chosen.left_out.items()}
        for name, reason in self._left_out.items():
            self._journal.note("notice", {"event": "table_left_out", "table": name, "text": reason})
        self._capture = CaptureKeeper(self._config, chosen.names, self._journal.note)
        self._capture.step()
        self._sinks = [self._query_of(section, chosen.names) for section in self._config.sink]
        self._sinks += [self._derived_of(section, chosen.names) for section in self._config.derive]
        self._tell()
        waiting = set(chosen.names)
        policy = RestartPolicy()
        while not self._stop.is_set():
            try:
                self._step(self._capture, waiting)
            except (HeadwaterError, OSError) as error:  # of this process itself: a full disk, for example
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

    def _step(self, capture: CaptureKeeper, waiting: set[str]) -> None:
        """Look after each part. :param waiting: the tables without a log so far."""
        capture.step()
        if waiting:
            waiting -= set(captured_tables(self._config.store))
        if not self._host.is_alive:
            self._host.forget()
            for sink in self._sinks:
                sink.lost()
        if not waiting:
            for sink in self._sinks:
                sink.step()
            self.state = "running"
        if any(sink.batches for sink in self._sinks):
            self._host.prepare_next_start()
        self._serve()
        self._tell()

    def _serve(self) -> None:
        """Do what was asked of the sinks."""
        for request in self._control.requests():
            try:
                result = self._serve_one(sink_request(request))
            except HeadwaterError as error:
                self._control.answer(request, error)
            except Exception as error:  # the pipeline goes on, whatever one sink cannot do
                problem = f"It could not be done: {type(error).__name__}."
                self._control.answer(request, PipelineError(problem, next_step="Look: headwater status"))
            else:
                self._control.answer(request, None, result)

    def _serve_one(self, request: SinkRequest) -> dict[str, Any]:
        sink = next((one for one in self._sinks if one.label == request.sink), None)
        if request.kind is SinkRequestKind.ADD and sink is None:
            self._add(request.sink)
            return {"state": SinkState.STARTING.value}
        if sink is None:
            raise ConfigError(f"The pipeline has no sink {request.sink!r}.", key="sink")
        return sink.serve(request)

    def _add(self, label: str) -> None:
        if self._file is None:
            raise ConfigError("The pipeline was not started from a file.", key="sink", next_step="Start it again.")
        config = load(self._file)
        section = next((one for one in config.parts if one.label == label), None)
        if section is None:
            raise ConfigError(f"{self._file} has no sink {label!r}.", key="sink")
        if isinstance(section, DeriveSection):
            self._sinks.append(self._derived_of(section, self._tables))
            self._config = self._config.model_copy(update={"derive": [*self._config.derive, section]})
            self._journal.note("notice", {"event": "derive_added", "derive": label})
            return
        made = self._query_of(section, self._tables)
        self._config = self._config.model_copy(update={"sink": [*self._config.sink, section]})
        self._sinks.append(made)
        self._journal.note("notice", {"event": "sink_added", "sink": label})

    def _query_of(self, section: SinkSection, names: tuple[str, ...]) -> SinkQuery:
        found = sink_tables(self._config, section, names, self._left_out)
        options = self._config.query_options(section, found)
        query = SinkQuery(self._config, section, options, self._host, self._journal.note)
        query.join(self._control)
        return query

    def _derived_of(self, section: DeriveSection, names: tuple[str, ...]) -> DerivedQuery:
        home = self._config.home
        takers = [sink for sink in self._config.sink if sink.kind == KEPT_KIND]
        kept = [name for sink in takers for name in matching(sink.tables, names, home)]
        missing = next((name for name in section.tables if name not in kept), None)
        if missing is not None:
            raise ConfigError(
                f"The derived table {section.label!r} is made of {missing}, which is not kept.",
                key="derive.tables",
                next_step=f"Kept are {', '.join(kept) or 'none'}.",
            )
        query = DerivedQuery(self._config, section, self._host, self._journal.note)
        query.join(self._control)
        return query

    def _choose(self) -> ChosenTables | None:
        """The tables; ``None`` when it was stopped before the database answered."""
        policy = RestartPolicy()
        while not self._stop.is_set():
            try:
                self._control.open()
                chosen = choose_tables(self._config)
            except (HeadwaterError, OSError) as error:
                self.failure = Failure.of(error)
                pause = policy.pause(self.failure)
                if pause is None:
                    return None
                self._tell()
                self._stop.wait(pause)
            else:
                self.failure = None
                return chosen
        self.failure = None  # it was told to stop: that is no failure
        return None

    def _is_over(self) -> bool:
        """Whether nothing is left that a restart could help."""
        if self._capture is not None and self._capture.has_failed:
            self.failure = self._capture.failure
            return True
        if all(sink.state is SinkState.FAILED for sink in self._sinks):
            self.failure = self._sinks[0].failure
            return True
        return False

    def _end(self) -> None:
        self.state = "stopping"
        self._tell(force=True)
        with ExitStack() as stack:  # whatever goes wrong: no process is left behind
            stack.callback(self._host.stop)
            if self._capture is not None:
                stack.callback(self._capture.stop)
            for sink in self._sinks:
                sink.ask_to_stop()
            for sink in self._sinks:
                stack.callback(sink.stop)
        failed = [sink.failure for sink in self._sinks if sink.state is SinkState.FAILED and sink.failure is not None]
        if self.failure is None and failed:
            self.failure = failed[0]
        self._journal.end(None if self.failure is None else str(self.failure))
        self.state = "failed" if self.failure is not None else "stopped"
        self._ended.set()
        self._heart.join()
        self._write_status()
        self._tell(force=True)

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

    def _tell(self, *, force: bool = False) -> None:
        """Note in the journal what has changed."""
        now = time.monotonic()
        if force or now - self._told >= _TELL_SECONDS:
            self._told = now
            self._note_phases()
        if now - self._measured >= _JOURNAL_SECONDS:
            self._measured = now
            for sink in self._sinks:
                if sink.epoch:
                    self._journal.metric({"sink": sink.label, "epoch": sink.epoch, "batches": sink.batches})

    def _beat(self) -> None:
        """Write the status again and again, whatever the supervising thread waits for."""
        while not self._ended.wait(max(_TELL_SECONDS, self._board.poll_seconds)):
            self._write_status()

    def _write_status(self) -> None:
        with suppress(HeadwaterError, OSError):  # a place that cannot be written does not end the pipeline
            self._board.write(STATUS, json.dumps(self.facts()).encode())

    def _note_phases(self) -> None:
        for section in self._config.sink:
            told = query_status(self._config.state, self._config.query(section)) if self._sinks else None
            for name, table in ({} if told is None else told.value["tables"]).items():
                before = self._phases.get((section.label, name))
                if before != table["phase"]:
                    self._phases[section.label, name] = table["phase"]
                    fields = {"sink": section.label, "table": name, "from": before, "to": table["phase"]}
                    self._journal.note("phase_changed", fields)

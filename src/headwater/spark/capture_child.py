"""The capture as a child process, and its keeper: for pipelines, and for Spark streams of tables not captured yet.

Its settings go through its standard input, so that no password is in the list of processes. It reports how it is, two
times a second, which epoch it has sealed, at once, and why it ended, as lines of JSON.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from headwater.capture import Capture, CaptureOptions, CaptureState
from headwater.capture.options import OnRewrite
from headwater.control.command import NoteEvent
from headwater.control.request import inbox_of
from headwater.databases.timeouts import TIMEOUT_SECONDS
from headwater.errors import HeadwaterError
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.open import open_source
from headwater.sources.table import SpecialValues
from headwater.spark.failure import Failure, Remedy, RestartPolicy
from headwater.state.announcements import Announcer
from headwater.stopping import stop_on_signals
from headwater.system.child import Child, die_with_parent, end_with_parent, received, report
from headwater.system.frames import traceback_of
from headwater.system.memory import keep_freed_memory

_LINE_SECONDS: Final = 0.5
_JOIN_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """What a capture gets.

    :ivar spill: where large transactions wait for their commit.
    :ivar parent: the process with which it is killed; ``None``: it stops in order when its parent or its input ends.
    """

    dsn: str = field(repr=False)
    store: str
    spill: str
    tables: Sequence[str]
    slot: str = "headwater"
    publication: str = "headwater"
    poll: bool = False
    special_values: Mapping[str, SpecialValues] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    timeout_seconds: float = TIMEOUT_SECONDS
    options: CaptureOptions = field(default_factory=CaptureOptions)
    parent: int | None = None

    def to_json(self) -> dict[str, Any]:
        options = self.options
        words = {"schema_policy": options.schema_policy.value, "on_rewrite": options.on_rewrite.value}
        return asdict(self) | {
            "tables": list(self.tables),
            "special_values": {column: policy.value for column, policy in self.special_values.items()},
            "options": asdict(options) | words,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        options = dict(value["options"])
        words = {
            "schema_policy": SchemaPolicy(options["schema_policy"]),
            "on_rewrite": OnRewrite(options["on_rewrite"]),
        }
        special_values = {column: SpecialValues(policy) for column, policy in value["special_values"].items()}
        return cls(**{**value, "special_values": special_values, "options": CaptureOptions(**(options | words))})


class CaptureProcess:
    """One run of the capture; it is not started again. Start it from a thread that lives as long as it should."""

    def __init__(self, settings: CaptureSettings, log: Path | None = None) -> None:
        self._log = log
        self.facts: dict[str, Any] = {"state": "starting"}
        self._commands: deque[dict[str, Any]] = deque()
        self._failure: Failure | None = None
        self._trace = ""
        self._stopping = False
        self._child = Child.of_module(__name__, settings.to_json(), log=log)
        self._announcer = Announcer(settings.store)
        lines = self._child.lines()
        self._thread = threading.Thread(target=self._listen, args=(lines,), name="headwater-capture", daemon=True)
        self._thread.start()

    def take_commands(self) -> list[dict[str, Any]]:
        """What the capture was asked since the last call, as entries of the journal."""
        taken = []
        while self._commands:
            taken.append(self._commands.popleft())
        return taken

    @property
    def pid(self) -> int:
        return self._child.pid

    def failure(self) -> Failure | None:
        """Why it ended; ``None`` while it runs, and after :meth:`stop`."""
        code = self._child.exit_code
        if code is None or self._stopping:
            return None
        self._child.close()
        self._thread.join(_JOIN_SECONDS)
        if self._failure is not None:
            return replace(self._failure, trace=self._trace)
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        remedy = Remedy.RETRY if code < 0 else Remedy.UNSURE
        next_step = "Run: headwater capture, which shows more." if self._log is None else f"Look at {self._log}."
        return Failure("CaptureEnded", remedy, f"The capture ended {how}.", next_step, self._trace)

    def stop(self) -> None:
        """Let it seal what is whole, and end."""
        self._stopping = True
        self._child.stop()
        self._thread.join(_JOIN_SECONDS)

    def _listen(self, lines: Iterator[dict[str, Any]]) -> None:
        with closing(self._announcer):
            for line in lines:
                if "sealed" in line:
                    self._announcer.announce(line["sealed"])
                elif "command" in line:
                    self._commands.append(line["command"])
                elif "trace" in line:
                    self._trace = line["trace"]
                elif "failure" in line:
                    self._failure = Failure.from_json(line["failure"])
                else:
                    self.facts = line


class CaptureKeeper:
    """Keeps a capture running; one thread, which the capture does not outlive.

    :param settings: of the process that is started now; ``None``: they are not known yet.
    :param log: gets what it writes to its standard error.
    :param note: notes for the journal when it fails.
    """

    def __init__(
        self,
        settings: Callable[[], CaptureSettings | None],
        *,
        log: Path | None = None,
        note: Callable[[str, dict[str, Any]], None] = lambda *_: None,
    ) -> None:
        self._settings, self._log, self._note = settings, log, note
        self._policy = RestartPolicy()
        self._process: CaptureProcess | None = None
        self._retry_at = 0.0
        self.restarts = 0
        self.failure: Failure | None = None
        self.has_failed = False

    @property
    def pid(self) -> int | None:
        """``None``: no process was started, or the last one has ended."""
        return None if self._process is None else self._process.pid

    @property
    def facts(self) -> dict[str, Any]:
        """How it is."""
        process = self._process
        facts: dict[str, Any] = {"state": "down" if self.failure else "starting"}
        if process is not None:
            facts = process.facts | {"pid": process.pid}
        facts["process_restarts"] = self.restarts
        if self.has_failed:
            facts["state"] = "failed"
        if self.failure is not None:
            facts["last_error"], facts["next_step"] = self.failure.message, self.failure.next_step
        return facts

    def take_commands(self) -> list[dict[str, Any]]:
        """What it was asked since the last call, as entries of the journal."""
        return [] if self._process is None else self._process.take_commands()

    def start(self) -> None:
        """Start a process, if its settings are known."""
        settings = self._settings()
        if settings is not None:
            self._process = CaptureProcess(settings, self._log)

    def check(self) -> Failure | None:
        """Why the process has ended, once; ``None`` while it runs."""
        if self._process is None:
            return None
        failure = self._process.failure()
        if failure is not None:
            self._process, self.failure = None, failure
        elif self._process.facts.get("epochs") or self._process.facts["state"] == "running":
            self.failure = None
            self._policy.started()
            self._policy.progressed()
        return failure

    def step(self) -> None:
        """Start it, or start it again when that is due."""
        if self.has_failed:
            return
        failure = None
        if self._process is not None:
            failure = self.check()
        elif time.monotonic() >= self._retry_at:
            try:
                self.start()
            except (HeadwaterError, OSError) as error:
                self.failure = failure = Failure.of(error)
        if failure is not None:
            self._plan_restart(failure)

    def _plan_restart(self, failure: Failure) -> None:
        pause = self._policy.pause(failure)
        fields = {"part": "capture", "error": failure.kind, "text": str(failure), "trace": failure.trace}
        if pause is None:
            self.has_failed = True
            self._note("notice", fields | {"event": "capture_failed"})
            return
        self.restarts += 1
        self._retry_at = time.monotonic() + pause
        self._note("notice", fields | {"event": "capture_restarts", "pause_seconds": round(pause, 1)})

    def stop(self) -> None:
        """Stop the process, if one runs."""
        if self._process is not None:
            self._process.stop()


def capture_facts(running: Capture) -> dict[str, Any]:
    """How a capture is, for others."""
    seen, now_ms, lag = running.statistics, time.time_ns() // 1_000_000, running.lag_seconds()
    return {
        "beat_ms": seen.stepped_us // 1000 if running.state is CaptureState.RUNNING else now_ms,
        "state": running.state.value,
        "source": running.source.name,
        "rows": seen.rows,
        "transactions": seen.transactions,
        "epochs": seen.epochs,
        "epoch": seen.epoch,
        "commit_time_us": seen.commit_time_us,
        "lag_bytes": seen.behind_bytes,
        "lag_seconds": None if lag is None else round(lag, 3),
        "wal_held_bytes": seen.held_bytes,
        "spilled_bytes": seen.spilled_bytes,
        "buffer": None if seen.buffer is None else asdict(seen.buffer),
        "restarts": seen.restarts,
        "stopped_tables": dict(seen.stopped_tables),
        "checked_time": seen.checked_time,
        "last_error": seen.last_error,
    }


class _Reporter:
    """Writes lines to the parent in its own thread: a parent that does not read them holds nothing up."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._news = threading.Event()
        self._epoch, self._has_ended = 0, False

    def sealed(self, epoch: int) -> None:
        self._epoch = epoch
        self._news.set()

    def end(self) -> None:
        self._has_ended = True
        self._news.set()

    def run(self, running: Capture) -> None:
        due = time.monotonic()
        while not self._has_ended:
            left = due - time.monotonic()
            if left <= 0:
                due = time.monotonic() + _LINE_SECONDS
                report(capture_facts(running))
                for served in inbox_of(self._store).take_served():
                    if not isinstance(served.request.command, NoteEvent):  # a task left it, not a person
                        report({"command": served.to_json()})
            elif self._news.wait(left):
                self._news.clear()
                report({"sealed": self._epoch})


def main() -> int:
    """The process: settings from standard input, until it is asked to stop."""
    settings = CaptureSettings.from_json(received())
    if settings.parent is not None:
        die_with_parent(settings.parent)
    keep_freed_memory()
    reporter = _Reporter(settings.store)
    try:
        source = open_source(
            settings.dsn,
            spill=Path(settings.spill),
            schema_policy=settings.options.schema_policy,
            special_values=settings.special_values,
            slot=settings.slot,
            publication=settings.publication,
            poll=settings.poll,
            columns=settings.columns,
            timeout_seconds=settings.timeout_seconds,
        )
        running = Capture(source, settings.store, settings.tables, settings.options, on_sealed=reporter.sealed)
        if settings.parent is None:
            end_with_parent(running.stop)
        else:
            stop_on_signals(running.stop, signal.SIGTERM)
        thread = threading.Thread(target=reporter.run, args=(running,), daemon=True)
        thread.start()
        try:
            running.run()
        finally:
            reporter.end()
            thread.join(_JOIN_SECONDS)
            report(capture_facts(running))
    except Exception as error:
        report({"trace": traceback_of(error)})
        if not isinstance(error, HeadwaterError):
            raise
        report({"failure": Failure.of(error).to_json()})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

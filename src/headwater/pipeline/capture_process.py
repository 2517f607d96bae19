"""The capture of a pipeline as a process of its own: it outlives Spark's queries and dies with the pipeline.

Its settings go through its standard input, so that no password is in the list of processes. It tells how it is, two
times a second, which epoch it has sealed, at once, and why it ended, as lines of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from headwater.capture import Capture, CaptureOptions, CaptureState
from headwater.capture.options import OnRewrite
from headwater.control.command import NoteEvent
from headwater.control.request import inbox_of
from headwater.errors import HeadwaterError
from headwater.pipeline.config import PipelineConfig
from headwater.sources.evolution import SchemaPolicy
from headwater.sources.open import open_source
from headwater.sources.table import SpecialValues
from headwater.spark.failure import Failure, Remedy
from headwater.state.announcements import Announcer
from headwater.stopping import stop_on_signals
from headwater.system.files import open_private
from headwater.system.frames import traceback_of
from headwater.system.memory import keep_freed_memory

_LINE_SECONDS: Final = 0.5
_STOP_SECONDS: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1


class CaptureProcess:
    """One run of the capture; it is not started again. Start it from a thread that lives as long as it should."""

    def __init__(self, config: PipelineConfig, tables: Sequence[str], log: Path) -> None:
        self._log = log
        self.facts: dict[str, Any] = {"state": "starting"}
        self._commands: deque[dict[str, Any]] = deque()
        self._failure: Failure | None = None
        self._trace = ""
        self._stopping = False
        with open_private(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "headwater.pipeline.capture_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(_settings(config, tables)))
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended, and said why
        self._announcer = Announcer(config.store)
        self._thread = threading.Thread(target=self._listen, name="headwater-capture", daemon=True)
        self._thread.start()

    def take_commands(self) -> list[dict[str, Any]]:
        """What the capture was asked since the last call, as entries of the journal."""
        taken = []
        while self._commands:
            taken.append(self._commands.popleft())
        return taken

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def failure(self) -> Failure | None:
        """Why it ended; ``None`` while it runs, and when it was told to end."""
        if self.is_alive or self._stopping:
            return None
        self._thread.join(5)
        if self._failure is not None:
            return replace(self._failure, trace=self._trace)
        code = self._process.returncode
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        remedy = Remedy.RETRY if code < 0 else Remedy.UNSURE
        return Failure("CaptureEnded", remedy, f"The capture ended {how}.", f"Look at {self._log}.", self._trace)

    def stop(self) -> None:
        """Let it seal what is whole, and end."""
        self._stopping = True
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(5)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout, closing(self._announcer):
            for line in self._process.stdout:
                try:
                    told = json.loads(line)
                except ValueError:
                    continue
                if "sealed" in told:
                    self._announcer.announce(told["sealed"])
                elif "command" in told:
                    self._commands.append(told["command"])
                elif "trace" in told:
                    self._trace = told["trace"]
                elif "failure" in told:
                    self._failure = Failure.from_json(told["failure"])
                else:
                    self.facts = told


_OPTIONS: Final = (
    "epoch_seconds",
    "epoch_rows",
    "epoch_bytes",
    "heartbeat_seconds",
    "retry_seconds",
    "schema_check_seconds",
)


def _settings(config: PipelineConfig, tables: Sequence[str]) -> dict[str, Any]:
    source = config.source
    options = config.capture_options
    return {
        "parent": os.getpid(),
        "dsn": config.dsn,
        "store": config.store,
        "spill": str(config.work / "spill"),
        "tables": list(tables),
        "slot": source.slot,
        "publication": source.publication,
        "poll": source.poll,
        "special_values": {column: policy.value for column, policy in config.special_values.items()},
        "columns": config.columns,
        "schema_policy": source.schema_policy,
        "on_rewrite": source.on_rewrite,
        "timeout_seconds": source.timeout_seconds,
        "options": {name: getattr(options, name) for name in _OPTIONS},
    }


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


def _die_with(parent: int) -> None:
    """Be killed when the thread that started us ends: a capture that nobody supervises must not stay."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


class _Teller:
    """Writes lines to the supervisor in its own thread: one that does not read them holds nothing up."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._news = threading.Event()
        self._epoch, self._ended = 0, False

    def sealed(self, epoch: int) -> None:
        self._epoch = epoch
        self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    def run(self, running: Capture) -> None:
        due = time.monotonic()
        while not self._ended:
            left = due - time.monotonic()
            if left <= 0:
                due = time.monotonic() + _LINE_SECONDS
                print(json.dumps(capture_facts(running)), flush=True)
                for served in inbox_of(self._store).take_served():
                    if not isinstance(served.request.command, NoteEvent):  # a task left it, not a person
                        print(json.dumps({"command": served.to_json()}), flush=True)
            elif self._news.wait(left):
                self._news.clear()
                print(json.dumps({"sealed": self._epoch}), flush=True)


def main() -> int:
    """The process: settings from standard input, until it is told to stop."""
    settings = json.load(sys.stdin)
    _die_with(settings["parent"])
    keep_freed_memory()
    news = _Teller(settings["store"])
    try:
        source = open_source(
            settings["dsn"],
            spill=Path(settings["spill"]),
            schema_policy=SchemaPolicy(settings["schema_policy"]),
            special_values={column: SpecialValues(policy) for column, policy in settings["special_values"].items()},
            slot=settings["slot"],
            publication=settings["publication"],
            poll=settings["poll"],
            columns=settings["columns"],
            timeout_seconds=settings["timeout_seconds"],
        )
        options = CaptureOptions(
            **settings["options"],
            schema_policy=SchemaPolicy(settings["schema_policy"]),
            on_rewrite=OnRewrite(settings["on_rewrite"]),
        )
        running = Capture(source, settings["store"], settings["tables"], options, on_sealed=news.sealed)
        stop_on_signals(running.stop, signal.SIGTERM)
        teller = threading.Thread(target=news.run, args=(running,), daemon=True)
        teller.start()
        try:
            running.run()
        finally:
            news.end()
            teller.join(5)
            print(json.dumps(capture_facts(running)), flush=True)
    except Exception as error:
        print(json.dumps({"trace": traceback_of(error)}), flush=True)
        if not isinstance(error, HeadwaterError):
            raise
        print(json.dumps({"failure": Failure.of(error).to_json()}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The journal of a pipeline: what its runs did, in the work folder. Where it cannot be written, the pipeline goes on.

A run is the entries from one `run_started` to the next. Its segment also holds the runs before it; one that is long is
compacted when a run starts, so that a start reads little.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from headwater.control.request import user_name
from headwater.errors import HeadwaterError
from headwater.journal.entry import Entry
from headwater.journal.fs_store import FsStore
from headwater.journal.run_log import RunLog
from headwater.journal.run_state import RunKind
from headwater.system.owner_lock import OwnerLock

FOLDER: Final = "journal"
_LONG: Final = 10_000
"""Entries; a longer segment is compacted when a run starts."""
_CARRIED: Final = 100
_LOOK_SECONDS: Final = 0.2
_log = logging.getLogger(__name__)


class RunJournal:
    """Writes one run, in the newest segment of the pipeline's journal, or in a new one. Safe for threads."""

    def __init__(self, work: Path, pipeline: str) -> None:
        self._store = FsStore(work / FOLDER, durability="flush")
        self._run: RunLog | None = None
        self._begin = 0  # number of the entry that starts the run
        self._ownership: OwnerLock | None = None  # keeps `headwater journal prune` away
        try:
            self._run = self._open(pipeline)
            self._ownership = self._store.own(self._run.session)
            self._run.begin("run", pid=os.getpid(), started_by=user_name())
            self._begin = self._run.head.seq
        except (HeadwaterError, OSError) as error:
            _log.warning("the journal of %s is not written: %s", pipeline, error)

    def _open(self, pipeline: str) -> RunLog:
        for session in self._store.list_sessions(limit=1):
            for segment in self._store.list_segments(session, limit=1):
                try:
                    run = RunLog(self._store, session, segment)
                    if run.head.seq > _LONG:
                        run.compact(run.state.newest(_CARRIED))
                except HeadwaterError as error:
                    _log.warning("the journal continues in a new session: %s", error)
                else:
                    return run
        return RunLog.start(self._store, pipeline)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write one entry.

        :param fields: a traceback in `trace` goes to the trace of the run, with the number of the entry.
        """
        run, trace = self._run, fields.get("trace")
        if run is None:
            return
        try:
            entry = run.record(kind, {name: value for name, value in fields.items() if name != "trace"})
        except HeadwaterError as error:
            _log.warning("an entry of the journal was dropped: %s", type(error).__name__)
            return
        if trace:
            known = {"part": _part(fields) or "pipeline", "event": fields.get("event", kind)}
            known |= {"run": self._begin, "seq": entry.seq, "error": fields.get("error", ""), "trace": trace}
            self._store.append_trace(run.session, run.segment, known)

    def command(self, name: str, asked_by: str, detail: Mapping[str, Any], problem: str | None = None) -> None:
        """Note a command that was applied, or why it was not. :param asked_by: ``user@host``."""
        fields = {"name": name, "asked_by": asked_by, "detail": dict(detail)}
        self.note(RunKind.COMMAND, fields if problem is None else fields | {"problem": problem})

    def end(self, failure: str | None, trace: str = "") -> None:
        """End the run; later notes are dropped. :param trace: of the error that ended it."""
        if failure is None:
            self.note(RunKind.RUN_COMPLETED, {"interrupted": False})
        else:
            self.note(RunKind.RUN_FAILED, {"text": failure, "trace": trace})
        self._run = None
        if self._ownership is not None:
            self._ownership.release()
        self._store.close()


@dataclass(frozen=True, slots=True)
class JournalPosition:
    """One entry of a journal."""

    session: str
    segment: str
    seq: int


@dataclass(frozen=True, slots=True)
class RunError:
    """Why a part of a pipeline was started again, or failed.

    :ivar part: label of a sink or derived table, ``capture``, or ``pipeline``: the run itself.
    """

    at_ms: int
    part: str
    event: str
    text: str


@dataclass(frozen=True, slots=True)
class RunTrace:
    """Where an error was raised that started a part of a pipeline again, or ended it.

    :ivar seq: number of the entry that notes the error. :ivar part: as of a :class:`RunError`.
    """

    at_ms: int
    seq: int
    part: str
    event: str
    error: str
    trace: str


@dataclass(frozen=True, slots=True)
class RunCommand:
    """A command that a pipeline got. :ivar asked_by: ``user@host``. :ivar problem: why it was refused."""

    at_ms: int
    name: str
    asked_by: str
    detail: Mapping[str, Any]
    problem: str | None


@dataclass(slots=True)
class Run:
    """One run of a pipeline.

    :ivar number: 1 is the oldest in the journal. :ivar position: of its first entry.
    :ivar started_by: ``user@host``. :ivar state: ``running``, ``completed``, ``failed`` or ``interrupted``.
    :ivar rows: delivered by each sink and derived table, as noted last (every minute and at the end).
    :ivar restarts: of the capture and of deliveries.
    """

    number: int
    position: JournalPosition
    begin_ms: int
    started_by: str = ""
    end_ms: int | None = None
    state: str = "interrupted"
    rows: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    errors: list[RunError] = field(default_factory=list)
    commands: list[RunCommand] = field(default_factory=list)

    @property
    def total_rows(self) -> int:
        return sum(self.rows.values())

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self) | {"total_rows": self.total_rows}

    def add(self, entry: Entry) -> None:
        """Count one entry more; a person can have written one of any shape."""
        at_ms, text = entry.ts or 0, functools.partial(_text, entry.fields)
        match entry.kind:
            case RunKind.METRIC if isinstance(entry.fields.get("rows"), int):
                self.rows[text("sink")] = entry.fields["rows"]
            case RunKind.COMMAND:
                detail, problem = entry.fields.get("detail"), entry.fields.get("problem")
                known = detail if isinstance(detail, dict) else {}
                refused = None if problem is None else str(problem)
                self.commands.append(RunCommand(at_ms, text("name"), text("asked_by"), known, refused))
            case RunKind.NOTICE:
                self.restarts += text("event").endswith("_restarts")
                if "error" in entry.fields:
                    self.errors.append(RunError(at_ms, _part(entry.fields), text("event"), text("text")))
            case RunKind.RUN_COMPLETED:
                self.state, self.end_ms = "completed", at_ms
            case RunKind.RUN_FAILED:
                self.state, self.end_ms = "failed", at_ms
                self.errors.append(RunError(at_ms, "pipeline", "run_failed", text("text")))


def _text(fields: Mapping[str, Any], name: str) -> str:
    return str(fields.get(name, ""))


def _part(fields: Mapping[str, Any]) -> str:
    """The part of a pipeline that an entry is about."""
    return _text(fields, "sink") or _text(fields, "derive") or _text(fields, "part")


def read_runs(work: Path, *, is_running: bool) -> list[Run]:
    """The runs in the journal of the pipeline whose work folder is *work*, the oldest first.

    :param is_running: a process runs the pipeline now. :raises CorruptError: the journal is damaged.
    """
    runs: list[Run] = []
    with FsStore(work / FOLDER) as store:
        for session in reversed(store.list_sessions()):
            for segment in reversed(store.list_segments(session)):
                is_open = False  # the run before is of another segment
                for entry in store.iter(session, segment):
                    if entry.kind == RunKind.RUN_STARTED:
                        position = JournalPosition(session, segment, entry.seq)
                        started_by = str(entry.fields.get("started_by", ""))
                        runs.append(Run(len(runs) + 1, position, entry.ts or 0, started_by))
                        is_open = True
                    elif is_open:
                        runs[-1].add(entry)
    if is_running and runs and runs[-1].end_ms is None:
        runs[-1].state = "running"
    return runs


def run_traces(work: Path, run: Run) -> list[RunTrace]:
    """The tracebacks of *run*, the oldest first. The newest 24 MB of its segment are kept."""
    traces = []
    with FsStore(work / FOLDER) as store:
        for record in store.iter_trace(run.position.session, run.position.segment):
            at_ms, seq = record.get("ts"), record.get("seq")
            if record.get("run") == run.position.seq and isinstance(at_ms, int) and isinstance(seq, int):
                texts = (_text(record, name) for name in ("part", "event", "error", "trace"))
                traces.append(RunTrace(at_ms, seq, *texts))
    return traces


def run_entries(work: Path, run: Run, *, follow: bool = False) -> Iterator[Entry]:
    """The entries of *run*, the oldest first.

    :param follow: wait for later ones, until the run ends or another one starts.
    """
    position, ends = run.position, (RunKind.RUN_COMPLETED, RunKind.RUN_FAILED)
    seq = position.seq
    with FsStore(work / FOLDER) as store:
        while True:
            for entry in store.iter(position.session, position.segment, from_seq=seq):
                if entry.kind == RunKind.RUN_STARTED and entry.seq > position.seq:
                    return
                yield entry
                seq = entry.seq + 1
                if entry.kind in ends:
                    return
            newest = store.list_segments(store.list_sessions(limit=1)[0], limit=1)
            if not follow or newest != [position.segment]:
                return
            time.sleep(_LOOK_SECONDS)

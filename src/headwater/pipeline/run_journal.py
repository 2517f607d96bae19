"""The journal of a pipeline: what its runs did, kept beside its store. Where it cannot be written, nobody stops."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from headwater.errors import HeadwaterError
from headwater.journal import FsStore, RunLog
from headwater.journal.run_state import RunKind

FOLDER: Final = "journal"
_log = logging.getLogger(__name__)


class RunJournal:
    """Goes on in the newest segment of the pipeline's session, or begins one; one thread."""

    def __init__(self, work: Path, pipeline: str) -> None:
        self._store = FsStore(work / FOLDER, durability="flush")
        self._run: RunLog | None = None
        try:
            self._run = self._open(pipeline)
            self._run.begin("run")
        except (HeadwaterError, OSError) as error:
            _log.warning("the journal of %s is not written: %s", pipeline, error)

    def _open(self, pipeline: str) -> RunLog:
        for session in self._store.list_sessions(limit=1):
            for segment in self._store.list_segments(session, limit=1):
                try:
                    return RunLog(self._store, session, segment)
                except HeadwaterError as error:
                    _log.warning("the journal goes on in a new session: %s", error)
        return RunLog.start(self._store, pipeline)

    def note(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write one entry."""
        if self._run is not None:
            try:
                self._run.record(kind, fields)
            except HeadwaterError as error:
                _log.warning("an entry of the journal was dropped: %s", type(error).__name__)

    def metric(self, fields: Mapping[str, Any]) -> None:
        """Write figures."""
        if self._run is not None:
            self._run.metric(fields)

    def end(self, failure: str | None) -> None:
        """The run is over; what still comes is not written."""
        if failure is None:
            self.note(RunKind.RUN_COMPLETED, {"interrupted": False})
        else:
            self.note(RunKind.RUN_FAILED, {"text": failure})
        self._run = None
        self._store.close()

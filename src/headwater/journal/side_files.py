"""What both durable stores keep in files beside their entries: the owner locks of sessions, and traces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headwater.journal import files
from headwater.journal.ids import check_id
from headwater.journal.owner import Owner, OwnerLock, current_owner, forget_lock
from headwater.journal.store import Store
from headwater.journal.trace import TraceFiles


class StoreWithSideFiles(Store):
    """A store that has a folder for them."""

    _beside: Path
    _traces: TraceFiles

    def own(self, session: str) -> OwnerLock:
        check_id(session, "session")
        directory = self._beside / "owners"
        files.make_directory(directory)
        return OwnerLock(directory / f"{session}.lock", f"Session {session}")

    def owner(self, session: str) -> Owner | None:
        return current_owner(self._beside / "owners" / f"{check_id(session, 'session')}.lock")

    def append_trace(self, session: str, segment: str, record: Mapping[str, Any]) -> bool:
        check_id(session, "session")
        check_id(segment, "segment")
        return self._traces.append(session, segment, record)

    def iter_trace(self, session: str, segment: str) -> Iterator[dict[str, Any]]:
        check_id(session, "session")
        check_id(segment, "segment")
        return self._traces.iter(session, segment)

    def _forget_side_files(self, session: str) -> None:
        forget_lock(self._beside / "owners" / f"{session}.lock")
        self._traces.remove_session(session)

"""Debug records beside the log: best effort, size-capped, rotated; they can never hurt the log.

Traces live in their own directory and are not synced. Whatever goes wrong is logged once per segment and the record is
dropped. A trace without a log is possible and makes no session or segment appear in a listing. One process writes the
traces of a session: the one that writes its runs.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headwater.system.files import make_private, open_private

_KEPT = 2
_log = logging.getLogger(__name__)


class TraceFiles:
    """`{root}/{session}/{segment}.jsonl`, with `.1.jsonl` and `.2.jsonl` older."""

    def __init__(self, root: Path, *, max_bytes: int = 8 << 20) -> None:
        self._root, self._max_bytes = root, max_bytes
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def _path(self, session: str, segment: str, number: int = 0) -> Path:
        return self._root / session / (f"{segment}.{number}.jsonl" if number else f"{segment}.jsonl")

    def append(self, session: str, segment: str, record: Mapping[str, Any]) -> bool:
        """Write *record*; False when it was dropped."""
        path = self._path(session, segment)
        try:
            text = json.dumps({"ts": time.time_ns() // 1_000_000, **record}, ensure_ascii=False, separators=(",", ":"))
            data = text.encode(errors="replace") + b"\n"
            with self._lock:
                for directory in (self._root.parent, self._root, path.parent):
                    make_private(directory)
                if path.exists() and path.stat().st_size + len(data) > self._max_bytes:
                    for number in range(_KEPT, 0, -1):
                        older = self._path(session, segment, number - 1)
                        if older.exists():
                            older.replace(self._path(session, segment, number))
                with open_private(path, "ab", buffering=0) as file:
                    file.write(data)
        except Exception as error:  # best effort is the contract: nothing may reach the caller
            if segment not in self._warned:
                self._warned.add(segment)
                _log.warning("trace of segment %s dropped: %s", segment, type(error).__name__)
            return False
        return True

    def iter(self, session: str, segment: str) -> Iterator[dict[str, Any]]:
        """What is kept, oldest first; lines that cannot be read are left out."""
        for number in range(_KEPT, -1, -1):
            try:
                data = self._path(session, segment, number).read_bytes()
            except OSError:
                continue
            for line in data.split(b"\n"):
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    yield record

    def remove_session(self, session: str) -> None:
        """Forget all traces of a session."""
        shutil.rmtree(self._root / session, ignore_errors=True)
